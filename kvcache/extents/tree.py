"""The prefix cache: a tree of runs for each namespace, and who holds which of them.

Stands between look-up and rows, which walk, hold and extend it, and the blocks, whose contents it
is. Matching compares token bytes, so a cached prompt is never hashed. Refuses to choose victims, to
know requests, and to say a word to workers or listeners: it returns what went.

    root ── [0, 40) ──┬── [40, 64)          two prompts that share 40 units; a third one that leaves
                      └── [40, 50)          the first run after 12 splits it into [0, 12), [12, 40)

A run is held by rows and pins that end with it, and by held children; so a walk up ends at the
first run that was held already. What nobody holds any more is one entry of the eviction policy,
tails before heads; and runs that lost their branches grow together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.extents.block_store import BlockStore
from kvcache.extents.match_tokens import num_common
from kvcache.extents.run import FIRST_ENTRY, NO_ENTRY, HandleArray, Run
from kvcache.extents.shape import TreeShape
from kvcache.ids import NULL_BLOCK_ID
from kvcache.request import Namespace

_MERGED_UNITS = 256
_MANY_RUNS = 8
"""Runs given back together become one if they are short together, or if they are many."""


class Walk(NamedTuple):
    """Where tokens lead: the runs on the way, how many units match, how many of the last run."""

    path: list[Run]
    num_units: int
    num_of_last: int


NO_WALK = Walk([], 0, 0)
"""Where tokens lead that nothing is known of. Nobody writes to it."""


class RunTree:
    """All roots and what hangs below them.

    Invariants: a held run's parent is held; `num_runs` and `num_units` leave the roots out; every
    run without holders that has a block of an ordered group is an entry of the policy, and one that
    has none has children.
    """

    def __init__(
        self, shape: TreeShape, store: BlockStore, none_hash: bytes, bury: Callable[[Run], None]
    ) -> None:
        """Make a tree without namespaces over the blocks of `store`.

        `bury` forgets the blocks of other groups beside a run that goes for want of its own.
        """
        self.shape = shape
        self.num_runs = 0
        self.num_units = 0
        self.roots: dict[Namespace, Run] = {}
        self.run_by_entry: dict[int, Run] = {}
        self._names: dict[int, Namespace] = {}  # of the roots, by `id`
        self._store = store
        self._tenants = store.tenants
        self._none_hash = none_hash
        self._num_ordered = len(shape.ordered)
        self._num_others = len(shape.others)
        self._is_plain = shape.is_plain
        self._bury = bury
        # Whether runs with different pasts stay apart, because the policy tells contents apart.
        self.keeps_pasts = False
        # Blocks of other groups are entries under their own ids.
        self.first_entry = store.num_blocks if shape.others else FIRST_ENTRY
        self._free_entries: list[int] = []

    # --- reading -------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> Run:
        """Return the root of a namespace, a new one where there is none."""
        root = self.roots.get(namespace)
        if root is None:
            ids = np.zeros((self._num_ordered, 0), dtype=np.int32)
            handles = np.zeros((self._num_others, 0), dtype=np.int64)
            root = self.roots[namespace] = Run(
                None, b"", ids=ids, handles=handles, digests=self._none_hash, num_units=0
            )
            self._names[id(root)] = namespace
            if self._tenants is not None:
                root.tenant = self._tenants.account(namespace)
                root.tenant.num_ties += 1
        return root

    def namespace_of(self, run: Run) -> Namespace:
        """Return the namespace whose root is above a run."""
        while run.parent is not None:
            run = run.parent
        return self._names[id(run)]

    def walk(self, run: Run, tokens: bytes, offset: int, max_units: int) -> Walk:
        """Follow `tokens` from byte `offset` on downwards from the end of `run`. No mutation.

        At most `max_units` units, which the tokens have; the walk may end inside its last run.
        """
        unit_bytes = self.shape.unit_bytes
        path: list[Run] = []
        matched = part = 0
        while matched < max_units:
            child = run.children.get(tokens[offset : offset + unit_bytes])
            if child is None:
                break
            if child.is_unsettled:
                child.settle()
            path.append(child)
            part = child.num_units
            if part > 1 and (
                matched + part > max_units or not tokens.startswith(child.tokens, offset)
            ):
                part = min(part, max_units - matched)
                if part > 1:  # the first one is the same: that is how the child was found
                    size = self.shape.unit_tokens
                    part = num_common(child.tokens, tokens, offset, part * size) // size
                matched += part
                break
            matched += part
            offset += part * unit_bytes
            run = child
        return Walk(path, matched, part)

    def runs(self) -> Iterator[Run]:
        """Yield every run below the roots, parents before children."""
        pending = [child for root in self.roots.values() for child in root.children.values()]
        while pending:
            run = pending.pop()
            yield run
            pending += run.children.values()

    def below(self, run: Run) -> list[Run]:
        """Return a run and everything below it, parents before children."""
        found = [run]
        for parent in found:
            found += parent.children.values()
        return found

    # --- holding -------------------------------------------------------------------------------

    def hold(self, run: Run) -> None:
        """Hold a run, and with it everything above."""
        if run.waiting is not None:
            run.gather()  # it may not be one row's alone any more
        taken: list[Run] = []
        standing: Run | None = run
        while standing is not None:
            standing.num_holders = num_holders = standing.num_holders + 1
            if num_holders > 1:
                break
            if standing.entry:
                taken.append(standing)
            standing = standing.parent
        if taken:
            self._store.policy.remove(self._take_entries(taken))

    def release(self, run: Run) -> None:
        """Hold a run no longer. What nobody holds now can be evicted, its tail first."""
        if run.waiting is not None:
            run.gather()  # its row may not be there any more
        unheld: list[Run] = []
        standing, has_chain = run, False
        while True:
            standing.num_holders = left = standing.num_holders - 1
            if left:
                break
            parent = standing.parent
            if parent is None:
                self.forget_root_if_empty(standing)
                break
            unheld.append(standing)
            has_chain |= len(standing.children) == 1
            standing = parent
        if has_chain:
            unheld = self._joined(unheld)
        if not self._is_plain:
            unheld = self._without_blockless(unheld)
        if unheld:
            self._store.policy.insert(self._give_entries(unheld))

    def held_end(self, run: Run) -> int:
        """Return the unit behind what is held on the way to the end of `run`."""
        standing = run
        while not standing.num_holders:
            if standing.parent is None:
                return 0
            standing = standing.parent
        return standing.end

    def num_blocks(self, run: Run) -> int:
        """Return how many blocks of ordered groups a run has."""
        if self._is_plain:
            return run.num_units
        return self.shape.num_ordered_blocks(run.start, run.end)

    # --- changing ------------------------------------------------------------------------------

    def split(self, run: Run, num_units: int) -> Run:
        """Cut off the first units of a run and return them as a run; the rest keeps its holders.

        Of a run that nobody holds the rest keeps the place in the policy: the caller holds the
        first part at once, before blocks are counted or taken. A rest that has no block of an
        ordered group leaves its place to the first part, and goes unless it has children.
        """
        head = run.split(num_units)
        self.num_runs += 1
        if self.keeps_pasts:
            head.has_past, head.cut_from = run.has_past, run.last_digest(self.shape.digest_bytes)
        if run.num_holders:
            head.num_holders = 1
        elif run.entry:
            if self.num_blocks(run):
                self._count_unheld(run, -self.num_blocks(head))
                return head
            head.entry, run.entry = run.entry, NO_ENTRY
            self.run_by_entry[head.entry] = head
            if not run.children:
                self._drop_blockless(run)
        return head

    def hand_up(self, run: Run, num_units: int) -> None:
        """Let the run above take over the first units of a run that `can_hand_up`, but not all.

        Whoever ends with the run above holds their blocks, one for each, from now on.
        """
        run.hand_up(num_units)
        self._count_unheld(run, -num_units)

    def hand_over_entry(self, tail: Run, head: Run) -> None:
        """Let the first part of a run that was split be evicted in its place, the rest never."""
        head.entry, tail.entry = tail.entry, NO_ENTRY
        self.run_by_entry[head.entry] = head
        self._count_unheld(head, self.num_blocks(head) - self.num_blocks(tail))

    def extend(
        self,
        run: Run,
        tokens: bytes,
        ids: Int32Array,
        handles: HandleArray,
        digests: bytes,
    ) -> Run:
        """Add units behind `run`, which the caller holds; return the run that he holds now.

        A leaf that can grow does; otherwise a new run takes over the caller's hold. No child of
        `run` begins with these tokens. Shapes: `(groups, num_units)`.
        """
        num_units = ids.shape[1]
        self.num_units += num_units
        if self.can_grow(run):
            run.append(tokens, ids, handles, digests, num_units)
            return run
        child = Run(run, tokens, ids=ids, handles=handles, digests=digests, num_units=num_units)
        child.num_holders = 1
        run.children[tokens[: self.shape.unit_bytes]] = child
        self.num_runs += 1
        return child

    def can_grow(self, run: Run) -> bool:
        """Say whether a run can take more units: a leaf that one row holds alone."""
        return (
            run.num_holders == 1
            and not run.children
            and run.parent is not None
            and not (self.keeps_pasts and run.has_past)
        )

    def plant(
        self, run: Run, tokens: bytes, ids: Int32Array, handles: HandleArray, digests: bytes
    ) -> Run:
        """Add units that nobody holds behind `run`; they can be evicted at once."""
        self.hold(run)
        child = self.extend(run, tokens, ids, handles, digests)
        self.release(child)
        return child

    def trim(self, run: Run, num_units: int) -> None:
        """Take units off the end of a leaf that nobody holds; it may go as a whole.

        The policy has given its entry out; the caller puts it back if some units stay, and frees
        the blocks.
        """
        self.num_units -= num_units
        if num_units < run.num_units:
            end = run.end
            gone = self.shape.num_ordered_blocks(end - num_units, end)
            self._count_unheld(run, -gone)
            run.trim(num_units)
        else:
            if run.entry:
                self._take_entries([run])
            self._unlink(run)

    def detach(self, run: Run) -> list[Run]:
        """Take a run and everything below it out of the tree; return them, the lowest last.

        Nobody holds them but each other. Entries leave the policy as forgotten.
        """
        gone = self.below(run)
        known = [each for each in gone if each.entry]
        if known:
            self._store.policy.discard(self._take_entries(known))
        for each in gone:
            self.num_units -= each.num_units
        self.num_runs -= len(gone) - 1
        parent, is_held = run.parent, run.num_holders > 0
        self._unlink(run)
        if is_held and parent is not None:
            self.release(parent)
        return gone

    def clear(self) -> None:
        """Forget everything. Nothing is held, and the policy's entries go with the blocks."""
        for root in self.roots.values():
            if root.tenant is not None:
                root.tenant.num_ties -= 1
        self.roots.clear()
        self._names.clear()
        self.run_by_entry.clear()
        self._free_entries.clear()
        self.num_runs = self.num_units = 0

    def forget_root_if_empty(self, run: Run) -> None:
        """Forget a namespace in which nothing is cached and nobody is."""
        if run.parent is None and not run.children and not run.num_holders:
            name = self._names.pop(id(run), None)
            if name is not None:  # else it was forgotten with everything
                del self.roots[name]
                if run.tenant is not None:
                    run.tenant.num_ties -= 1

    # --- inside --------------------------------------------------------------------------------

    def _joined(self, unheld: list[Run]) -> list[Run]:
        """Let unheld runs, each the parent of the one before, grow together where none branches
        off in between. Return those that are left."""
        runs: list[Run] = []
        first, num_runs = 0, len(unheld)
        while first < num_runs:
            end = first + 1
            while end < num_runs and len(unheld[end].children) == 1:
                end += 1
            for segment in self._worth_merging(unheld[first:end]):
                if len(segment) > 1:
                    self._merge(segment)
                runs.append(segment[0])
            first = end
        return runs

    def _without_blockless(self, runs: list[Run]) -> list[Run]:
        """Return those of unheld runs that have a block to go by; of the others leaves go."""
        kept = []
        for run in runs:
            if self.num_blocks(run):
                kept.append(run)
            elif self._num_ordered and not run.children:
                self._drop_blockless(run)
        return kept

    def _worth_merging(self, segment: list[Run]) -> Iterator[list[Run]]:
        short = sum(run.num_units for run in segment) <= _MERGED_UNITS
        is_worth = len(segment) == 1 or short or len(segment) >= _MANY_RUNS
        if is_worth and not self.keeps_pasts:
            yield segment
        else:
            for run in segment:
                yield [run]

    def _merge(self, segment: list[Run]) -> None:
        """Let the lowest of these runs take in the others."""
        run, above = segment[0], segment[1:]
        run.absorb(above)
        self.num_runs -= len(above)
        if run.parent is not None:
            run.parent.children[run.tokens[: self.shape.unit_bytes]] = run

    def _give_entries(self, runs: list[Run]) -> list[int]:
        """Give unheld runs the numbers by which the policy is to know them."""
        by_entry, free, num_blocks = self.run_by_entry, self._free_entries, 0
        entries = []
        for run in runs:
            entry = free.pop() if free else self.first_entry + len(by_entry)
            entries.append(entry)
            run.entry = entry
            by_entry[entry] = run
            run.has_past = True
            num_blocks += run.num_units if self._is_plain else self.num_blocks(run)
        self._count_unheld(runs[0], num_blocks)  # they are of one namespace
        return entries

    def _take_entries(self, runs: list[Run]) -> list[int]:
        """Take the entries of runs from them; the policy's are the caller's to take."""
        entries = [run.entry for run in runs]
        by_entry, num_blocks = self.run_by_entry, 0
        for run in runs:
            del by_entry[run.entry]
            run.entry = NO_ENTRY
            num_blocks += run.num_units if self._is_plain else self.num_blocks(run)
        self._free_entries += entries
        self._count_unheld(runs[0], -num_blocks)  # they are of one namespace
        return entries

    def _count_unheld(self, run: Run, change: int) -> None:
        """So many blocks of a run, or of others with its tenant, came out of use, or into it."""
        self._store.num_unheld_cached += change
        if run.tenant is not None and self._tenants is not None:
            self._tenants.count_unheld(run.tenant, change)

    def _unlink(self, run: Run) -> None:
        """Take a run out of its parent's children; a parent of no more use goes too."""
        parent = run.parent
        self.num_runs -= 1
        if parent is None:
            return
        del parent.children[run.tokens[: self.shape.unit_bytes]]
        if parent.children or parent.num_holders:
            return
        if parent.parent is None:
            self.forget_root_if_empty(parent)
        elif self._num_ordered and not self.num_blocks(parent):
            self._drop_blockless(parent)

    def _drop_blockless(self, run: Run) -> None:
        """Forget a leaf that has no block of an ordered group: no policy would ever."""
        self._bury(run)
        self.num_units -= run.num_units
        self._unlink(run)

    def blocks_of(self, run: Run, first_unit: int) -> IndexArray:
        """Return the ordered groups' blocks of a gathered run from its unit `first_unit` on.

        Tail first; of one unit in order of groups.
        """
        if self._is_plain:
            return index_array(run.ids[0, first_unit : run.num_units][::-1])
        ids = index_array(run.ids[:, first_unit : run.num_units].T[::-1].ravel())
        return ids if ids.all() else ids[ids != NULL_BLOCK_ID]
