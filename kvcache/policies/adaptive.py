"""Adaptive: learns which of several simple orders serves the load, and evicts by it.

    uses ──▶ records of names ──▶ a key for each order ──▶ simulated caches, one for each order
                                          │                      │ hits
                                          ▼                      ▼
                      victims ◀── the lowest keys of the order that rules

Each order gives a content a key when it comes out of use. Keys stay until the next use, so that
another order can take over at any time. docs/policies.md has more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import IndexArray, index_array
from kvcache.policies.history_policy import Member, Name, RankedPolicy
from kvcache.policies.policy import EntryBook
from kvcache.policies.ranked_queue import RankedQueue

Float64Array: TypeAlias = "npt.NDArray[np.float64]"
Int64Array: TypeAlias = "npt.NDArray[np.int64]"
BoolArray: TypeAlias = "npt.NDArray[np.bool_]"

DELAYS = (0.0, 0.5, 1.0)
"""Orders by recency. A new content counts as used this many capacities ago: 0 is LRU."""

_TIE_BLOCKS = 0.25
"""New contents are older by this, too, so that no two contents have the same key."""

HALF_LIVES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 32.0)
"""Orders by all uses, each of which loses half of its weight in this many capacities."""

NUM_ORDERS = len(DELAYS) + len(HALF_LIVES)

_MOST_LENGTHS = 8
_USE_LIMITS = (2, 3, 4, 8, 16, 64)
NUM_CLASSES = 2 * _MOST_LENGTHS + len(_USE_LIMITS) + 1
"""Classes of contents: new ones, by how many came together and whether they continue others; and
used ones, by their number of uses."""

_SHARED_START_BLOCKS = 1
"""A request that continues at most this many blocks begins a conversation: the first block is
often a common system prompt."""

_PRIOR_USES = 100.0
"""Weight of all classes in the estimate of one class, in uses: a few requests."""

_REUSE_EXPONENT = 2.0
"""A use weighs as much as its class's chance of reuse, to this power. Tuned on a trace."""

_MOST_SIMULATED = 1 << 11
"""Larger caches simulate a sample of contents."""

_SPARE_SHARE = 16
"""A simulated cache is trimmed when it is larger than its capacity by one part in this many."""

_HORIZON_ROOMS = 16.0
"""Simulated hits lose half of their weight in this many capacities."""

_LEAST_GAIN = 0.001
_LEAST_ROOMS_COMPARED = 10.0
_LEAST_REQUESTS = 0.5
"""An order takes over if it would have won this share of uses more than the ruling one: of all
uses that still have weight, at least of this many capacities; and this part of a request more,
because its blocks are hit together."""

_MOST_NAMES = 1 << 16
_ROOMS_REMEMBERED = 64
_LEAST_ROOMS_REMEMBERED = 3
"""Names remembered, in capacities: fewer than 64 in caches where that is more than 65,536 names."""


class Records:
    """What is known of contents by name, in rows. The longest unused are forgotten.

    Invariant: a row is of one name or in `_free`; `num_simulated[i]` counts `is_simulated[:, i]`.
    """

    def __init__(self, most_names: int, scale: int) -> None:
        """Remember up to `most_names` names; one in `scale` is sampled."""
        self._most_names = most_names
        self._scale = scale
        self.row_of: OrderedDict[Name, int] = OrderedDict()
        self._free: list[int] = []
        self.num_simulated: Int64Array = np.zeros(NUM_ORDERS, np.int64)
        self._make_rows(0)

    def _make_rows(self, num_rows: int) -> None:
        """Make empty rows."""
        self.keys: Float64Array = np.full((num_rows, NUM_ORDERS), -np.inf)
        self.stamps: Float64Array = np.zeros(num_rows)
        self.num_uses: Int64Array = np.zeros(num_rows, np.int64)
        self.lines: Int64Array = np.zeros(num_rows, np.int64)
        self.was_hit: BoolArray = np.zeros(num_rows, np.bool_)
        self.is_sampled: BoolArray = np.zeros(num_rows, np.bool_)
        self.is_simulated: BoolArray = np.zeros((num_rows, NUM_ORDERS), np.bool_)

    _COLUMNS = "keys", "stamps", "num_uses", "lines", "was_hit", "is_sampled", "is_simulated"

    def _grow(self) -> None:
        before = {name: getattr(self, name) for name in self._COLUMNS}
        num_rows = len(self.stamps)
        self._make_rows(max(64, 2 * num_rows))
        for name, column in before.items():
            getattr(self, name)[:num_rows] = column
        self._free += range(len(self.stamps) - 1, num_rows - 1, -1)

    def rows_of(self, names: Sequence[Name]) -> IndexArray:
        """Return the rows of distinct names, new ones of unknown names."""
        rows = []
        for name in names:
            row = self.row_of.get(name)
            if row is None:
                if not self._free:
                    self._grow()
                row = self.row_of[name] = self._free.pop()
                number = name if isinstance(name, int) else int.from_bytes(name[:4], "big")
                self.is_sampled[row] = number % self._scale == 0
            else:
                self.row_of.move_to_end(name)
            rows.append(row)
        return index_array(rows)

    def forget(self, name: Name) -> None:
        """Forget a name, if it is known."""
        row = self.row_of.pop(name, None)
        if row is not None:
            self._free.append(row)
            self.num_simulated -= self.is_simulated[row]
            self.keys[row], self.is_simulated[row] = -np.inf, False
            self.num_uses[row] = 0

    def trim(self) -> None:
        """Forget the names that were unused longest, if there are too many."""
        while len(self.row_of) > self._most_names:
            self.forget(next(iter(self.row_of)))


class AdaptivePolicy(RankedPolicy):
    """An `EvictionPolicy` by the order whose simulated cache had the most hits lately."""

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        super().__init__(capacity, book)
        self._scale = 1 << max(0, ((capacity - 1) // _MOST_SIMULATED).bit_length())
        most = max(
            _LEAST_ROOMS_REMEMBERED * capacity, min(_MOST_NAMES, _ROOMS_REMEMBERED * capacity)
        )
        self._records = Records(most, self._scale)
        self._clock_blocks = 0
        self._ruling = 0
        self._hits: Float64Array = np.zeros(NUM_ORDERS)
        self._num_sampled = self._num_requests = 0.0
        self._num_reused: Float64Array = np.zeros(NUM_CLASSES)
        self._num_used: Float64Array = np.zeros(NUM_CLASSES)

    @property
    def ruling(self) -> int:
        """The order that rules: an index of `DELAYS`, then of `HALF_LIVES`."""
        return self._ruling

    def _note_uses(self, names: Sequence[Name]) -> None:
        records = self._records
        for name in names:
            if isinstance(name, int) and name not in self._in_use:
                records.forget(name)  # the entry's number: another content's
        names = list(dict.fromkeys(names))
        rows = records.rows_of(names)
        is_known = records.num_uses[rows] > 0
        np.add.at(self._num_reused, records.lines[rows[is_known]], 1)
        num_uses = records.num_uses[rows] = records.num_uses[rows] + 1
        lines = records.lines[rows] = classify(num_uses)
        stamps = records.stamps[rows] = self._clock_blocks + np.arange(1, len(rows) + 1)
        self._clock_blocks += len(rows)
        records.was_hit[rows] = [name in self._in_use for name in names]

        weights = self._log_weights()[lines]
        np.add.at(self._num_used, lines, 1)
        for place, half_life in enumerate(HALF_LIVES, len(DELAYS)):
            use = stamps / (half_life * self._capacity) + weights
            records.keys[rows, place] = np.logaddexp2(records.keys[rows, place], use)
        self._simulate(rows[records.is_sampled[rows]], len(self) + len(rows))
        self._choose_order()
        records.trim()

    def _log_weights(self) -> Float64Array:
        """Return the weight of a use by class, as a power of two."""
        mean = (self._num_reused.sum() + 1) / (self._num_used.sum() + 50)
        chances = (self._num_reused + _PRIOR_USES * mean) / (self._num_used + _PRIOR_USES)
        weights: Float64Array = _REUSE_EXPONENT * np.log2(chances / mean)
        return weights

    def _simulate(self, rows: IndexArray, num_inserted: int) -> None:
        """Use these contents in the simulated caches."""
        if not len(rows):
            return
        records = self._records
        was_in = records.is_simulated[rows]
        fading = 0.5 ** (len(rows) * self._scale / (_HORIZON_ROOMS * self._capacity))
        self._hits = self._hits * fading + was_in.sum(axis=0)
        self._num_sampled = self._num_sampled * fading + len(rows)
        self._num_requests = self._num_requests * fading + 1
        delays = np.array(DELAYS) * self._capacity + _TIE_BLOCKS
        num_delays = len(DELAYS)
        ages = np.where(was_in[:, :num_delays], 0.0, delays)
        records.keys[rows, :num_delays] = records.stamps[rows, None] - ages
        records.is_simulated[rows] = True
        records.num_simulated += len(rows) - was_in.sum(axis=0)
        room = max(1, max(self._room_blocks, num_inserted) // self._scale)
        for place in np.flatnonzero(records.num_simulated > room + room // _SPARE_SHARE):
            inside = np.flatnonzero(records.is_simulated[:, place])
            order = np.argpartition(records.keys[inside, place], len(inside) - room)
            records.is_simulated[inside[order[: len(inside) - room]], place] = False
            records.num_simulated[place] = room

    def _choose_order(self) -> None:
        """Let another order rule if it would have had enough more hits."""
        best = int(self._hits.argmax())
        least = _LEAST_ROOMS_COMPARED * self._capacity / self._scale
        gain = _LEAST_GAIN * max(self._num_sampled, least)
        gain += _LEAST_REQUESTS * self._num_sampled / max(1.0, self._num_requests)
        if self._hits[best] <= self._hits[self._ruling] + gain:
            return
        self._ruling = best
        for member in self._members.values():
            member.rank = self._key(member.name), member.rank[1]
        self._lines = [RankedQueue()]
        for entry, member in self._members.items():
            if entry not in self._parked:
                self._lines[0].add(entry, member.rank)
        self._look_ahead = None

    def _key(self, name: Name) -> float:
        """Return the key of a content in the ruling order; the lowest for a forgotten one."""
        records, ruling = self._records, self._ruling
        row = records.row_of.get(name)
        if row is None:
            return -np.inf
        if ruling >= len(DELAYS):
            return records.keys.item(row, ruling)
        delay = DELAYS[ruling] * self._capacity + _TIE_BLOCKS
        return records.stamps.item(row) - (0.0 if records.was_hit[row] else delay)

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.rank = self._key(member.entry if name is None else name), self._stamp()

    def _place_used(self, member: Member) -> None:
        member.rank = self._key(member.name), self._stamp()

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        """Evicted contents are remembered by name."""


def classify(num_uses: Int64Array) -> Int64Array:
    """Return the classes of contents that came out of use together, tails first.

    New contents next to each other came with one request; those they continue come after them.
    """
    lines = 2 * _MOST_LENGTHS + np.searchsorted(_USE_LIMITS, num_uses)
    runs = [(is_new, len(list(run))) for is_new, run in groupby((num_uses == 1).tolist())]
    start = 0
    for place, (is_new, length) in enumerate(runs):
        if is_new:
            behind = runs[place + 1][1] if place + 1 < len(runs) else 0
            line = min(length.bit_length(), _MOST_LENGTHS) - 1
            continues = behind > _SHARED_START_BLOCKS
            lines[start : start + length] = line + _MOST_LENGTHS * continues
        start += length
    return lines
