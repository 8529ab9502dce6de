"""A run: successive blocks of one content, one node of the tree.

Under the tree, which links runs and counts who holds them. A run knows its tokens, blocks and
digests as flat arrays, so that it is compared, adopted and given back as a whole. Refuses to know
policies, references to single blocks, steps or requests.

    unit      0        1        2          a unit is `unit_tokens` tokens, the smallest block size
    tokens   |t t t t |t t t t |t t t t |  bytes of the match tokens
    ids      |   7    |   3    |   9    |  one row per ordered group (`int32`)
    handles  |  g1 h  |  g1 h  |  null  |  one row per other group (`int64`), valid or stale
    digests  |  d     |  d     |  d     |  bytes

Where a group's blocks are several units long, a block stands at its last unit, null before it.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.arrays import Int32Array

HandleArray: TypeAlias = npt.NDArray[np.int64]
"""Block ids that say which life of the block they mean: see `BlockStore`."""

NO_ENTRY = 0
FIRST_ENTRY = 1
"""Numbers by which a policy knows runs; no run has the first one."""

_MANY_PIECES = 128
_SETTLED_PER_PIECE = 8
"""Appended pieces, each with arrays of its own, become one when there are many for so few units."""


class Run:
    """Units `[start, start + num_units)` of every sequence that goes through it.

    Invariants: `children` are keyed by the token bytes of their first unit; `num_holders` counts
    direct holders and held children. Appended units wait in lists, and trimmed ones stay behind
    the end, until `settle` makes arrays of exactly `num_units` units. `entry` is the number by
    which the eviction policy knows the run while nobody holds it, else `NO_ENTRY`.
    """

    __slots__ = (
        "_more_digests",
        "_more_handles",
        "_more_ids",
        "_more_tokens",
        "_units",
        "children",
        "digests",
        "entry",
        "handles",
        "ids",
        "is_unsettled",
        "merged_into",
        "num_holders",
        "num_units",
        "parent",
        "start",
        "tokens",
    )

    def __init__(
        self,
        parent: Run | None,
        tokens: bytes,
        *,
        ids: Int32Array,
        handles: HandleArray,
        digests: bytes,
        num_units: int,
    ) -> None:
        """Make a run behind `parent`, linked to nothing yet. A root has no units and one digest."""
        self.parent = parent
        self.start: int = parent.end if parent is not None else 0
        self.tokens = tokens
        self.ids = ids
        self.handles = handles
        self.digests = digests
        self.num_units = num_units
        self.num_holders = 0
        self.children: dict[bytes, Run] = {}
        self.entry = NO_ENTRY
        self.merged_into: Run | None = None
        self.is_unsettled = False
        self._more_tokens: list[bytes] = []
        self._more_ids: list[Int32Array] = []
        self._more_handles: list[HandleArray] = []
        self._more_digests: list[bytes] = []
        self._units: list[tuple[bytes, list[int], list[int], bytes]] = []

    def __repr__(self) -> str:
        return f"Run([{self.start}, {self.end}), {self.num_holders} holders)"

    @property
    def end(self) -> int:
        """The unit behind the last one."""
        return self.start + self.num_units

    def last_digest(self, digest_bytes: int) -> bytes:
        """Return the digest of the last unit; of a root, the one before every first unit."""
        if self._units:
            return self._units[-1][3]
        if self._more_digests:
            return self._more_digests[-1][-digest_bytes:]
        if not self.num_units:
            return self.digests
        end = self.num_units * digest_bytes
        return self.digests[end - digest_bytes : end]

    def append_unit(self, tokens: bytes, ids: list[int], handles: list[int], digest: bytes) -> None:
        """Take one unit at the end, which most appends of running requests are."""
        if not self._units and (self._more_tokens or self.ids.shape[1] > self.num_units):
            self.settle()
        self._units.append((tokens, ids, handles, digest))
        self.num_units += 1
        self.is_unsettled = True

    def append(
        self, tokens: bytes, ids: Int32Array, handles: HandleArray, digests: bytes, num_units: int
    ) -> None:
        """Take units at the end. Shapes: `(groups, num_units)`."""
        if self._units:
            self.settle()
        if not self._more_tokens and self.ids.shape[1] > self.num_units:
            self._compact()
        self._more_tokens.append(tokens)
        self._more_ids.append(ids)
        self._more_handles.append(handles)
        self._more_digests.append(digests)
        self.num_units += num_units
        self.is_unsettled = True
        num_pieces = len(self._more_tokens)
        if num_pieces >= _MANY_PIECES and num_pieces * _SETTLED_PER_PIECE >= self.ids.shape[1]:
            self.settle()

    def trim(self, num_units: int) -> None:
        """Lose units at the end. The run must be settled; some units remain."""
        self.num_units -= num_units
        self.is_unsettled = True
        if self.num_units * 2 < self.ids.shape[1]:
            self._compact()

    def settle(self) -> None:
        """Make `tokens`, `ids`, `handles` and `digests` cover exactly the units there are."""
        self.is_unsettled = False
        if self._units:
            tokens, ids, handles, digests = zip(*self._units, strict=True)
            self.tokens += b"".join(tokens)
            self.digests += b"".join(digests)
            self.ids = np.concatenate([self.ids, np.array(ids, dtype=np.int32).T], axis=1)
            self.handles = np.concatenate(
                [self.handles, np.array(handles, dtype=np.int64).T], axis=1
            )
            self._units = []
        elif self._more_tokens:
            self.tokens = b"".join([self.tokens, *self._more_tokens])
            self.digests = b"".join([self.digests, *self._more_digests])
            self.ids = np.concatenate([self.ids, *self._more_ids], axis=1)
            self.handles = np.concatenate([self.handles, *self._more_handles], axis=1)
            self._more_tokens, self._more_ids = [], []
            self._more_handles, self._more_digests = [], []
        elif self.ids.shape[1] > self.num_units:
            self._compact()

    def split(self, num_units: int) -> Run:
        """Cut off the first units as a run of their own and return it; this one keeps the rest.

        Whoever holds this run still ends where it ended. The new one takes its place below the
        parent and has it as only child; `num_holders` of the new one and both entries are the
        caller's to set.
        """
        self.settle()
        unit_bytes = len(self.tokens) // self.num_units
        digest_bytes = len(self.digests) // self.num_units
        cut, digest_cut = num_units * unit_bytes, num_units * digest_bytes
        head = Run(
            self.parent,
            self.tokens[:cut],
            ids=self.ids[:, :num_units].copy(),
            handles=self.handles[:, :num_units].copy(),
            digests=self.digests[:digest_cut],
            num_units=num_units,
        )
        head.start = self.start
        if self.parent is not None:
            self.parent.children[self.tokens[:unit_bytes]] = head
        self.tokens = self.tokens[cut:]
        self.ids = self.ids[:, num_units:].copy()
        self.handles = self.handles[:, num_units:].copy()
        self.digests = self.digests[digest_cut:]
        self.num_units -= num_units
        self.start += num_units
        self.parent = head
        head.children = {self.tokens[:unit_bytes]: self}
        return head

    def absorb(self, above: list[Run]) -> None:
        """Take in the runs above, nearest first; each is the only child of the next one.

        The absorbed runs point here afterwards. Parent's links and entries are the caller's.
        """
        pieces = [*reversed(above), self]
        for run in pieces:
            run.settle()
        first = above[-1]
        self.tokens = b"".join([run.tokens for run in pieces])
        self.digests = b"".join([run.digests for run in pieces])
        self.ids = np.concatenate([run.ids for run in pieces], axis=1)
        self.handles = np.concatenate([run.handles for run in pieces], axis=1)
        self.num_units = sum(run.num_units for run in pieces)
        self.start, self.parent = first.start, first.parent
        for run in above:
            run.merged_into = self

    def standing(self) -> Run:
        """Return the run that holds this one's units now, if it was absorbed."""
        run = self
        while run.merged_into is not None:
            run = run.merged_into
        return run

    def _compact(self) -> None:
        count = self.num_units
        before = self.ids.shape[1]
        self.tokens = self.tokens[: len(self.tokens) // before * count]
        self.digests = self.digests[: len(self.digests) // before * count]
        self.ids = self.ids[:, :count].copy()
        self.handles = self.handles[:, :count].copy()
