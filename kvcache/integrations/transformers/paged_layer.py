"""One attention layer's part of a paged cache: what `transformers` asks a layer of a cache.

Writes new keys and values to the places of the forward and returns all that the layer's tokens may
see, read through the block tables. Keeps nothing itself.
"""

from __future__ import annotations

from typing import Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache.base.errors import RequestError
from kvcache.integrations.transformers.forward import Forward, GroupPlaces, first_column


class ForwardSource(Protocol):
    """The cache that a layer belongs to."""

    @property
    def length(self) -> int:
        """Columns that are in the cache."""

    @property
    def open_forward(self) -> Forward:
        """The forward that runs.

        Raises:
            RequestError: none does.
        """


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types for it
    """Layer `name`; `pages` is its tensor `(blocks, 2, block size, heads, head size)`."""

    is_croppable = True

    def __init__(
        self, name: str, window: int | None, pages: torch.Tensor, source: ForwardSource
    ) -> None:
        super().__init__()
        self.name = name
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = True
        self.dtype, self.device = pages.dtype, pages.device
        if window is not None:
            self.sliding_window = window
        self._pages = pages
        self._source = source
        self._written: Forward | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the tensors were allocated with the store."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values; return all that they may see, themselves included.

        Both are `(batch, heads, new tokens, head size)`; what is returned is
        `(batch, heads, get_mask_sizes(new tokens)[0], head size)`, a copy.

        Raises:
            RequestError: no forward was announced, or the shapes are another model's.
        """
        forward = self._source.open_forward
        self._require(key_states, forward)
        self._require(value_states, forward)
        places = forward.groups[self.name]
        self._write(0, key_states, places)
        self._write(1, value_states, places)
        self._written = forward
        return self._read(0, places), self._read(1, places)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns `update` will return, and the first of them."""
        start = first_column(self.window, self._source.length)
        return self._source.length + query_length - start, start

    def get_seq_length(self) -> int:
        """Return the columns in the cache; of a forward that runs, once this layer has them."""
        length = self._source.length
        written = self._written
        if written is not None and written.length == length:
            return length + written.num_new
        return length

    def get_max_length(self) -> int:
        """Return the window, -1 where there is none."""
        return -1 if self.window is None else self.window

    def settle(self) -> None:
        """The forward is over, one way or the other."""
        self._written = None

    def _write(self, part: int, states: torch.Tensor, places: GroupPlaces) -> None:
        new = states.transpose(1, 2)[places.written_rows, places.written_columns]
        self._pages[places.written_blocks, part, places.written_offsets] = new

    def _read(self, part: int, places: GroupPlaces) -> torch.Tensor:
        return self._pages[places.read_blocks, part, places.read_offsets].transpose(1, 2)

    def _require(self, states: torch.Tensor, forward: Forward) -> None:
        """Refuse what does not fit the pages, before anything is written."""
        num_heads, head_size = self._pages.shape[3:]
        wanted = (forward.batch_size, num_heads, forward.num_new, head_size)
        if tuple(states.shape) != wanted or states.dtype != self.dtype:
            raise RequestError(
                f"{self.name} brings keys or values of shape {tuple(states.shape)}, "
                f"{states.dtype}; the store was made for {wanted}, {self.dtype}: use the model it "
                "was made for, in the same dtype"
            )
        if states.requires_grad:
            raise RequestError(
                f"{self.name} brings keys or values that require a gradient, and blocks keep none: "
                "call the model under torch.no_grad()"
            )
