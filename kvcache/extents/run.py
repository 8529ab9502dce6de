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

from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.arrays import Int32Array
from kvcache.errors import InvariantError
from kvcache.tenants import TenantAccount

HandleArray: TypeAlias = npt.NDArray[np.int64]
"""Block ids that say which life of the block they mean: see `BlockStore`."""

NO_ENTRY = 0
FIRST_ENTRY = 1
"""Numbers by which a policy knows runs; no run has the first one."""

_MANY_PIECES = 128
_SETTLED_PER_PIECE = 8
"""Appended pieces, each with arrays of its own, become one when there are many for so few units."""


class Piece(NamedTuple):
    """Appended units: tokens, ids `(groups, n)`, handles `(groups, n)`, digests."""

    tokens: bytes
    ids: Int32Array
    handles: HandleArray
    digests: bytes


class Tail(Protocol):
    """Units that come one by one, behind all others of a run; see `LeafTail`."""

    @property
    def num_units(self) -> int:
        """How many have come."""

    @property
    def last(self) -> bytes:
        """The digest of the last one; before the first one comes that of the unit before it."""

    def pack(self) -> None:
        """Make room for more where units come first."""

    def end(self) -> Piece:
        """Take no more, and return all of them."""


class Run:
    """Units `[start, start + num_units)` of every sequence that goes through it.

    Invariants: `children` are keyed by the token bytes of their first unit; `num_holders` counts
    direct holders and held children. Appended units wait, first `_pieces`, then `waiting`, and
    trimmed ones stay behind the end, until `settle` makes arrays of exactly `num_units` units.
    `waiting` is there only while one row holds the run, which is a leaf, and grows it.
    `entry` is the number by which the eviction policy knows the run while nobody holds it, else
    `NO_ENTRY`. `has_past` says that it knew the run once, and `cut_from` by which content it knows
    what this run was the first part of. `tenant` has all blocks of it, if there are tenants.
    """

    __slots__ = (
        "_num_units",
        "_pieces",
        "children",
        "cut_from",
        "digests",
        "entry",
        "handles",
        "has_past",
        "ids",
        "is_unsettled",
        "merged_into",
        "num_holders",
        "parent",
        "start",
        "tenant",
        "tokens",
        "waiting",
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
        self._num_units = num_units  # those of `waiting` left out
        self.num_holders = 0
        self.children: dict[bytes, Run] = {}
        self.entry = NO_ENTRY
        self.has_past = False
        self.cut_from: bytes | None = None
        self.merged_into: Run | None = None
        self.tenant: TenantAccount | None = None if parent is None else parent.tenant
        self.is_unsettled = False
        self._pieces: list[Piece] | None = None
        self.waiting: Tail | None = None

    def __repr__(self) -> str:
        return f"Run([{self.start}, {self.end}), {self.num_holders} holders)"

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return self._num_units if self.waiting is None else self._num_units + self.waiting.num_units

    @property
    def end(self) -> int:
        """The unit behind the last one."""
        waiting = self.waiting
        num_units = self._num_units if waiting is None else self._num_units + waiting.num_units
        return self.start + num_units

    def last_digest(self, digest_bytes: int) -> bytes:
        """Return the digest of the last unit; of a root, the one before every first unit."""
        if self.waiting is not None:
            return self.waiting.last
        if self._pieces:
            return self._pieces[-1].digests[-digest_bytes:]
        if not self._num_units:
            return self.digests
        end = self._num_units * digest_bytes
        return self.digests[end - digest_bytes : end]

    def begin_waiting(self, tail: Tail) -> None:
        """Let units that come one by one from now on wait in `tail`, as most of running requests.

        It is a leaf that one row holds alone.
        """
        if self._pieces is None and self.ids.shape[1] > self._num_units:
            self._compact()
        self.waiting = tail
        self.is_unsettled = True

    def append(
        self, tokens: bytes, ids: Int32Array, handles: HandleArray, digests: bytes, num_units: int
    ) -> None:
        """Take units at the end. Shapes: `(groups, num_units)`."""
        if self._pieces is None:
            if self.waiting is None and self.ids.shape[1] > self.num_units:
                self._compact()
            self._pieces = []
        self._end_units(self._pieces)
        self._pieces.append(Piece(tokens, ids, handles, digests))
        self._num_units += num_units
        self.is_unsettled = True
        num_pieces = len(self._pieces)
        if num_pieces >= _MANY_PIECES and num_pieces * _SETTLED_PER_PIECE >= self.ids.shape[1]:
            self.settle()

    def trim(self, num_units: int) -> None:
        """Lose units at the end. None that was appended waits; some units remain."""
        self._num_units -= num_units
        self.is_unsettled = True
        if self.num_units * 2 < self.ids.shape[1]:
            self._compact()

    def settle(self) -> None:
        """Make `tokens`, `ids`, `handles` and `digests` cover exactly the units there are."""
        self.gather()
        if self.is_unsettled:
            self.is_unsettled = False
            if self.ids.shape[1] > self.num_units:
                self._compact()

    def gather(self) -> None:
        """Make the arrays cover all units there are; trimmed ones may stay behind the end."""
        if self.waiting is not None or self._pieces is not None:
            self.is_unsettled = False
            pieces = self._pieces or []
            self._end_units(pieces)
            self._pieces = None
            self.tokens = b"".join([self.tokens, *[piece.tokens for piece in pieces]])
            self.digests = b"".join([self.digests, *[piece.digests for piece in pieces]])
            self.ids = np.concatenate([self.ids, *[piece.ids for piece in pieces]], axis=1)
            if len(self.handles):
                handles = [piece.handles for piece in pieces]
                self.handles = np.concatenate([self.handles, *handles], axis=1)
            else:
                self.handles = np.empty((0, self._num_units), dtype=np.int64)

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
        self._num_units -= num_units
        self.start += num_units
        self.parent = head
        head.children = {self.tokens[:unit_bytes]: self}
        return head

    @property
    def can_hand_up(self) -> bool:
        """Whether the run above can take over units: one ends with it and nobody else holds it,
        and nobody holds this one, its only child."""
        above = self.parent
        return (
            above is not None
            and above.parent is not None
            and above.num_holders == 1
            and not self.num_holders
            and len(above.children) == 1
        )

    def hand_up(self, num_units: int) -> None:
        """Let the run above, whose only child this is, end behind the first units of this one."""
        above = self.parent
        if above is None:
            raise InvariantError(f"{self} has no run above to hand units to")
        self.settle()
        unit_bytes = len(self.tokens) // self._num_units
        digest_bytes = len(self.digests) // self._num_units
        cut, digest_cut = num_units * unit_bytes, num_units * digest_bytes
        above.append(
            self.tokens[:cut],
            self.ids[:, :num_units],
            self.handles[:, :num_units],
            self.digests[:digest_cut],
            num_units,
        )
        self.tokens, self.digests = self.tokens[cut:], self.digests[digest_cut:]
        self.ids = self.ids[:, num_units:].copy()
        self.handles = self.handles[:, num_units:].copy()
        self._num_units -= num_units
        self.start += num_units
        above.children = {self.tokens[:unit_bytes]: self}

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
        self._num_units = sum(run.num_units for run in pieces)
        self.start, self.parent = first.start, first.parent
        for run in above:
            run.merged_into = self

    def standing(self) -> Run:
        """Return the run that holds this one's units now, if it was absorbed."""
        run = self
        while run.merged_into is not None:
            run = run.merged_into
        return run

    def _end_units(self, pieces: list[Piece]) -> None:
        """Let units that came one by one be one piece more."""
        if self.waiting is not None:
            piece = self.waiting.end()
            pieces.append(piece)
            self.waiting = None
            self._num_units += piece.ids.shape[1]

    def _compact(self) -> None:
        count = self.num_units
        before = self.ids.shape[1]
        self.tokens = self.tokens[: len(self.tokens) // before * count]
        self.digests = self.digests[: len(self.digests) // before * count]
        self.ids = self.ids[:, :count].copy()
        self.handles = self.handles[:, :count].copy()
