"""The rows of a content-checked forward, and what their tokens require.

`RowLimits` refuses a command whose arrays do not fit together, or that names slots, positions,
drafts or encoder tokens for which the rank has no room. `PrefixSums` keeps one 64-bit number per
slot and position, a function of all tokens up to it:

    S[p] = S[p-1] + (token[p] + C) * m(p)   mod 2^64,   S[-1] = hash of the content key

`m(p)` is odd and different for every position, so a token that is changed, swapped or shifted
anywhere in the prefix changes the number. cells.py derives the bytes of a layer from these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from kvcache.base.arrays import BoolArray, Int32Array, Int64Array, UInt64Array, mix
from kvcache.base.errors import BlockError, MalformedMessageError, RequestError
from kvcache.protocol.commands import WriteExpected
from kvcache.specs import ceil_div
from kvcache.worker.settings import WorkerSettings

TOKEN_OFFSET = np.uint64(0x9E3779B97F4A7C15)
"""C: added to every token, so that token 0 changes the sum."""


def encoder_sums(seeds: UInt64Array, positions: Int64Array) -> UInt64Array:
    """Return the sum of encoder position `positions[i]` under key seed `seeds[i]`.

    An encoder's token depends on all others, so there is no prefix to sum over; equal shapes.
    """
    sums: UInt64Array = mix(seeds + (positions.astype(np.uint64) + np.uint64(1)) * TOKEN_OFFSET)
    return sums


def name_seed(name: bytes) -> int:
    """Return a 64-bit seed for a content key or a layer's name, the same on every rank."""
    seed: int = xxhash.xxh3_64_intdigest(name)
    return seed


class PrefixSums:
    """The running sums of every slot. `num_known[slot]` positions of a slot are valid.

    The memory of rows is allocated lazily, so unused positions cost nothing.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_multiple: int) -> None:
        """Make empty rows of `max_model_len` positions, rounded up to `block_multiple`."""
        self._width = ceil_div(max_model_len, block_multiple) * block_multiple
        self._sums: UInt64Array = np.zeros((max_num_seqs, self._width), dtype=np.uint64)
        self._num_known: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._key_seeds: UInt64Array = np.zeros(max_num_seqs, dtype=np.uint64)
        positions = np.arange(1, self._width + 1, dtype=np.uint64) * TOKEN_OFFSET
        self._multipliers: UInt64Array = mix(positions) | np.uint64(1)

    def num_known(self, slots: Int32Array) -> Int64Array:
        """Return how many positions of each slot are known."""
        known: Int64Array = self._num_known[slots]
        return known

    def forget(self) -> None:
        """Forget every slot."""
        self._num_known[:] = 0

    def extend(self, command: WriteExpected) -> None:
        """Continue the sums of each row of a validated `command` from its `token_starts` on,
        overwriting what was there.

        Raises RequestError, unchanged, when a row starts behind the known positions of its slot.
        """
        slots, is_new, token_ids = command.slots, command.is_new, command.token_ids
        starts = command.token_starts.astype(np.int64)
        counts = command.token_counts.astype(np.int64)
        known = np.where(is_new != 0, 0, self._num_known[slots])
        wrong = np.flatnonzero(starts > known)
        if len(wrong):
            row = int(wrong[0])
            raise RequestError(
                f"slot {int(slots[row])} continues at position {int(starts[row])}, but only "
                f"{int(known[row])} of its tokens are known here"
            )
        for row in np.flatnonzero(is_new).tolist():
            key = command.content_keys[row] if command.content_keys else b""
            self._key_seeds[slots[row]] = name_seed(key)
        befores = self._sums[slots, np.maximum(starts - 1, 0)]
        bases = np.where(starts > 0, befores, self._key_seeds[slots])
        ends = np.cumsum(counts)
        rows = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(len(token_ids)) + np.repeat(starts - (ends - counts), counts)
        terms = (token_ids.astype(np.uint64) + TOKEN_OFFSET) * self._multipliers[positions]
        sums = np.cumsum(terms, dtype=np.uint64)
        skipped = np.concatenate((np.zeros(1, np.uint64), sums))[ends - counts]
        self._sums[slots[rows], positions] = sums + (bases - skipped)[rows]
        self._num_known[slots] = starts + counts

    def at(self, slots: Int64Array, positions: Int64Array) -> UInt64Array:
        """Return the sums of `positions[i]` of `slots[i]`, any equal shapes."""
        sums: UInt64Array = self._sums[slots, positions]
        return sums

    def of_blocks(self, slots: Int64Array, columns: Int64Array, block_size: int) -> UInt64Array:
        """Return the sums of whole blocks, shape `(n, block_size)`; unknown positions are junk."""
        blocks = self._sums.reshape(-1, block_size)
        sums: UInt64Array = blocks[slots * (self._width // block_size) + columns]
        return sums


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
    encoder_seeds: UInt64Array

    @classmethod
    def of(cls, command: WriteExpected) -> ForwardRows:
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

    `max_drafts`: most draft tokens after which states are kept, None without states.
    `max_encoder_tokens`: 0 if none are kept.
    """

    max_num_seqs: int
    max_model_len: int
    max_drafts: int | None
    max_encoder_tokens: int

    @classmethod
    def of(cls, settings: WorkerSettings) -> RowLimits:
        specs = settings.specs
        drafts = [spec.max_draft_tokens for spec in specs]
        encoder_tokens = [spec.encoder_token_limit for spec in specs if spec.keeps_encoder_tokens]
        return cls(
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            max_drafts=min((num for num in drafts if num is not None), default=None),
            max_encoder_tokens=min(encoder_tokens, default=0),
        )

    def validate(self, command: WriteExpected) -> None:
        """Raise unless the parts of `command` fit each other and this rank. Changes nothing.

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
    """Return `counts`, or zeros if the command omits them."""
    return counts.astype(np.int64) if len(counts) else np.zeros(num_rows, dtype=np.int64)


def _require_sizes(command: WriteExpected) -> None:
    rows = len(command.slots)
    per_row = (
        command.is_new,
        command.starts,
        command.counts,
        command.token_starts,
        command.token_counts,
        command.content_keys,
    )
    maybe_empty = (
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
