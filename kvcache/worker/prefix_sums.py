"""What the tokens demand: one 64-bit number per position, a function of everything before it.

    S[p] = S[p-1] + (token[p] + C) * m(p)   mod 2^64,   S[-1] = hash of the content key

with `m(p)` odd and different for every position, so that a token changed, swapped or shifted
anywhere in the prefix changes the number. Kept per slot, so that a later check needs no tokens
again. Numpy on the host; what bytes a layer must hold is made from these numbers in content.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import RequestError
from kvcache.protocol.commands import WriteExpected
from kvcache.specs import ceil_div

Uint64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

TOKEN_OFFSET = np.uint64(0x9E3779B97F4A7C15)
"""C: added to every token, so that token 0 counts too."""


def mix(values: Uint64Array) -> Uint64Array:
    """Return the splitmix64 output function of each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Uint64Array = values ^ (values >> np.uint64(31))
    return mixed


def encoder_sums(seeds: Uint64Array, positions: Int64Array) -> Uint64Array:
    """Return what encoder position `positions[i]` demands under key seed `seeds[i]`.

    An encoder's token depends on all others, so there is no prefix to sum over; equal shapes.
    """
    sums: Uint64Array = mix(seeds + (positions.astype(np.uint64) + np.uint64(1)) * TOKEN_OFFSET)
    return sums


def name_seed(name: bytes) -> int:
    """Return a 64-bit seed for a content key or a layer's name, the same on every rank."""
    seed: int = xxhash.xxh3_64_intdigest(name)
    return seed


class PrefixSums:
    """The running sums of every slot. `num_known[slot]` positions of a slot are valid.

    Rows are lazily backed by memory: only positions that were used take any.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_multiple: int) -> None:
        """Make empty rows of `max_model_len` positions, rounded up to `block_multiple`."""
        self._width = ceil_div(max_model_len, block_multiple) * block_multiple
        self._sums: Uint64Array = np.zeros((max_num_seqs, self._width), dtype=np.uint64)
        self._num_known: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._key_seeds: Uint64Array = np.zeros(max_num_seqs, dtype=np.uint64)
        positions = np.arange(1, self._width + 1, dtype=np.uint64) * TOKEN_OFFSET
        self._multipliers: Uint64Array = mix(positions) | np.uint64(1)

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

        Raises RequestError, unchanged, when a row starts behind what is known of its slot.
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

    def at(self, slots: Int64Array, positions: Int64Array) -> Uint64Array:
        """Return the sums of `positions[i]` of `slots[i]`, any equal shapes."""
        sums: Uint64Array = self._sums[slots, positions]
        return sums

    def of_blocks(self, slots: Int64Array, columns: Int64Array, block_size: int) -> Uint64Array:
        """Return the sums of whole blocks, shape `(n, block_size)`; unknown positions are junk."""
        blocks = self._sums.reshape(-1, block_size)
        sums: Uint64Array = blocks[slots * (self._width // block_size) + columns]
        return sums
