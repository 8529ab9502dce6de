"""Eviction policies other than LRU, which Python asks for victims in arrays.

LRU is the free list itself, in compiled code. `adaptive` is only told of uses (`learn`) until an
order other than LRU rules and blocks have been evicted. Any other policy, your own or one per
tenant, orders the unreferenced cached blocks. Kernels log changes of these blocks in `moved`; after
each call the policy is told of them in order, in batches. Before blocks are taken, the policy is
asked for as many victims as blank blocks are lacking; kernels ask by a callback (EVICTS). A policy
sees block ids, never the columns. It gets back blocks of prefix groups that cached contents
continue.

The free list puts children before parents because requests release their blocks last one first.
After a fork of uncached blocks, a copy that outlives its request or a failed step, a request may
reference a block without those before it (HAS_GAPS). Then an `LRUPolicy` orders the blocks until
the next reset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_int64, c_void_p, cast
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np

from kvcache.base.arrays import IndexArray, Int32Array, index_array, int32_array
from kvcache.base.clock import Clock, SystemClock
from kvcache.base.compiled import array_type
from kvcache.base.errors import InvariantError
from kvcache.core import OffloadHooks
from kvcache.core.columns import ColumnStore, columns_of, logs_of, search_of
from kvcache.core.digesting import Digester
from kvcache.core.forgetting import forget
from kvcache.core.kinds.rule import FULL, KIND, LENGTH
from kvcache.core.machine import CORE, INT, NOTHING, kernel, routine
from kvcache.core.names import *
from kvcache.core.pool import count_evicted, evict_all, first_free, sealed_among
from kvcache.policies import EntryInfo, EvictionPolicy
from kvcache.policies.adaptive import AdaptivePolicy
from kvcache.policies.hinted import HintColumns, HintedPolicy
from kvcache.requests.hints import CacheHint, blocks_in
from kvcache.specs import KVCacheSpec
from kvcache.tenants import TenantLedger, TenantPolicy
from kvcache.tenants.ledger import required

_CALLBACK = CFUNCTYPE(c_int64, c_int64, c_int64, c_int64)

MakePolicy = Callable[[int, "BlockEntryTable"], EvictionPolicy]


class BlockEntryTable:
    """An `EntryTable`: what a policy may ask about blocks. Every entry is a block."""

    def __init__(
        self, store: ColumnStore, digester: Digester | None, tenants: TenantLedger | None
    ) -> None:
        """Answer from these columns. Without a digester, all contents have digests already."""
        self._store = store
        self._digester = digester
        self._tenants = tenants
        self.names_contents = False

    def tenant_numbers(self, entries: IndexArray) -> Int32Array:
        """Return the tenant number of each block. Only with tenants."""
        numbers: Int32Array = required(self._tenants).owners[entries]
        return numbers

    def describe(self, entry: int) -> EntryInfo:
        """Describe a block. All children in the tree count, whether or not they have blocks."""
        c = self._store.columns
        node = c.node
        n = c.block.item(entry, NODE)
        if not n:
            return EntryInfo()
        content, g = None, 0
        while node.item(n, BLOCK + 2 * g) != entry:
            g += 1
        if self.names_contents:
            if self._digester is not None and not node.item(n, KEYS) & 1:
                self._digester.make(int32_array([n]))
            content = c.digest[n].tobytes() + g.to_bytes(4, "big")
        above = n
        for _ in range(c.group.item(g, LENGTH)):
            above = node.item(above, PARENT)
        parent = node.item(above, BLOCK + 2 * g) if above else 0
        num_children = node.item(n, CHILDREN) if c.group.item(g, KIND) == FULL else 0
        return EntryInfo(parent=parent or None, content=content, num_children=num_children)

    def describe_all(self, entries: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return names and parents, see `policies.policy.columns_of`. Only blocks of prefix groups
        have parents, because others may lack them."""
        names, parents = np.empty((2, len(entries)), np.int64)
        describe_blocks(self._store.address, entries, names, parents)
        return names, parents


@routine
def name_of(core: Any, b: int) -> int:
    """Return the name of a block's content: that of the prefix, plus the group."""
    c = columns_of(core)
    n, g = np.int64(c.block[b, NODE]), np.int64(0)
    if n == 0:
        return -1 - b
    while g < len(c.group) - 1 and c.node[n, BLOCK + 2 * g] != b:
        g += 1
    return search_of(core).name[n] + g


@kernel(
    NOTHING, CORE, array_type("intp", is_read=True), array_type("int64"), array_type("int64"),
    checks_types=True,
)  # fmt: skip
def describe_blocks(core: Any, ids: Any, names: Any, parents: Any) -> None:
    """Set the names and parents of blocks. A name is that of the prefix, plus the group."""
    c = columns_of(core)
    for i in range(len(ids)):
        b = np.int64(ids[i])
        n, g = np.int64(c.block[b, NODE]), np.int64(0)
        names[i], parents[i] = name_of(core, b), -1
        while n and c.node[n, BLOCK + 2 * g] != b:
            g += 1
        if n == 0 or c.group[g, KIND] != FULL:
            continue
        for _ in range(c.group[g, LENGTH]):
            n = np.int64(c.node[n, PARENT])
        if n and c.node[n, BLOCK + 2 * g]:
            parents[i] = c.node[n, BLOCK + 2 * g]


@kernel(INT, CORE, array_type("int64"), array_type("bool_"))
def read_uses(core: Any, names: Any, hits: Any) -> int:
    """Write the names of the contents whose uses are logged, and whether they were hit; return how
    many there are still."""
    c = columns_of(core)
    moved, count = logs_of(core).moved, 0
    for i in range(c.number[NUM_MOVED]):
        b = np.int64(moved[i, 1])
        if c.block[b, NODE]:
            names[count], hits[count] = name_of(core, b), moved[i, 0] == REMOVED
            count += 1
    return count


def learn(store: ColumnStore, learner: AdaptivePolicy) -> None:
    """Tell a policy of the uses since the last call. LRU evicts."""
    cells, most = store.cells, store.cells[NUM_MOVED]
    names, hits = np.empty(most, np.int64), np.empty(most, np.bool_)
    count = read_uses(store.address, names, hits)
    cells[NUM_MOVED] = 0
    learner.learn(cells[FREE] - cells[BLANK], names[:count], hits[:count])


class PolicyOrder:
    """The unreferenced cached blocks, in the order of a policy."""

    def __init__(
        self,
        store: ColumnStore,
        digester: Digester | None,
        make: MakePolicy,
        tenants: TenantLedger | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Use a new policy, or one for each of `tenants`. Without a digester, all contents have
        their digests already."""
        self._store, self._digester, self._tenants = store, digester, tenants
        self._clock = SystemClock() if clock is None else clock
        capacity = len(store.columns.block)
        self._table = table = BlockEntryTable(store, digester, tenants)
        store.columns.number[HAS_POLICY] = 1 if tenants is None else 2
        self.policy: EvictionPolicy
        if tenants is None:
            self.policy = make(capacity, table)
        else:
            one = partial(make, capacity, table)
            self.policy = TenantPolicy(capacity, table, tenants, one, counts_unheld=True)
        self._table.names_contents = self.policy.reads_contents
        self._hints: HintColumns | None = None  # until the first hint
        self._is_shared = np.zeros(0, np.bool_)
        self._failure: BaseException | None = None
        this = ref(self)  # the order owns the callback

        def evict(num_blocks: int, *_: int) -> int:
            order = this()
            return 0 if order is None else order._answer(num_blocks)

        self._callback = _CALLBACK(evict)
        store.columns.number[EVICTS] = cast(self._callback, c_void_p).value or 0
        self._take_over()

    def _answer(self, num_blocks: int) -> int:
        """Evict for a kernel, which an error cannot pass: the next `tell` raises it."""
        try:
            self.tell()
            self._evict(num_blocks, None)
        except BaseException as error:
            self._failure = error
        return 0

    def follow_hints(self) -> None:
        """Follow hints from now on."""
        if self._hints is not None:
            return
        self._hints = columns = HintColumns(len(self._store.columns.block), self._clock.now())
        self._is_shared = np.zeros(len(self._store.columns.block), np.bool_)

        def hinted(inner: EvictionPolicy) -> EvictionPolicy:
            return HintedPolicy(inner, self._table, columns)

        if isinstance(self.policy, TenantPolicy):
            self.policy.wrap(hinted)
        else:
            self.policy = hinted(self.policy)
            self._store.columns.number[HAS_POLICY] = 3

    def hint(self, path: Int32Array, specs: Sequence[KVCacheSpec], hint: CacheHint) -> None:
        """Follow a hint for those blocks of a prefix that are unused now. `path` has its nodes,
        `specs` one kind of each group.

        What other contents continue, too, is shared: low priorities and claims about the next use
        do not apply there. Blocks that a continuation of the prefix does not read, such as those
        before a window, are not needed.
        """
        c = self._store.columns
        found: list[tuple[Int32Array, Any, Any]] = []
        for g, spec in enumerate(specs):
            units = int(c.group[g, LENGTH])
            nodes = path[units - 1 :: units]
            blocks = c.node[nodes, BLOCK + 2 * g]
            if len(branches := np.flatnonzero(c.node[nodes, CHILDREN] > 1)):
                self._is_shared[blocks[: branches[-1] + 1]] = True
            columns = np.arange(len(nodes))
            first, last = blocks_in(hint, spec.block_size, len(nodes))
            is_meant = (blocks != 0) & (c.block[blocks, REF] == 0)
            is_meant &= (columns >= first) & (columns < last)
            num_skipped = 0
            if not hint.is_for_shared:
                is_meant &= ~self._is_shared[blocks]
            if hint.priority is None:
                num_skipped = spec.num_skipped_tokens(len(nodes) * spec.block_size)
            ends = (columns[is_meant] + 1) * spec.block_size
            found.append((blocks[is_meant], ends, ends > num_skipped))
        blocks, ends, is_needed = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(ends, kind="stable")
        for part in (True, False):
            meant = index_array(blocks[order][is_needed[order] == part])
            if len(meant) and isinstance(self.policy, (HintedPolicy, TenantPolicy)):
                self.policy.hint(meant, hint, is_needed=part)

    def _take_over(self) -> None:
        """Move the cached blocks from the free list to the policy."""
        c = self._store.columns
        ids, num_blank = np.empty(c.number[FREE], np.int32), int(c.number[BLANK])
        cached = ids[num_blank : first_free(self._store.address, ids)]
        if len(cached):
            last = int(ids[num_blank - 1]) if num_blank else 0
            c.block[last, NEXT], c.block[0, PREV] = 0, last
            getattr(self.policy, "adopt", self.policy.insert)(index_array(cached))

    def tell(self) -> None:
        """Tell the policy what happened since the last call."""
        c = self._store.columns
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error
        if self._hints is not None:
            self._hints.now_s = self._clock.now()
        count = int(c.number[NUM_MOVED])
        if not count:
            return
        c.number[NUM_MOVED] = 0
        moved = c.moved[:count]
        if self._table.names_contents and self._digester is not None:
            nodes = c.block[moved[moved[:, 0] == INSERTED, 1], NODE]
            self._digester.make(np.ascontiguousarray(nodes[nodes != 0]))
        kinds, ids = moved[:, 0], index_array(moved[:, 1])
        cuts = [0, count]
        if (kinds != kinds[0]).any():
            cuts[1:1] = (np.flatnonzero(np.diff(kinds)) + 1).tolist()
        calls: dict[int, Callable[[IndexArray], None]] = {
            INSERTED: self.policy.insert,
            REMOVED: self.policy.remove,
            DISCARDED: self.policy.discard,
        }
        calls[BLANKED] = self._blanked
        for start, end in pairwise(cuts):
            calls[int(kinds[start])](np.ascontiguousarray(ids[start:end]))

    def _blanked(self, ids: IndexArray) -> None:
        """Forget the tenants of blocks without content, and their hints."""
        if self._tenants is not None:
            self._tenants.freed(ids)
        if self._hints is not None:
            self._hints.forget(ids)
            self._is_shared[ids] = False

    def make_room(self, num_blocks: int, offload: OffloadHooks | None) -> None:
        """Evict blocks until `num_blocks` are blank, including those that the served tenant must
        give up to stay within its share. Enough blocks are free, and the policy is up to date."""
        number = self._store.columns.number
        if self._tenants is not None and (num_own := self._tenants.demand(num_blocks)):
            self._evict(num_own + int(number[BLANK]), offload)
        self._evict(num_blocks, offload)

    def _evict(self, num_blank: int, offload: OffloadHooks | None) -> None:
        """Evict blocks until `num_blank` are blank."""
        c = self._store.columns
        kept: list[int] = []
        has_progress = False
        while (missing := num_blank - int(c.number[BLANK])) > 0:
            victims = index_array(self.policy.choose(missing))
            if not len(victims):
                self.policy.put_back(kept)
                if not has_progress:
                    self._forget(kept[:missing])
                kept, has_progress = [], False
                continue
            going, needed = int32_array(victims), np.empty(len(victims), np.int32)
            offer(self._store, offload, going)
            num_needed = evict_all(self._store.address, going, needed)
            kept += needed[:num_needed].tolist()
            has_progress |= num_needed < len(victims)
            if self._tenants is not None or self._hints is not None:
                gone = np.setdiff1d(going, needed[:num_needed], assume_unique=True)
                if self._tenants is not None:
                    self._tenants.evicted(index_array(gone))
                self._blanked(index_array(gone))
        if kept:
            self.policy.put_back(kept)

    def check(self) -> None:
        """Raise InvariantError unless the policy has exactly the unreferenced cached blocks."""
        c = self._store.columns
        unheld = np.flatnonzero((c.block[:, NODE] != 0) & (c.block[:, REF] == 0)).tolist()
        if sorted(self.policy.order()) != unheld or len(self.policy) != len(unheld):
            raise InvariantError(
                f"the policy orders {len(self.policy)} blocks, {len(unheld)} are cached and free"
            )
        if len(unheld) + c.number[BLANK] != c.number[FREE]:
            raise InvariantError(
                f"{len(unheld)} cached and {c.number[BLANK]} blank blocks are free, counted are "
                f"{c.number[FREE]}"
            )

    def _forget(self, block_ids: list[int]) -> None:
        """Forget blocks together with the contents in use that continue them; no other is left."""
        if not block_ids:
            raise InvariantError("blocks are free, but neither blank nor ordered by the policy")
        if self._tenants is not None:
            self._tenants.evicted(index_array(block_ids))
        lost = np.zeros(len(self._store.columns.block), np.int32)
        going = int32_array(block_ids)
        count_evicted(self._store.address, going)
        forget(self._store.address, going, lost)
        self.tell()


def offer(store: ColumnStore, offload: OffloadHooks | None, block_ids: Int32Array) -> None:
    """Tell the tiers below which sealed blocks are about to be evicted."""
    if offload is None:
        return
    sealed, groups = np.empty((2, len(block_ids)), np.int32)
    count = sealed_among(store.address, block_ids, sealed, groups)
    for g in range(store.num_groups):
        ids = sealed[:count][groups[:count] == g]
        if len(ids):
            offload.on_eviction_candidates(g, ids)


def offer_oldest(store: ColumnStore, offload: OffloadHooks | None, count: int) -> None:
    """Do `offer` for the blocks that LRU evicts when the next `count` blocks are taken."""
    if offload is None or count <= store.columns.number[BLANK]:
        return
    ids = np.empty(count, np.int32)
    offer(store, offload, ids[: first_free(store.address, ids)])
