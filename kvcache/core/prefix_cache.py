"""`PrefixCache`: the blocks of one pool, and the contents that they hold.

Each node of its tree is a unit that continues its parent. Blocks without references stay cached
until a policy evicts them, or until their contents are forgotten: because blocks are needed, a
caller names them, the weights have changed, or everything is reset.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.errors import BlockError, InvariantError
from kvcache.core import CacheHit, CoreSettings, count_down, new_tuple, release_order
from kvcache.core.audit import free_list
from kvcache.core.columns import ColumnStore
from kvcache.core.digesting import Digester
from kvcache.core.eviction import BlockEntryTable, PolicyOrder, learn, offer_oldest
from kvcache.core.forgetting import forget
from kvcache.core.hits import look_up
from kvcache.core.names import *
from kvcache.core.notifier import Notifier
from kvcache.core.pool import acquire_all, release_all
from kvcache.core.prefix_tree import drop_root, new_root, rebuild_index
from kvcache.core.rebuild import rebuild
from kvcache.core.steps import StepTable
from kvcache.policies import make_eviction_policy
from kvcache.policies.adaptive import AdaptivePolicy
from kvcache.policies.lru import LRUPolicy
from kvcache.policies.registry import require_eviction_policy
from kvcache.protocol.labels import LabelSet, SealedContents, sorted_contents
from kvcache.requests.hashing import generate_block_hash_extra_keys
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import Namespace, Request
from kvcache.requests.request_content import DEFAULT_NAMESPACE
from kvcache.specs import can_cache_prefixes, require_eagle_support

_FEW_ROOTS = 64
_LEARNED_AT_ONCE = 24_000
_FEW_KEYS = 4096


class PrefixCache:
    """The contents of one pool of blocks: what is found, pinned, evicted and forgotten. The rows
    of the requests that use them are `FlatCore`'s.

    One owner, one thread. A raise leaves everything unchanged.
    """

    def __init__(self, settings: CoreSettings, slots_of: Callable[[Any], Int32Array]) -> None:
        """Make an empty cache. `slots_of` returns the slots of the requests that made blocks
        hittable, by their notes.

        Raises:
            ConfigurationError: there is no block, the policy is unknown, or a kind has no rules.
        """
        config, hash_fn = settings.kv_cache_config, settings.hash_fn
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        if settings.use_eagle:
            require_eagle_support(specs)
        policies = settings.policies
        policy_name = require_eviction_policy(settings.eviction_policy, policies)
        self.sizes = [spec.block_size for spec in specs]
        self._specs = specs
        self.store = store = ColumnStore(
            config.num_blocks,
            specs,
            hash_fn.digest_bytes,
            use_eagle=settings.use_eagle,
            ages=settings.ages,
        )
        self.hash_block_size = store.unit_tokens
        self.can_hit = settings.enable_caching and can_cache_prefixes(specs)
        self.is_caching = self.can_hit
        self.prefix_groups = [g for g, spec in enumerate(specs) if spec.reads_whole_prefix]
        self.digester = Digester(store, hash_fn)
        self.none_hash = settings.none_hash
        self.roots: dict[Namespace, int] = {}
        self.default_root = 0  # that of the default namespace
        self.namespaces: dict[int, Namespace] = {}
        self._roots_at_most, self._keys_at_most = _FEW_ROOTS, _FEW_KEYS
        publishes_all = settings.publish_all_groups or not self.prefix_groups
        self.notifier = Notifier(
            store,
            self.digester,
            settings,
            event_groups=frozenset(range(len(specs)) if publishes_all else self.prefix_groups),
            namespaces=self.namespaces,
            slots_of=slots_of,
        )
        store.columns.number[LOGS_GONE] = self.notifier.has_listeners
        self.tenants = settings.tenants
        make = partial(make_eviction_policy, policy_name, policies=policies)
        self._lists_cached = self.tenants is None and (
            policies[policy_name] in (AdaptivePolicy, LRUPolicy)
        )
        self._learner: AdaptivePolicy | None = None  # evicts by LRU until another order is better
        if self._lists_cached and policies[policy_name] is AdaptivePolicy:
            table = BlockEntryTable(store, self.digester, None)
            self._learner = AdaptivePolicy(config.num_blocks, table)
            # Batches cost less; pools of few blocks learn at once.
            store.columns.number[LOGS_USES] = max(1, (config.num_blocks - _LEARNED_AT_ONCE) // 32)
        learner = self._learner
        self._make_order = partial(
            PolicyOrder,
            store,
            self.digester,
            make if learner is None else lambda *_: learner,
            self.tenants,
            settings.clock,
        )
        self.order = None if self._lists_cached else self._make_order()
        self.steps = StepTable(store)
        self.pins: Counter[int] = Counter()
        self._no_hit = CacheHit((EMPTY_INT32,) * len(specs), 0)

    def look_up(self, request: Request) -> CacheHit:
        """Return the longest usable hit, at most `num_tokens - 1` tokens. Changes nothing."""
        if not self.is_caching or request.skip_reading_prefix_cache:
            return self._no_hit
        limit = request.num_tokens - 1
        num_units = limit // self.hash_block_size
        if not num_units:
            return self._no_hit
        store = self.store
        if num_units > store.num_reached:
            store.reach_units(num_units)
        first, other, keys = 0, 0, EMPTY_INT32
        if not request.is_plain:
            first, other, keys = self.keys_of(request, num_units, is_known=True)
        namespace = request.namespace
        root = self.default_root if namespace is DEFAULT_NAMESPACE else self.roots.get(namespace, 0)
        step = self.steps.current
        client = 0 if step is None else step.client
        length, _ = look_up(
            store.address, root, client, first, other, keys, request.token_buffer, limit
        )
        if not length:
            return self._no_hit
        length, found = int(length), store.columns.found
        if store.num_groups == 1:
            ids: tuple[Int32Array, ...] = (found[0, : length // self.sizes[0]].copy(),)
        else:
            ids = tuple([found[g, : length // size].copy() for g, size in enumerate(self.sizes)])
        hit: CacheHit = new_tuple(CacheHit, (ids, length))
        return hit

    def pin(self, hit: CacheHit) -> None:
        """Add a pin reference to the blocks of `hit`, which was just looked up."""
        ids = release_order(hit.block_ids, self.sizes, self.prefix_groups)
        acquire_all(self.store.address, ids)
        self.pins.update(ids.tolist())
        self.settle()

    def unpin(self, hit: CacheHit) -> None:
        """Drop one pin reference per block of `hit`."""
        ids = release_order(hit.block_ids, self.sizes, self.prefix_groups)
        count_down(self.pins, ids)
        release_all(self.store.address, ids)
        self.settle()

    def evict(self, block_ids: Sequence[int]) -> None:
        """Forget the contents of these blocks and what continues them; see `forget`. Requests with
        a forgotten block cache nothing more.

        Raises:
            BlockError: one of them does not exist; nothing was changed.
        """
        num_blocks = len(self.store.columns.block)
        bad = [b for b in block_ids if not 0 <= b < num_blocks]
        if bad:
            raise BlockError(f"blocks {bad[:5]} do not exist: ids are below {num_blocks}")
        self._forget(int32_array(block_ids))

    def reset(self) -> int:
        """Forget all contents, unless a block is in use. Return how many are in use (0: done)."""
        c = self.store.columns
        in_use = len(c.block) - 1 - self.num_free_blocks()
        if in_use:
            return in_use
        self._forget_all()
        if self._lists_cached:
            self.order = None
            c.number[HAS_GAPS] = c.number[HAS_POLICY] = 0
        return 0

    def forget_all(self) -> None:
        """Forget all contents, although blocks are in use. Running requests cache nothing more."""
        flags = self.store.columns.row[:, FLAGS]
        flags[(flags & IS_OPEN) != 0] |= NO_CACHING
        self._forget_all()

    def stop_hits(self) -> None:
        """Stop hits and caching until a `reset` succeeds, or until `forget_all`."""
        self.is_caching = False

    def sealed_contents(self) -> SealedContents:
        """Return what the labels of all sealed blocks say. O(blocks)."""
        c = self.store.columns
        ids = [(b, g, n) for n, g, b, is_sealed in self.store.contents() if is_sealed]
        if not ids:
            return SealedContents(EMPTY_INT32, EMPTY_INT32, b"")
        blocks, groups, nodes = int32_array(np.array(ids, np.int32).T)
        self.digester.make(np.ascontiguousarray(nodes))
        digests = c.digest[nodes].tobytes()
        return sorted_contents(blocks, groups, digests, c.digest.shape[1])

    def num_free_blocks(self) -> int:
        """Return how many blocks can be taken now, cached ones included."""
        return self.store.cells[FREE]

    def usage(self) -> float:
        """Return the share of blocks that are in use, 0.0 to 1.0."""
        total = len(self.store.columns.block) - 1
        return 1.0 - self.num_free_blocks() / total if total else 0.0

    def restore(self, labels: Sequence[LabelSet]) -> int:
        """Rebuild an empty core from the labels of all ranks; return how many blocks were kept.

        A block is kept if it is sealed and every rank agrees on it; of duplicate blocks one is
        kept, and no child without its ancestors. All kept blocks are evictable.

        Raises:
            BlockError: a block is referenced or cached already; nothing was changed.
        """
        kept = rebuild(self, labels)
        self.settle()
        return kept

    def root(self, namespace: Namespace) -> int:
        """Return the root of a namespace; make it if necessary. InvariantError: no node is left."""
        n = self.roots.get(namespace, 0)
        if n:
            return n
        if len(self.roots) >= self._roots_at_most:
            self._sweep_roots()
        if not self.reach_nodes(1):
            raise InvariantError("no node is left for a namespace")
        n = new_root(self.store.address)
        self.roots[namespace], self.namespaces[n] = n, namespace
        self.default_root = self.roots.get(DEFAULT_NAMESPACE, 0)
        self.digester.set_root(n, self.none_hash)
        return n

    def roots_of(self, namespaces: Sequence[Namespace]) -> list[int]:
        """Return the roots of several namespaces, and make those that are missing. None of them is
        dropped to make room for another, although no node continues them yet."""
        self._roots_at_most = max(self._roots_at_most, len(self.roots) + len(namespaces) + 1)
        return [self.root(namespace) for namespace in namespaces]

    def reach_nodes(self, num_more: int, spared: Int32Array = EMPTY_INT32) -> bool:
        """Make room for `num_more` nodes. If nodes outlive their blocks and too few are left,
        forget the oldest cached blocks, except those of the nodes `spared`. Return whether the
        nodes fit."""
        self.reach_index(num_more)
        while not self.store.reach_nodes(num_more):
            c = self.store.columns
            unheld = self._oldest_cached(max(16, len(c.block) // 64), spared)
            if not len(unheld):
                return False
            self._forget(unheld)
        return True

    def path_of(self, request: Request) -> Int32Array:
        """Return the nodes of all cached tokens of a request, for `hint`."""
        num_units = request.num_tokens // self.hash_block_size
        root = self.roots.get(request.namespace, 0)
        if not root or not num_units:
            return EMPTY_INT32
        store = self.store
        store.reach_units(num_units)
        keys = self.keys_of(request, num_units, is_known=True)
        step = self.steps.current
        client = 0 if step is None else step.client
        depth = look_up(
            store.address, root, client, *keys, request.token_buffer, request.num_tokens
        )[1]
        return store.columns.path[:depth].copy()

    def hint(self, path: Int32Array, hints: Sequence[CacheHint]) -> None:
        """Follow the hints of a request that has just been freed, for those blocks that are unused
        now. `path` is what `path_of` returned before."""
        if self.order is None:
            self._learn()
            self.order = self._make_order()
        self.order.tell()
        self.order.follow_hints()
        for hint in hints:
            self.order.hint(path, self._specs, hint)

    def keys_of(
        self, request: Request, num_units: int, *, is_known: bool = False
    ) -> tuple[int, int, Int32Array]:
        """Return the numbers of a request's extra keys: of its first unit; of later units without
        multimodal items; and of each of its first `num_units` units, if it has items.

        With `is_known`, extra keys that nothing cached has are -1 instead of getting a number.
        """
        if request.is_plain:
            return 0, 0, EMPTY_INT32
        number, unit = self.digester.number_of, self.hash_block_size
        if is_known:
            number = self.digester.known_number
        end = max([position.end for position in request.mm_positions], default=0)
        num_items = min(num_units, -(-end // unit))
        behind = -(-end // unit) * unit + unit
        other = number(generate_block_hash_extra_keys(request, behind, behind + unit, 0)[0])
        if not request.mm_positions:
            return (
                number(generate_block_hash_extra_keys(request, 0, unit, 0)[0]),
                other,
                EMPTY_INT32,
            )
        keys, at = np.full(num_units, other, np.int32), 0
        for u in range(max(num_items, min(1, num_units))):
            found, at = generate_block_hash_extra_keys(request, u * unit, (u + 1) * unit, at)
            keys[u] = number(found)
        return (int(keys[0]) if num_units else other), other, keys

    def sweep_keys(self) -> None:
        """Forget extra keys that no cached block and no running request has."""
        if self.digester.num_keys < self._keys_at_most:
            return
        c = self.store.columns
        used = [c.node[: c.number[NEXT_NODE], KEYS] >> 1, *c.row[:, FIRST_KEYS : OTHER_KEYS + 1].T]
        self.digester.keep_only(set(np.unique(np.concatenate(used)).tolist()))
        self._keys_at_most = max(_FEW_KEYS, 2 * self.digester.num_keys)

    def settle(self) -> None:
        """Read the kernels' logs: report forgotten contents, then what became hittable."""
        cells = self.store.cells
        if self.order is None and (cells[HAS_GAPS] or cells[NUM_MOVED] >= cells[LOGS_USES] > 0):
            is_lru = self._learn()
            if cells[HAS_GAPS] or not is_lru:
                self.order = self._make_order()
        if self.order is not None:
            self.order.tell()
        num_gone, num_notes = cells[NUM_GONE], cells[NUM_NOTES]
        if num_gone:
            c = self.store.columns
            cells[NUM_GONE] = 0
            gone = c.gone[:num_gone].copy()
            blocks, groups = np.ascontiguousarray(gone[:, 0]), gone[:, 1]
            self.notifier.forgotten(blocks, groups, c.gone_digest[:num_gone])
        if num_notes:
            cells[NUM_NOTES] = 0
            if self.steps.current is not None:
                self.steps.note(self.store.columns.note[:num_notes].copy())
            elif self.notifier.has_listeners or self.steps.has_waiting:
                notes = self.store.columns.note[:num_notes].copy()
                self.notifier.sealed(self.steps.settled(notes))
        if cells[IS_FULL]:
            raise InvariantError("a log of the columns was too short: changes were lost")

    def _learn(self) -> bool:
        """Tell the learner of uses. Return whether LRU is to evict."""
        if self._learner is None:
            return True
        learn(self.store, self._learner)
        return not (self.store.cells[EVICTED] and self._learner.ruling)

    def _forget(self, block_ids: Int32Array) -> None:
        forget(self.store.address, block_ids, self.no_blocks())
        self.settle()

    def _forget_all(self) -> None:
        c = self.store.columns
        cached = int32_array(np.flatnonzero(c.block[:, NODE]))
        sealed = int32_array([b for _, _, b, is_sealed in self.store.contents() if is_sealed])
        no_caching = c.row[:, FLAGS] & NO_CACHING
        c.number[LOGS_GONE] = 0
        forget(self.store.address, cached, self.no_blocks())
        c.number[LOGS_GONE] = self.notifier.has_listeners
        c.row[:, FLAGS] = (c.row[:, FLAGS] & ~NO_CACHING) | no_caching
        self.steps.clear()
        self.settle()
        self.notifier.unlabel(sealed)
        self.notifier.cleared()
        self.is_caching = self.can_hit

    def no_blocks(self) -> Int32Array:
        return np.zeros(len(self.store.columns.block), np.int32)

    def make_room(self, num_blocks: int) -> None:
        """Evict until `num_blocks` blocks can be taken from the list. Enough are free."""
        if self.order is not None:
            self.order.tell()
            self.order.make_room(num_blocks, self.notifier.offload)
        else:
            offer_oldest(self.store, self.notifier.offload, num_blocks)

    def _oldest_cached(self, count: int, spared: Int32Array) -> Int32Array:
        """Return unreferenced cached blocks, next victims first, without those of `spared`."""
        c, stay = self.store.columns, {0, *spared.tolist()}
        oldest = free_list(self.store) if self.order is None else self.order.policy.order()
        found = islice((b for b in oldest if c.block.item(b, NODE) not in stay), count)
        return int32_array(list(found))

    def _sweep_roots(self) -> None:
        """Drop namespaces without cached blocks and running requests."""
        c = self.store.columns
        for namespace, n in list(self.roots.items()):
            if not c.node.item(n, CHILDREN) and not c.node.item(n, ROWS):
                drop_root(self.store.address, n)
                del self.roots[namespace], self.namespaces[n]
        self.default_root = self.roots.get(DEFAULT_NAMESPACE, 0)
        self._roots_at_most = max(_FEW_ROOTS, 2 * len(self.roots))

    def reach_index(self, num_more: int) -> None:
        """Make room in the index for `num_more` nodes."""
        store = self.store
        num_indexed = store.cells[NUM_INDEXED] + num_more
        if 2 * num_indexed > len(store.columns.index):
            store.replace(index=np.zeros(1 << (2 * num_indexed).bit_length(), np.int32))
            rebuild_index(store.address)
