"""Making room: what the policy proposes is forgotten, told of, and handed out.

Stands between whoever needs blocks and the policy. It is also the policy's book: it says what an
entry weighs. Refuses to touch what anybody holds.

    policy ──entries──▶ single blocks: forgotten at once, all together
                        runs: their last units, as many as are needed; what is beside them goes too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, Int32Array, index_array, int32_array
from kvcache.errors import InvariantError, OutOfBlocksError
from kvcache.extents.announcer import Announcer
from kvcache.extents.block_store import SEALED, BlockStore
from kvcache.extents.run import Run
from kvcache.extents.shape import GroupShape, TreeShape
from kvcache.extents.tree import RunTree
from kvcache.policies import EntryInfo, EvictionPolicy
from kvcache.tenants import TenantAccount
from kvcache.tenants.ledger import required


class Evictor:
    """Hands out blocks, and forgets contents, of runs or of single blocks.

    `group_of` and `digest_of` say what single blocks hold, where that must be told.
    """

    def __init__(self, shape: TreeShape, store: BlockStore, announcer: Announcer) -> None:
        """Work on `store`. `use` must be called with tree and policy before anything else."""
        self._shape = shape
        self._store = store
        self._announcer = announcer
        self._tree: RunTree
        self._zeroes = False
        self.is_uniform = not shape.ordered
        num_single = store.num_blocks if shape.others else 0
        self.group_of: npt.NDArray[np.int16] = np.zeros(num_single, dtype=np.int16)
        tells = any(group.index in announcer.published_groups for group in shape.others)
        self.digest_of = self._no_digests(num_single if tells else 0)

    def use(
        self, tree: RunTree, make_policy: Callable[[int], EvictionPolicy], *, zeroes: bool
    ) -> None:
        """Evict from `tree` by a policy made with its capacity; `zeroes`: clear what is taken."""
        self._tree = tree
        self._zeroes = zeroes
        runs = self._store.num_blocks if self._shape.ordered else 0
        policy = self._store.policy = make_policy(tree.first_entry + runs)
        tree.keeps_pasts = policy.reads_contents and bool(self._shape.ordered)
        if policy.reads_contents:
            self.digest_of = self._no_digests(len(self.group_of))

    # --- the policy's book ---------------------------------------------------------------------

    def weight(self, entry: int) -> int:
        """Return how many blocks an entry frees."""
        run = self._tree.run_by_entry.get(entry)
        return 1 if run is None else self._tree.num_blocks(run)

    def weights(self, entries: IndexArray) -> IndexArray:
        """Return how many blocks each entry frees."""
        weights = np.ones(len(entries), dtype=np.intp)
        for place in np.flatnonzero(entries >= self._tree.first_entry).tolist():
            run = self._tree.run_by_entry[int(entries[place])]
            weights[place] = self._tree.num_blocks(run)
        return weights

    def tenant_numbers(self, entries: IndexArray) -> IndexArray:
        """Return whose entries these are. There are tenants."""
        run_by_entry, owners = self._tree.run_by_entry, required(self._store.tenants).owners
        numbers = []
        for entry in entries.tolist():
            run = run_by_entry.get(entry)
            numbers.append(owners[entry] if run is None else required(run.tenant).number)
        return index_array(numbers)

    def blocks_of(self, entry: int) -> IndexArray:
        """Return the blocks that an entry of the policy stands for. For looking."""
        run = self._tree.run_by_entry.get(entry)
        if run is None:
            return index_array([entry])
        run.gather()
        return self._tree.blocks_of(run, 0)

    def describe(self, entry: int) -> EntryInfo:
        """Say what the eviction policy may know of an entry."""
        run = self._tree.run_by_entry.get(entry)
        if run is None:
            content = None
            if len(self.digest_of):
                group = int(self.group_of[entry])
                content = self.digest_of[entry].tobytes() + group.to_bytes(4, "big")
            return EntryInfo(content=content)
        if run.is_unsettled:
            run.settle()
        return EntryInfo(
            self._tree.num_blocks(run),
            parent=run.parent.entry if run.parent is not None and run.parent.entry else None,
            position=run.start,
            content=run.last_digest(self._shape.digest_bytes),
            num_children=len(run.children),
            contents=run.digests,
            cut_from=run.cut_from,
        )

    # --- handing out ---------------------------------------------------------------------------

    def take(self, count: int) -> Int32Array:
        """Hand out blocks, each with one reference; fresh ones first, then by eviction.

        Raises:
            OutOfBlocksError: fewer are free; nothing was changed.
        """
        store = self._store
        if count > store.num_fresh or store.tenants is not None:
            self._ensure_fresh(count)
        return self._handed_out(store.take_fresh(count))

    def take_for(self, accounts: Sequence[TenantAccount]) -> Int32Array:
        """Do `take` for several tenants: a block for each of `accounts`, in that order.

        All blocks of a tenant are taken together, in the order in which tenants come first.
        """
        tenants = required(self._store.tenants)
        taken = np.empty(len(accounts), dtype=np.int32)
        for account in dict.fromkeys(accounts):
            places = [place for place, each in enumerate(accounts) if each is account]
            tenants.serve(account)
            taken[places] = self.take(len(places))
        return taken

    def take_bare(self, count: int) -> Int32Array:
        """Do `take` without references; the caller gives each block one, or a content, at once.

        Raises:
            OutOfBlocksError: fewer are free; nothing was changed.
        """
        store = self._store
        if count > store.num_fresh or store.tenants is not None:
            self._ensure_fresh(count)
        return self._handed_out(store.take_bare(count))

    def _handed_out(self, block_ids: Int32Array) -> Int32Array:
        tenants = self._store.tenants
        if tenants is not None:
            tenants.took(block_ids, tenants.served)
        if self._zeroes:
            self._announcer.zero(block_ids)
        return block_ids

    def _ensure_fresh(self, count: int) -> None:
        """Evict where fewer blocks are fresh; raises OutOfBlocksError, unchanged."""
        store = self._store
        if store.tenants is not None:
            own = store.tenants.demand(count)
            if own and count <= store.num_free:
                self._make_room(max(count, store.num_fresh + own))
        if count > store.num_fresh:
            if count > store.num_free:
                raise OutOfBlocksError(
                    f"{count} blocks are wanted, {store.num_free} of {store.num_blocks - 1} are "
                    "free: free requests or raise num_blocks"
                )
            self._make_room(count)

    def _make_room(self, num_fresh: int) -> None:
        """Evict until so many blocks are fresh. Enough are free."""
        store, first_run = self._store, self._tree.first_entry
        kept: list[int] = []
        while store.num_fresh < num_fresh:
            victims = store.policy.choose(num_fresh - store.num_fresh)
            entries = victims.entries
            if not len(entries):
                if not kept:
                    raise InvariantError(
                        f"{num_fresh} blocks are to be fresh, {store.num_fresh} are, and nothing "
                        f"is left to evict of {store.num_unheld_cached} unheld blocks"
                    )
                # A policy may put parents before their children; those have gone meanwhile.
                store.policy.put_back(kept)
                kept = []
                continue
            last = int(entries[-1])
            if len(entries) > 1:
                entries = index_array(entries)
                if self._shape.others:
                    is_run = entries >= first_run
                    self._drop_singles(entries[~is_run])
                    entries = entries[is_run]
                entries = entries.tolist()
            elif last < first_run:
                self._drop_singles(index_array((last,)))
                continue
            for entry in entries:
                run = self._tree.run_by_entry[entry]
                if run.children:
                    kept.append(entry)
                    continue
                self._evict_tail(run, victims.num_blocks_of_last if entry == last else None)
        if kept:
            store.policy.put_back(kept)

    def _drop_singles(self, block_ids: IndexArray) -> None:
        """Evict single blocks that the policy has given out."""
        if len(block_ids):
            self._tell_going(block_ids, is_eviction=True)
            self._store.drop_victims(block_ids)

    def _evict_tail(self, run: Run, num_blocks: int | None) -> None:
        """Evict the last units of an unheld leaf with so many blocks; all of it for None."""
        store = self._store
        run.gather()
        num_units = run.num_units
        if num_blocks is not None:
            num_units = self._units_with(run, num_blocks)
        entry = run.entry
        gone = self.forget_units(run, run.num_units - num_units, is_eviction=True)
        store.num_evictions += len(gone)
        if store.tenants is not None:
            store.tenants.evicted_of(required(run.tenant), len(gone))
        is_whole = num_units == run.num_units
        self._tree.trim(run, num_units)
        store.put_fresh(gone, run.tenant)
        if not is_whole:
            store.policy.put_back([entry])

    def _units_with(self, run: Run, num_blocks: int) -> int:
        """Return how many units at the end of a run have so many blocks of ordered groups."""
        if self._shape.is_plain:
            return min(run.num_units, num_blocks)
        count = self._shape.num_ordered_blocks
        num_units = min(run.num_units, max(1, num_blocks // max(1, len(self._shape.ordered))))
        while num_units < run.num_units and count(run.end - num_units, run.end) < num_blocks:
            num_units += 1
        if not count(run.start, run.end - num_units):
            return run.num_units  # what is left would have no block to go by
        return num_units

    # --- forgetting ----------------------------------------------------------------------------

    def forget_units(self, run: Run, first: int, *, is_eviction: bool = False) -> IndexArray:
        """Forget a run's contents from its unit `first` on, and all that is beside them.

        Nothing that was appended to the run waits; what was trimmed may be there still.
        Returns the blocks of ordered groups, tail first; who holds them is the caller's to know.
        """
        store = self._store
        gone = self._tree.blocks_of(run, first)
        self._tell_units_going(run, first, gone, is_eviction=is_eviction)
        store.end_lives(gone)
        if len(run.handles):
            beside = run.handles[:, first : run.num_units]
            valid = store.ids_of(beside[store.are_valid(beside)])
            if len(valid):
                self.forget_single(valid, is_eviction=is_eviction)
        return gone

    def replace(
        self, run: Run, group: GroupShape, units: IndexArray, block_ids: Int32Array
    ) -> None:
        """Put sealed blocks in place of those at units of a settled run, whose content they have.

        What stood there has no content any more, and is fresh if nobody has a reference to it.
        """
        store = self._store
        run.ids = run.ids.copy()  # look-ups have given out views of it
        gone = run.ids[group.place, units]
        run.ids[group.place, units] = block_ids
        self._announcer.forgotten(gone[store.seals[gone] == SEALED])
        store.end_lives(index_array(gone))
        store.put_fresh(gone[store.references[gone] == 0])
        store.fill(block_ids, SEALED)

    def forget_single(self, block_ids: IndexArray, *, is_eviction: bool = False) -> None:
        """Forget the contents of blocks of other groups; those that nobody holds become fresh."""
        self._tell_going(block_ids, is_eviction=is_eviction)
        self._store.forget(block_ids)

    def bury(self, run: Run) -> None:
        """Forget what is beside a run that has no blocks of its own."""
        run.settle()
        self.forget_units(run, 0)

    def _tell_units_going(
        self, run: Run, first: int, gone: IndexArray, *, is_eviction: bool
    ) -> None:
        announcer, size = self._announcer, self._shape.digest_bytes
        if not (announcer.tells_contents or announcer.offload):
            return
        announcer.forgotten(gone[self._store.seals[gone] == SEALED])
        for group in self._shape.ordered:
            ids = run.ids[group.place, first : run.num_units]
            is_sealed = (self._store.seals[ids] == SEALED) & (ids != 0)
            if is_eviction and announcer.offload is not None and is_sealed.any():
                announcer.offload.on_eviction_candidates(group.index, int32_array(ids[is_sealed]))
            if group.index in announcer.published_groups:
                digests = np.frombuffer(run.digests, np.uint8).reshape(-1, size)
                announcer.removed(
                    group.index, digests[first : run.num_units][is_sealed][::-1].tobytes()
                )

    def _no_digests(self, num_blocks: int) -> npt.NDArray[np.uint8]:
        return np.zeros((num_blocks, self._shape.digest_bytes), dtype=np.uint8)

    def _tell_going(self, block_ids: IndexArray, *, is_eviction: bool) -> None:
        """Tell workers, tiers and listeners that contents of single blocks go."""
        announcer = self._announcer
        if not (announcer.tells_contents or announcer.offload):
            return
        sealed = block_ids[self._store.seals[block_ids] == SEALED]
        announcer.forgotten(sealed)
        groups = self.group_of[sealed]
        for group in np.unique(groups).tolist():
            ids = sealed[groups == group]
            if is_eviction and announcer.offload is not None:
                announcer.offload.on_eviction_candidates(group, int32_array(ids))
            if group in announcer.published_groups:
                announcer.removed(group, self.digest_of[ids].tobytes())
