"""A pool of blocks for callers with block tables of their own: single-type managers, sequences.

`KVCacheManager` has no such pool. A `BlockPool` has columns of its own (`columns.py`); its callers
identify contents by digest.

    free ──get_new_blocks──▶ owned ──cache_full_blocks──▶ sealed ──evict_blocks──▶ owned
      ▲                        │                            │
      └──────free_blocks───────┘      an unreferenced cached block waits in the eviction policy

A cached block has a node. In a prefix group (full attention) the node continues that of the block
before it, which is never evicted first. In other groups each node stands alone. Each content has
one cached block; a duplicate stays private. The pool never hands out a referenced block, and never
takes back more references than it gave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import groupby

import numpy as np
from xxhash import xxh3_64_intdigest

from kvcache.base.arguments import (
    MAX_INT,
    MAX_INT32,
    as_bool,
    as_bytes,
    as_int,
    as_integers,
    check_kind,
)
from kvcache.base.arrays import Ids, Int32Array, int32_array
from kvcache.base.errors import (
    BlockError,
    ConfigurationError,
    InvariantError,
    OutOfBlocksError,
    RequestError,
)
from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent, ReferenceKind
from kvcache.core.audit import check_list, check_nodes
from kvcache.core.columns import ColumnStore
from kvcache.core.eviction import PolicyOrder
from kvcache.core.forgetting import forget
from kvcache.core.names import *
from kvcache.core.pool import acquire_all, first_free, release_all, take_blocks, take_listed
from kvcache.core.prefix_tree import get_or_add_child, new_root, put_block
from kvcache.policies import EVICTION_POLICIES, PolicyFactory, make_eviction_policy
from kvcache.requests.hashing import BlockHash, generate_block_hash_extra_keys
from kvcache.requests.request import Request
from kvcache.requests.request_content import DEFAULT_NAMESPACE, Namespace
from kvcache.specs import NULL_BLOCK_ID, FullAttentionSpec, SlidingWindowSpec

PREFIX, WINDOWED = range(2)
"""The two groups of the columns: blocks that need those before them, and blocks that do not."""

_SPECS = (FullAttentionSpec(1, 1, 1), SlidingWindowSpec(1, 1, 1, sliding_window=1))

_CONTENT_BYTES = 36
"""The bytes by which policies know a content: a digest of up to 32 bytes, and its group."""

_Table = tuple[Namespace, int]
"""Namespace and group."""


class BlockState(Enum):
    """What may be done with a block. If several states apply, the lowest one in this list counts.

    A hittable or sealed block may be in use or not: see `ref_cnt`.
    """

    FREE = "free"
    """Unreferenced and without content."""
    OWNED = "owned"
    """Referenced, and not (or no longer) found by its content."""
    HITTABLE = "hittable"
    """Full; its last token is scheduled, its bytes are not confirmed. A `BlockPool` has no steps:
    whatever it caches is sealed."""
    SEALED = "sealed"
    """Its bytes have been written on every rank."""
    IN_FLIGHT = "in flight"
    """A copy reads or writes it. It is not handed out before the copy ends."""
    QUARANTINED = "quarantined"
    """A write to it may still be in flight. It is not handed out before it is released."""


@dataclass(frozen=True, slots=True, repr=False)
class KVCacheBlock:
    """A view of one block of a pool, which is always current.

    `BlockPool.block` checks the id.
    """

    pool: BlockPool
    block_id: int

    @property
    def ref_cnt(self) -> int:
        """The number of references of all kinds; always 0 for the null block."""
        return self.pool.num_references(self.block_id)

    @property
    def block_hash(self) -> BlockHash | None:
        """The digest by which the block can be found, or None."""
        name = self.pool.names.get(self.block_id)
        return None if name is None else name[1]

    @property
    def is_null(self) -> bool:
        """Whether this is the placeholder for skipped positions."""
        return self.block_id == NULL_BLOCK_ID

    @property
    def state(self) -> BlockState:
        """What may be done with the block."""
        if self.block_id in self.pool.quarantined:
            return BlockState.QUARANTINED
        if self.pool.num_references(self.block_id, ReferenceKind.TRANSFER):
            return BlockState.IN_FLIGHT
        if self.block_id in self.pool.names:
            return BlockState.SEALED
        return BlockState.OWNED if self.ref_cnt else BlockState.FREE

    def reset_hash(self) -> None:
        """Forget the content of the block and of its cached descendants. References stay."""
        self.pool.evict_blocks([self.block_id])

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, {self.state.value}, ref_cnt={self.ref_cnt})"


class BlockPool:
    """Blocks `1..num_blocks - 1`, and block 0, the null block, which is never handed out.

    `names` has the namespace, group and digest of each cached block. Invariants: `_contents` is its
    inverse, and exactly its blocks have a node. A block's count in the columns is the sum of its
    `_references`, plus 1 if it is in `quarantined`.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        ordered_groups: Iterable[int] = frozenset({0}),
        eviction_policy: str = "lru",
        policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES,
        enable_kv_cache_events: bool = False,
    ) -> None:
        """Make a pool of free blocks.

        `ordered_groups` are the prefix groups (full attention): a block with a cached child is not
        evicted. `eviction_policy` names one of `policies`. With `enable_kv_cache_events`, events
        are kept for `take_events`.

        Raises:
            ConfigurationError: there is no block, or the policy is unknown.
        """
        num_blocks = as_int("num_blocks", num_blocks, 0, MAX_INT32, ConfigurationError)
        self.enable_caching = as_bool("enable_caching", enable_caching, ConfigurationError)
        keeps_events = as_bool("enable_kv_cache_events", enable_kv_cache_events, ConfigurationError)
        groups = as_integers("ordered_groups", ordered_groups, error=ConfigurationError)
        check_kind("policies", policies, Mapping, ConfigurationError)
        self._prefix_groups = frozenset(groups.tolist())
        make = partial(make_eviction_policy, eviction_policy, policies=policies)
        self._store = store = ColumnStore(num_blocks, _SPECS, _CONTENT_BYTES)
        store.replace(index=np.zeros(1 << (2 * num_blocks).bit_length(), np.int32))
        store.columns.number[LOGS_GONE] = 1
        self._order = PolicyOrder(store, None, make)
        self._root = int(new_root(store.address))
        store.columns.node[self._root, KEYS] = 1  # the parent of first blocks has a digest
        self._contents: dict[tuple[_Table, BlockHash], int] = {}
        self.names: dict[int, tuple[_Table, BlockHash]] = {}
        self._references: dict[ReferenceKind, dict[int, int]] = {kind: {} for kind in ReferenceKind}
        self.quarantined: set[int] = set()
        self._events: list[CacheEvent] | None = [] if keeps_events else None

    # --- counts and views ----------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return len(self._store.columns.block)

    @property
    def num_evictions(self) -> int:
        """How many cached blocks were evicted since the start."""
        return self._store.columns.number.item(EVICTED)

    @property
    def num_cached_blocks(self) -> int:
        """How many blocks can be found by their content."""
        return len(self.names)

    def get_num_free_blocks(self) -> int:
        """Return how many blocks `get_new_blocks` can hand out now, cached ones included."""
        return self._store.columns.number.item(FREE)

    def num_blocks_in_use(self) -> int:
        """Return how many blocks have a reference of any kind."""
        return len(set().union(*self._references.values()))

    def get_usage(self) -> float:
        """Return the share of blocks that cannot be handed out, 0.0 to 1.0."""
        total = self.num_blocks - 1
        return 1.0 - self.get_num_free_blocks() / total if total else 0.0

    def get_all_free_blocks(self) -> list[int]:
        """Return the free blocks in the order in which they are handed out: empty blocks, then
        victims. O(n), for audits."""
        blank = np.empty(self._store.columns.number[BLANK], np.int32)
        first_free(self._store.address, blank)
        return [*blank.tolist(), *self._order.policy.order()]

    def block(self, block_id: int) -> KVCacheBlock:
        """Return a view of a block; raises BlockError for an unknown id."""
        return KVCacheBlock(self, self._one_known(block_id))

    def num_references(self, block_id: int, kind: ReferenceKind | None = None) -> int:
        """Return a block's references of one kind, or of all; raises BlockError for an unknown
        id."""
        block_id = self._one_known(block_id)
        check_kind("kind", kind, (ReferenceKind, type(None)), BlockError)
        kinds = ReferenceKind if kind is None else (kind,)
        return sum(self._references[each].get(block_id, 0) for each in kinds)

    def num_unheld(self, block_ids: Ids) -> int:
        """Return how many of these distinct blocks are unreferenced. Null blocks do not count.

        Raises BlockError for an unknown block.
        """
        ids = self._known(block_ids)
        return int(np.count_nonzero(self._store.columns.block[ids[ids != 0], REF] == 0))

    # --- taking and giving back ----------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Hand out blocks, each with one request reference: empty blocks first, then evicted ones.

        Raises:
            BlockError: `num_blocks` is not a number of blocks.
            OutOfBlocksError: fewer are free; nothing was changed.
        """
        count = as_int("num_blocks", num_blocks, error=BlockError)
        num_free = self.get_num_free_blocks()
        if count > num_free:
            raise OutOfBlocksError(
                f"{count} blocks are wanted, {num_free} of {self.num_blocks - 1} are free: "
                "free requests or raise num_blocks"
            )
        taken = np.empty(count, np.int32)
        num_blank = min(count, self._store.columns.number.item(BLANK))
        take_blocks(self._store.address, taken[:num_blank])
        if num_blank < count:
            self._order.make_room(count - num_blank, None)
            take_blocks(self._store.address, taken[num_blank:])
            self._settle()
        block_ids: list[int] = taken.tolist()
        self._references[ReferenceKind.REQUEST].update(dict.fromkeys(block_ids, 1))
        return block_ids

    def touch(self, block_ids: Ids, kind: ReferenceKind = ReferenceKind.REQUEST) -> None:
        """Add one reference per mention of a block, which protects it from eviction.

        Raises:
            BlockError: unknown, the null block, quarantined, or free and empty; nothing was
                changed.
        """
        ids, held = self._holdable(block_ids), self._references_of(kind)
        quarantined = sorted(self.quarantined.intersection(ids.tolist()))
        if quarantined:
            raise BlockError(f"blocks {quarantined[:5]} are quarantined: release them first")
        block = self._store.columns.block
        empty = ids[(block[ids, REF] == 0) & (block[ids, NODE] == 0)]
        if len(empty):
            raise BlockError(
                f"blocks {empty[:5].tolist()} are free and hold nothing: take new ones instead"
            )
        acquire_all(self._store.address, ids)
        for block_id in ids.tolist():
            held[block_id] = held.get(block_id, 0) + 1
        self._settle()

    def free_blocks(self, block_ids: Ids, kind: ReferenceKind = ReferenceKind.REQUEST) -> None:
        """Drop one reference per mention of a block. Blocks that become unreferenced are evicted in
        the given order.

        Cached blocks go to the end of the eviction order, other blocks to the front of the free
        blocks.

        Raises:
            BlockError: unknown, or without a reference of this kind; nothing was changed.
        """
        ids, held = self._known(block_ids), self._references_of(kind)
        given = Counter(ids.tolist())
        for block_id, count in given.items():
            if held.get(block_id, 0) < count:
                raise BlockError(
                    f"block {block_id} is given back {count} times but has "
                    f"{held.get(block_id, 0)} {kind.value} references: free what you hold, once"
                )
        for block_id, count in given.items():
            held[block_id] -= count
            if not held[block_id]:
                del held[block_id]
        release_all(self._store.address, ids)
        self._settle()

    def quarantine(self, block_ids: Ids) -> None:
        """Forget blocks that may still be written to, and do not hand them out.

        Their references stay. Raises BlockError, unchanged, for an unknown block or the null block.
        """
        ids = self._holdable(block_ids)
        self._forget(ids)
        for block_id in set(ids.tolist()) - self.quarantined:
            acquire = acquire_all if self.num_references(block_id) else take_listed
            acquire(self._store.address, int32_array([block_id]))
            self.quarantined.add(block_id)

    def release_quarantine(self, block_ids: Ids) -> None:
        """End the quarantine of blocks: they can be handed out once they are unreferenced.

        Raises BlockError, unchanged, if one is not quarantined.
        """
        ids = dict.fromkeys(self._known(block_ids).tolist())
        bad = [b for b in ids if b not in self.quarantined]
        if bad:
            raise BlockError(f"blocks {bad[:5]} are not quarantined: nothing to release")
        self.quarantined.difference_update(ids)
        release_all(self._store.address, int32_array(list(ids)))

    # --- contents ------------------------------------------------------------------------------

    def get_cached_block(
        self,
        block_hash: BlockHash,
        group_ids: Sequence[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> list[int] | None:
        """Return the block with a digest in each group, or None if a group has none.

        Raises BlockError for a wrong type of digest, group or namespace.
        """
        as_bytes("block_hash", block_hash, BlockError)
        check_kind("namespace", namespace, Namespace, BlockError)
        groups = as_integers("group_ids", group_ids, error=BlockError).tolist()
        found = [self._contents.get(((namespace, g), block_hash)) for g in groups]
        return None if None in found else [b for b in found if b is not None]

    def cache_full_blocks(
        self,
        request: Request,
        block_ids: Ids,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        group_id: int = 0,
    ) -> None:
        """Make blocks `[num_cached_blocks, num_full_blocks)` of a request's table hittable.

        `block_ids` is the table of one group, with blocks of `block_size` tokens. Null blocks are
        left out. In a prefix group nothing is cached after a block that cannot be found.

        Raises:
            BlockError: a block is free, quarantined, or has a digest; nothing was changed.
            RequestError: the request has too few digests of this size; nothing was changed.
        """
        check_kind("request", request, Request, RequestError)
        table = self._known(block_ids)
        end = as_int("num_full_blocks", num_full_blocks, error=RequestError)
        start = as_int("num_cached_blocks", num_cached_blocks, 0, MAX_INT, RequestError)
        block_size = as_int("block_size", block_size, 1, error=RequestError)
        group_id = as_int("group_id", group_id, 0, MAX_INT32, BlockError)
        digests = _digests_of(request, block_size)
        if not start <= end <= min(len(table), len(digests)):
            raise RequestError(
                f"request {request.request_id}: blocks [{start}, {end}) cannot be cached, with "
                f"{len(table)} blocks and tokens for {len(digests)}: allocate blocks and append "
                "tokens first"
            )
        block, new = self._store.columns.block, table[start:end]
        new = new[new != NULL_BLOCK_ID]
        bad = new[(block[new, REF] == 0) | (block[new, NODE] != 0)].tolist()
        bad += self.quarantined.intersection(new.tolist())
        if bad or len(np.unique(new)) < len(new):
            raise BlockError(
                f"blocks {bad[:5] or new[:5].tolist()} cannot be cached: only a referenced block "
                "without a digest can, once"
            )
        name, entered = (request.namespace, group_id), []
        for i in range(start, end):
            b, before = int(table[i]), digests[i - 1] if i else None
            if b and self._enter(b, digests[i], before, name):
                entered.append(i)
        self._tell_stored(request, entered, digests, block_size, group_id)

    def cache_block(self, block_id: int, digest: BlockHash, parent: BlockHash | None) -> bool:
        """Make a block of group 0 hittable by `digest`, which continues `parent` (None: it is a
        first block). Return whether it is hittable now.

        It is not if another block has that content, or if the parent cannot be found. No event is
        sent, because the block's tokens are unknown.

        Raises:
            BlockError: the block is free, quarantined, or has a digest; nothing was changed.
        """
        block_id = self._one_known(block_id)
        as_bytes("digest", digest, BlockError)
        if parent is not None:
            as_bytes("parent", parent, BlockError)
        if self.block(block_id).state is not BlockState.OWNED:
            raise BlockError(
                f"blocks [{block_id}] cannot be cached: only a referenced block "
                "without a digest can"
            )
        return self._enter(block_id, digest, parent, (DEFAULT_NAMESPACE, 0))

    def evict_blocks(self, block_ids: Ids) -> list[int]:
        """Forget the contents of these blocks and of their cached descendants; return all of them.

        Blocks in use keep their references.

        Raises:
            BlockError: unknown block; nothing was changed.
        """
        return self._forget(self._known(block_ids))

    def reset_prefix_cache(self) -> bool:
        """Forget all contents; return False, unchanged, while any block is in use."""
        if self.num_blocks_in_use():
            return False
        events, self._events = self._events, None
        self._forget(int32_array(list(self.names)))
        if events is not None:
            self._events = [*events, AllBlocksCleared()]
        return True

    def take_events(self) -> list[CacheEvent]:
        """Return the events since the last call; empty unless events are enabled."""
        events = self._events or []
        if self._events is not None:
            self._events = []
        return events

    def check(self) -> None:
        """Raise InvariantError at the first invariant that does not hold. O(blocks)."""
        store, block = self._store, self._store.columns.block
        check_list(store)
        check_nodes(store, (self._root,), ())
        self._order.check()
        cached = np.flatnonzero(block[:, NODE]).tolist()
        if sorted(self.names) != cached or {b: n for n, b in self._contents.items()} != self.names:
            raise InvariantError(
                f"{len(cached)} blocks have nodes, {len(self.names)} have names, "
                f"{len(self._contents)} are found"
            )
        counts = Counter(self.quarantined)
        for held in self._references.values():
            counts.update(held)
        wrong = [b for b, held in enumerate(block[:, REF].tolist()) if held != counts[b]]
        if wrong:
            b = wrong[0]
            raise InvariantError(f"block {b} has {block[b, REF]} references, not {counts[b]}")

    # --- inside --------------------------------------------------------------------------------

    def _enter(
        self, block_id: int, digest: BlockHash, parent: BlockHash | None, table: _Table
    ) -> bool:
        """Make a block hittable in a table, unless its content is cached or its parent is missing.
        Return whether it is hittable now."""
        if not self.enable_caching or (table, digest) in self._contents:
            return False
        is_prefix_group, above = table[1] in self._prefix_groups, self._root
        if is_prefix_group and parent is not None:
            before = self._contents.get((table, parent))
            if before is None:
                return False
            above = self._store.columns.block.item(before, NODE)
        n = get_or_add_child(self._store.address, above, 0, int32_array([block_id]))
        c, content = self._store.columns, table[1].to_bytes(4, "big") + digest
        c.digest[n] = np.frombuffer(content.ljust(_CONTENT_BYTES)[:_CONTENT_BYTES], np.uint8)
        c.node[n, KEYS] |= 1
        c.name[n] = xxh3_64_intdigest(content) >> 20
        put_block(self._store.address, n, PREFIX if is_prefix_group else WINDOWED, block_id)
        self._contents[table, digest], self.names[block_id] = block_id, (table, digest)
        return True

    def _forget(self, ids: Int32Array) -> list[int]:
        lost = np.zeros(self.num_blocks, np.int32)
        forget(self._store.address, ids, lost)
        self._settle()
        gone: list[int] = np.flatnonzero(lost).tolist()
        return gone

    def _settle(self) -> None:
        """Tell the policy what happened, and drop the names of forgotten contents."""
        self._order.tell()
        c = self._store.columns
        count = c.number.item(NUM_GONE)
        c.number[NUM_GONE] = 0
        gone: dict[int, list[BlockHash]] = {}
        for block_id in c.gone[:count, 0].tolist():
            name = self.names.pop(block_id)
            del self._contents[name]
            (_, group), digest = name
            gone.setdefault(group, []).append(digest)
        if self._events is not None:
            self._events += [BlocksRemoved(g, "device", tuple(each)) for g, each in gone.items()]

    def _tell_stored(
        self,
        request: Request,
        entered: Sequence[int],
        digests: Sequence[BlockHash],
        size: int,
        group_id: int,
    ) -> None:
        """Keep an event for each run of consecutive blocks that became hittable."""
        if self._events is None:
            return
        for _, places in groupby(enumerate(entered), lambda place: place[1] - place[0]):
            run = [i for _, i in places]
            spans = [(i * size, (i + 1) * size) for i in run]
            keys = [generate_block_hash_extra_keys(request, *span, 0)[0] for span in spans]
            self._events.append(
                BlocksStored(
                    group=group_id,
                    medium="device",
                    digests=tuple(digests[run[0] : run[-1] + 1]),
                    parent_digest=digests[run[0] - 1] if run[0] else None,
                    token_ids=request.all_token_ids[spans[0][0] : spans[-1][1]].copy(),
                    block_size=size,
                    namespace=request.namespace,
                    extra_keys=tuple(keys) if any(keys) else (),
                )
            )

    def _references_of(self, kind: ReferenceKind) -> dict[int, int]:
        check_kind("kind", kind, ReferenceKind, BlockError)
        return self._references[kind]

    def _holdable(self, block_ids: Ids) -> Int32Array:
        """Do `_known`, and refuse the null block."""
        ids = self._known(block_ids)
        if np.count_nonzero(ids) < len(ids):
            raise BlockError("the null block has no references: leave it out")
        return ids

    def _one_known(self, block_id: int) -> int:
        """Return a block id; raises BlockError if it is unknown."""
        return self._known([block_id]).item()

    def _known(self, block_ids: Ids) -> Int32Array:
        """Return block ids as an array; raises BlockError if one is unknown."""
        ids = as_integers("block_ids", block_ids, -MAX_INT, error=BlockError)
        bad = ids[(ids < 0) | (ids >= self.num_blocks)].tolist()
        if bad:
            raise BlockError(f"blocks {bad[:5]} do not exist: ids are below {self.num_blocks}")
        return int32_array(ids)


def _digests_of(request: Request, block_size: int) -> Sequence[BlockHash]:
    """Return the digest of each full block of `block_size` tokens: that of its last hash block."""
    hasher = request.block_hasher
    unit = block_size if hasher is None else hasher.block_size
    if block_size % unit:
        raise RequestError(
            f"request {request.request_id} has a digest per {unit} tokens, which does not "
            f"divide a block of {block_size}: hash at a divisor of every group's block size"
        )
    per_block = block_size // unit
    return request.block_hashes[per_block - 1 :: per_block]
