"""What one fast core is made of: the parts that everything in it works on.

Handed to look-up, publisher, reserver and the rest when a core is put together; the arrays and
objects in it belong to that core alone. Refuses to do anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from kvcache.arrays import Int32Array
from kvcache.extents.announcer import Announcer
from kvcache.extents.block_store import BlockStore
from kvcache.extents.evictor import Evictor
from kvcache.extents.leaf_tails import LeafTails
from kvcache.extents.list_tables import ListTables
from kvcache.extents.match_tokens import MatchTokens
from kvcache.extents.published import StepLedger
from kvcache.extents.rows import Row, RowTables
from kvcache.extents.shape import TreeShape
from kvcache.extents.tree import RunTree
from kvcache.hash_algorithms import HashFn
from kvcache.hashing import BlockHash
from kvcache.policies import EvictionPolicy, PolicyFactory, make_eviction_policy
from kvcache.tenants import TenantBook, TenantLedger, TenantPolicy


@dataclass(frozen=True)
class PoolHabits:
    """How blocks are handed out: which policy evicts, whether they are cleared first, and whose
    they are, if there are tenants."""

    policy_name: str
    zeroes: bool
    policies: Mapping[str, PolicyFactory]
    tenants: TenantLedger | None = None

    def policy(self, capacity: int, book: TenantBook) -> EvictionPolicy:
        """Return an empty policy; raises ConfigurationError for a name that nobody has."""
        make = partial(make_eviction_policy, self.policy_name, capacity, book, self.policies)
        return make() if self.tenants is None else TenantPolicy(capacity, book, self.tenants, make)


@dataclass(frozen=True, eq=False)
class CoreParts:
    """The books of one core."""

    shape: TreeShape
    store: BlockStore
    tree: RunTree
    tables: RowTables
    tails: LeafTails
    ledger: StepLedger
    lists: ListTables
    evictor: Evictor
    announcer: Announcer
    match_tokens: MatchTokens
    hash_fn: HashFn
    none_hash: BlockHash

    def table_of(self, row: Row, group: int) -> Int32Array:
        """Return a row's table of one group, from whichever keeps it. Do not change it."""
        if group in self.lists.by_group:
            return self.lists.table(group, row.request.request_id)
        return self.tables.columns(group, row.index)


def make_parts(
    store: BlockStore,
    announcer: Announcer,
    hash_fn: HashFn,
    none_hash: BlockHash,
    habits: PoolHabits,
) -> CoreParts:
    """Return the parts of a new core over empty blocks.

    Raises:
        ConfigurationError: an unknown policy.
    """
    shape = announcer.shape
    evictor = Evictor(shape, store, announcer)
    tree = RunTree(shape, store, none_hash, evictor.bury)
    evictor.use(
        tree,
        lambda capacity: habits.policy(capacity, evictor),
        zeroes=habits.zeroes,
    )
    return CoreParts(
        shape,
        store,
        tree,
        RowTables(shape),
        LeafTails(shape),
        StepLedger(),
        ListTables(shape, store, evictor),
        evictor,
        announcer,
        MatchTokens(shape.unit_tokens),
        hash_fn,
        none_hash,
    )
