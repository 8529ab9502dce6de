"""The arguments of a call of the model: tokens, mask and positions, checked before the cache acts.

The hook of the model's forward passes them to the cache. Blocks are found by tokens alone, so all
other input that changes keys and values is refused: embeddings and images instead of tokens,
positions that do not match the tokens, pads that are not on the left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvcache.base.errors import RequestError, shown

_CONTENT_BESIDE_TOKENS = ("inputs_embeds", "pixel_values", "pixel_values_videos", "input_features")

_BY_COLUMN = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids")
"""Arguments with a value for each new column, in their last dimension."""


def left_pads(attention_mask: torch.Tensor) -> list[int]:
    """Return the pads of each row, all on the left.

    Raises:
        RequestError: a row has a pad behind a token.
    """
    mask = attention_mask.bool()
    pads = mask.shape[1] - mask.sum(dim=1)
    columns = torch.arange(mask.shape[1], device=mask.device)[None]
    wrong = torch.nonzero((mask != (columns >= pads[:, None])).any(dim=1)).flatten().tolist()
    if wrong:
        raise RequestError(
            f"row {wrong[0]} of the attention mask is {shown(mask[wrong[0]].long().tolist())}: pad "
            "on the left only (tokenizer.padding_side = 'left')"
        )
    return [int(pad) for pad in pads.tolist()]


@dataclass(frozen=True)
class ModelCall:
    """The arguments of one call: `input_ids` `(batch, new)`; a mask `(batch, columns)` or None;
    positions `(batch or 1, new)` or None."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> ModelCall:
        """Read the arguments of the model's forward.

        Raises:
            RequestError: tokens alone would not identify blocks, or a shape is invalid.
        """
        for name in _CONTENT_BESIDE_TOKENS:
            if arguments.get(name) is not None:
                raise RequestError(
                    f"the model was called with {name}, and blocks are found by token ids alone: "
                    "pass input_ids only, or use a cache of transformers"
                )
        ids = arguments.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel():
            raise RequestError(
                f"input_ids are {_shape(ids)}: pass a tensor (batch, tokens) with a token at least"
            )
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        for name, value in (("attention_mask", mask), ("position_ids", positions)):
            if value is not None and (not isinstance(value, torch.Tensor) or value.ndim != 2):
                raise RequestError(
                    f"{name} is {_shape(value)}: pass a tensor of two dimensions, or none"
                )
        assert mask is None or isinstance(mask, torch.Tensor)
        assert positions is None or isinstance(positions, torch.Tensor)
        return cls(ids, mask, positions)

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_new(self) -> int:
        return self.input_ids.shape[1]

    def pads(self, length: int) -> list[int]:
        """Return the pads of each row among the `length` columns of the cache and the new ones.

        Raises:
            RequestError: the mask has other columns, or pads that are not on the left.
        """
        mask = self.attention_mask
        if mask is None:
            return [0] * self.batch_size
        wanted = (self.batch_size, length + self.num_new)
        if tuple(mask.shape) != wanted:
            raise RequestError(
                f"the attention mask is {tuple(mask.shape)}: pass {wanted}, all columns of the "
                "cache and the new ones"
            )
        return left_pads(mask)

    def rows(self) -> tuple[list[int], list[list[int]]]:
        """Return the pads of each row of a new batch, and its tokens without them.

        Raises:
            RequestError: as `pads`; or a row has pads only.
        """
        pads = self.pads(0)
        tokens = [row[pad:] for row, pad in zip(self.input_ids.tolist(), pads, strict=True)]
        empty = [index for index, row in enumerate(tokens) if not row]
        if empty:
            raise RequestError(
                f"row {empty[0]} has pads only: open the cache with a token at least in every row"
            )
        return pads, tokens

    def begins_at_front(self, pads: Sequence[int]) -> bool:
        """Return whether its positions are those of the first columns."""
        positions = self.position_ids
        return positions is not None and self._are_positions(positions, pads, 0)

    def require_mask(self, pads: Sequence[int], length: int) -> None:
        """Refuse a mask that hides anything but the pads of rows that have `length` columns."""
        mask = self.attention_mask
        if mask is None:
            if any(pads):
                raise RequestError(
                    f"rows have {list(pads)} pads and there is no attention mask: pass the mask of "
                    "all columns"
                )
            return
        found = self.pads(length)
        if found != [min(pad, mask.shape[1]) for pad in pads]:
            raise RequestError(
                f"the attention mask has {found} pads, the cache was opened with {list(pads)}: "
                "open another cache for another batch"
            )

    def require_positions(self, pads: Sequence[int], length: int) -> None:
        """Refuse positions that are not those of tokens behind `length` columns."""
        positions = self.position_ids
        if positions is None:
            if any(pads):
                raise RequestError(
                    f"rows have {list(pads)} pads and there are no position_ids: pass those of the "
                    "tokens, counted without pads, as generate does"
                )
        elif not self._are_positions(positions, pads, length):
            raise RequestError(
                f"position_ids are {shown(positions.tolist())} behind {length} columns with "
                f"{list(pads)} pads: count tokens from 0, without pads and without gaps"
            )

    def _are_positions(self, positions: torch.Tensor, pads: Sequence[int], length: int) -> bool:
        if positions.shape[1] != self.num_new or positions.shape[0] not in {1, self.batch_size}:
            return False
        columns = torch.arange(length, length + self.num_new, device=positions.device)[None]
        wanted = columns - torch.tensor(pads, device=positions.device)[:, None]
        return bool(((positions == wanted) | (wanted < 0)).all())


def without_first(arguments: Mapping[str, object], num_columns: int) -> dict[str, object]:
    """Return the arguments of a call for the columns behind the first `num_columns`."""
    cut = dict(arguments)
    for name in _BY_COLUMN:
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            cut[name] = value[..., num_columns:]
    return cut


def _shape(value: object) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
