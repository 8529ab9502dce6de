"""The rows of a content-checked forward, checked and widened: what every group's content reads.

Stands between the command and the contents of groups. Refuses arrays that do not fit together,
slots and positions that do not exist here, and drafts or encoder tokens that no group has room for;
asked before anything of a message is obeyed. Knows no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import BlockError, MalformedMessageError
from kvcache.protocol.commands import WriteExpected
from kvcache.specs import KVCacheSpec
from kvcache.worker.prefix_sums import Uint64Array, name_seed

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ForwardRows:
    """Rows of a forward; all `(n,)`.

    Row `i` writes `[starts[i], ends[i])`, drafts from `own_ends[i]` on; up to `firsts[i]` they
    come from elsewhere. A seed of an encoder is 0 where the row brings no encoder tokens.
    """

    slots: Int64Array
    is_new: BoolArray
    starts: Int64Array
    firsts: Int64Array
    own_ends: Int64Array
    ends: Int64Array
    encoder_counts: Int64Array
    encoder_seeds: Uint64Array

    @classmethod
    def of(cls, command: WriteExpected) -> ForwardRows:
        """Return the rows of a validated command."""
        num_rows = len(command.slots)
        starts = command.starts.astype(np.int64)
        ends = starts + command.counts
        seeds = np.zeros(num_rows, dtype=np.uint64)
        for row, key in enumerate(command.encoder_keys):
            if key:
                seeds[row] = name_seed(key)
        return cls(
            slots=command.slots.astype(np.int64),
            is_new=command.is_new != 0,
            starts=starts,
            firsts=starts + _filled(command.external_counts, num_rows),
            own_ends=ends - _filled(command.draft_counts, num_rows),
            ends=ends,
            encoder_counts=_filled(command.encoder_counts, num_rows),
            encoder_seeds=seeds,
        )


@dataclass(frozen=True)
class RowLimits:
    """What rows a rank can have.

    `max_drafts`: draft tokens after which states are kept, None where no states are.
    `max_encoder_tokens`: 0 where none are kept.
    """

    rank: int
    max_num_seqs: int
    max_model_len: int
    max_drafts: int | None
    max_encoder_tokens: int

    @classmethod
    def of(
        cls, specs: Sequence[KVCacheSpec], *, rank: int, max_num_seqs: int, max_model_len: int
    ) -> RowLimits:
        """Return the limits of a rank whose groups have `specs`."""
        drafts = [spec.max_draft_tokens for spec in specs]
        encoder_tokens = [spec.encoder_token_limit for spec in specs if spec.keeps_encoder_tokens]
        return cls(
            rank=rank,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_drafts=min((num for num in drafts if num is not None), default=None),
            max_encoder_tokens=min(encoder_tokens, default=0),
        )

    def validate(self, command: WriteExpected) -> None:
        """Raise unless `command` fits together and this rank. Changes nothing.

        Raises MalformedMessageError, or BlockError for slots that do not exist.
        """
        _require_sizes(command)
        for slots in (command.slots, command.verify_slots):
            self._require_slots(slots)
        _require_counts(command)
        self._require_positions(command)
        self._require_room(command)

    def _require_slots(self, slots: Int32Array) -> None:
        if not len(slots):
            return
        if not 0 <= int(slots.min()) <= int(slots.max()) < self.max_num_seqs:
            raise BlockError(
                f"write_expected names slots {int(slots.min())}..{int(slots.max())}, this rank has "
                f"0..{self.max_num_seqs - 1}"
            )
        if len(np.unique(slots)) != len(slots):
            raise MalformedMessageError("write_expected names a slot twice")

    def _require_positions(self, command: WriteExpected) -> None:
        ends = command.starts.astype(np.int64) + command.counts
        token_ends = command.token_starts.astype(np.int64) + command.token_counts
        longest = max(
            (int(a.max()) for a in (token_ends, command.verify_lengths) if len(a)), default=0
        )
        if longest > self.max_model_len:
            raise MalformedMessageError(
                f"write_expected reaches position {longest}, this rank is made for "
                f"{self.max_model_len}"
            )
        if bool((token_ends < ends).any()) or bool(
            ((command.is_new != 0) & (command.token_starts != 0)).any()
        ):
            raise MalformedMessageError(
                "write_expected does not bring the tokens of every position it writes"
            )

    def _require_room(self, command: WriteExpected) -> None:
        most = int(command.draft_counts.max(initial=0))
        if self.max_drafts is not None and most > self.max_drafts:
            raise MalformedMessageError(
                f"write_expected has {most} drafts in a row, this rank keeps states after "
                f"{self.max_drafts}"
            )
        most = int(command.encoder_counts.max(initial=0))
        if most > self.max_encoder_tokens:
            raise MalformedMessageError(
                f"write_expected has {most} encoder tokens in a row, this rank keeps "
                f"{self.max_encoder_tokens}"
            )


def _filled(counts: Int32Array, num_rows: int) -> Int64Array:
    """Return `counts`, or zeros where the command says that no row has any."""
    return counts.astype(np.int64) if len(counts) else np.zeros(num_rows, dtype=np.int64)


def _require_sizes(command: WriteExpected) -> None:
    rows = len(command.slots)
    per_row = (
        command.is_new,
        command.starts,
        command.counts,
        command.token_starts,
        command.token_counts,
    )
    maybe_empty = (
        command.content_keys,
        command.external_counts,
        command.draft_counts,
        command.encoder_counts,
        command.encoder_keys,
    )
    if any(len(array) != rows for array in per_row) or any(
        len(array) not in (0, rows) for array in maybe_empty
    ):
        raise MalformedMessageError(f"write_expected of {rows} rows has arrays of other sizes")
    if len(command.verify_slots) != len(command.verify_lengths):
        raise MalformedMessageError(
            f"write_expected verifies {len(command.verify_slots)} slots with "
            f"{len(command.verify_lengths)} lengths"
        )


def _require_counts(command: WriteExpected) -> None:
    numbers = (
        command.starts,
        command.counts,
        command.token_starts,
        command.token_counts,
        command.external_counts,
        command.draft_counts,
        command.encoder_counts,
        command.verify_lengths,
    )
    if any(len(array) and int(array.min()) < 0 for array in numbers):
        raise MalformedMessageError("write_expected has a negative position or count")
    if int(command.token_counts.sum(dtype=np.int64)) != len(command.token_ids):
        raise MalformedMessageError(
            f"write_expected announces {int(command.token_counts.sum(dtype=np.int64))} tokens "
            f"and brings {len(command.token_ids)}"
        )
    if len(command.token_ids) and int(command.token_ids.min()) < 0:
        raise MalformedMessageError("write_expected has a negative token id")
    num_rows = len(command.slots)
    parts = _filled(command.external_counts, num_rows) + _filled(command.draft_counts, num_rows)
    if bool((parts > command.counts).any()):
        row = int(np.flatnonzero(parts > command.counts)[0])
        raise MalformedMessageError(
            f"write_expected has {int(parts[row])} external and draft tokens among "
            f"{int(command.counts[row])}"
        )
    for what, counts in (
        ("external", command.external_counts),
        ("encoder", command.encoder_counts),
    ):
        if bool((_filled(counts, num_rows)[command.is_new == 0] != 0).any()):
            raise MalformedMessageError(
                f"write_expected has {what} tokens in a row that is not new"
            )
