"""Which block is where below the device, and what moves: the scheduler's part of the connector.

Between vLLM's scheduler, which asks and tells of requests, and the tiers' hierarchy, which plans.
Knows requests by vLLM's own block hashes, and a block by its hash and its KV cache group. It is a
hit once every rank has said that it holds it; until then it is pending. One instance, in the
scheduler's thread. Refuses to touch bytes, and to read a clock: the time is passed in.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from math import inf
from typing import Any, NamedTuple

import numpy as np

from kvcache.base.arrays import BoolArray, int32_array
from kvcache.base.errors import ConfigurationError
from kvcache.base.logs import get_logger
from kvcache.coordinator.job_table import Job, JobTable
from kvcache.integrations.vllm.adapters import AdapterRevisions, digest_below
from kvcache.integrations.vllm.block_labels import NO_PARENT, block_labels
from kvcache.integrations.vllm.block_references import BlockReferences
from kvcache.integrations.vllm.kv_groups import NULL_BLOCK, BlockTables, NewTable
from kvcache.integrations.vllm.nodes import Nodes
from kvcache.integrations.vllm.options import EngineSetting
from kvcache.integrations.vllm.peer_loads import PeerLoads
from kvcache.integrations.vllm.peers import Peers
from kvcache.integrations.vllm.request_counts import RequestCounts
from kvcache.integrations.vllm.shared_directory import SharedDirectory
from kvcache.integrations.vllm.step_messages import (
    FileCommand,
    ImportCommand,
    Inventory,
    LoadCommand,
    RankCommands,
    RankReports,
    StoreCommand,
)
from kvcache.integrations.vllm.tier_events import TierEvents
from kvcache.integrations.vllm.transfer_params import TransferParams
from kvcache.offload.hierarchy import Place, PlaceArray, TierHierarchy
from kvcache.offload.jobs import Deadlines, JobKind
from kvcache.offload.keys import OffloadKey, get_offload_group_idx, make_offload_key
from kvcache.offload.options import HierarchyOptions, TierOptions
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.offload.statistics import HierarchyStatistics
from kvcache.offload.tier_manager import TierManager
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.hints import blocks_in
from kvcache.requests.request_content import DEFAULT_NAMESPACE, Namespace
from kvcache.sharing.messages import MAX_KEYS

ASK_S = 1.0

logger = get_logger(__name__)


@dataclass
class _Tracked:
    """A request that vLLM has told of. `origin`: which adapter and weights compute its blocks, None
    if they are not kept. `next_hash`: the first that was not looked at for a store;
    `wait_until_s`: until when it waits for what is pending or in files, infinity when it has waited
    and vLLM has no room for it, None before; `wait_left_s`: how long it may wait when it must
    again. `node_of`: by key, another
    node that holds the block, None before the coordinator has answered. `is_computed`: nothing is
    loaded for it any more."""

    request: Any
    origin: bytes | None
    wait_left_s: float
    digests: list[BlockHash] = field(default_factory=list)
    next_hash: int = 0
    num_local_tokens: int = 0
    wait_until_s: float | None = None
    is_asked_about: bool = False
    node_of: dict[bytes, str] | None = None
    has_fetched: bool = False
    is_computed: bool = False
    hits: tuple[PlaceArray, int] | None = None
    is_looked_up: bool = False

    @property
    def num_tokens(self) -> int:
        """All of its tokens so far."""
        return int(self.request.num_tokens)

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """vLLM's own, or those under which blocks of its origin are kept."""
        hashes: Sequence[BlockHash] = self.request.block_hashes
        if not self.origin:
            return hashes
        known = self.digests
        known += [BlockHash(digest_below(each, self.origin)) for each in hashes[len(known) :]]
        return known

    @property
    def namespace(self) -> Namespace:
        """One for all: vLLM's hashes have in them what separates requests."""
        return DEFAULT_NAMESPACE


@dataclass
class _Store:
    """An open store: whose blocks it reads."""

    request_ids: frozenset[str]
    blocks: frozenset[int]


@dataclass(frozen=True)
class _Load:
    """An open load: for whom, into which blocks."""

    request_id: str
    blocks: tuple[int, ...]


class _Filled(NamedTuple):
    """A block that is whole, and which one of its request's blocks it is."""

    key: OffloadKey
    parent: bytes
    block: int
    request: Any
    column: int


class BlockStore:
    """The tiers of one engine and their traffic.

    Invariant: a key is ready in a tier exactly when all ranks hold it and none has lost it.
    """

    def __init__(
        self,
        setting: EngineSetting,
        now: Callable[[], float],
        events: TierEvents | None = None,
        peers: Peers | None = None,
        *,
        nodes: Nodes | None = None,
    ) -> None:
        """Know nothing, and store nothing, until `adopt`. `events` follows the tiers; blocks of
        `peers` and other `nodes` are hits, too."""
        self._setting = setting
        self._finder = setting.groups.finder()
        self._hashes_per_block = setting.groups.hashes_per_block
        self._now = now
        self._events = events
        self._tiers: TierHierarchy | None = None
        self._jobs = JobTable(setting.num_ranks)
        self._kinds: dict[int, JobKind] = {}
        self._requests: dict[str, _Tracked] = {}
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, _Load] = {}
        self._waiting: set[str] = set()
        self._held = BlockReferences()
        self._ask_at_s = 0.0
        self._peers = peers
        self._peer_loads = PeerLoads(peers)
        self._directory: SharedDirectory | None = None
        self._nodes = nodes
        self._adapters = AdapterRevisions()
        self._weights = b""  # in each key, once weights may have changed
        self._kept: set[str] = set()
        self._loaded_into: set[int] = set()
        self._next = RankCommands()
        self.counts = RequestCounts()
        self.params = TransferParams()

    @property
    def statistics(self) -> HierarchyStatistics | None:
        """Statistics of the tiers, None before `adopt`."""
        return None if self._tiers is None else self._tiers.statistics()

    @property
    def held_blocks(self) -> BlockReferences:
        """Blocks that overdue loads may still write."""
        return self._held

    @property
    def has_unsent_commands(self) -> bool:
        """Whether ranks must be told or asked something although no request needs a step.

        While overdue loads hold blocks, ranks are asked once in `ASK_S` whether these have ended.
        """
        tiers = self._tiers
        if tiers is None:
            return False
        num_overdue = tiers.statistics().num_overdue if len(tiers.transfers) else 0
        return (
            self._next != RankCommands()
            or len(tiers.transfers) > num_overdue
            or any(job_id not in self._held for job_id in self._peer_loads)
            or (len(self._held) > 0 and self._now() >= self._ask_at_s)
            or bool(tiers.discards)
            or tiers.has_spills
            or (self._nodes is not None and self._nodes.is_asking)
        )

    def adopt(self, inventories: Mapping[int, Inventory]) -> tuple[int, int]:
        """Begin with what all ranks have alike; return how many host blocks and files that is.

        What they disagree about is forgotten on all of them. The rank with the largest blocks, of
        pipeline ranks that with the most layers, decides how many there are. Raises
        ConfigurationError unless each rank is there.
        """
        told = list(inventories.values())
        if len(told) != self._setting.num_ranks:
            raise ConfigurationError(
                f"{len(told)} of {self._setting.num_ranks} ranks have told of host memory: restart "
                "vLLM"
            )
        num_slots = min(each.num_slots for each in told)
        num_files = min(each.num_files for each in told)
        shape = told[0].shape
        block_bytes = 0 if shape is None else shape.slot_bytes
        tiers = self._make_tiers(num_slots, num_files, block_bytes)
        self._tiers = tiers
        tiers.begin_adoption()
        held = _agreed([inventory.slot_keys for inventory in told])
        tiers.adopt_host(block_labels(int32_array(list(held)), list(held.values())))
        stale = {slot for each in told for slot in each.slot_keys if slot < num_slots} - held.keys()
        num_files = 0
        if tiers.disk is not None:
            num_files = self._adopt_files(tiers, told)
            self._directory = SharedDirectory.of(told)
        self._next = replace(self._next, forgotten_slots=tuple(sorted(stale)))
        self.follow_events()
        ranks = [(each.shape, each.files_directory) for each in told if each.shape is not None]
        if len(ranks) == len(told):
            ranks.sort(key=lambda rank: rank[0].rank)
            shapes = [shape for shape, _ in ranks]
            directories = [directory for _, directory in ranks if directory]
            if self._peers is not None:
                self._peers.begin(shapes)
            if self._nodes is not None:
                self._nodes.begin(shapes, directories if len(directories) == len(ranks) else ())
        return len(held), num_files

    # --- a request's way

    def num_matched(self, request: Any, num_computed_tokens: int) -> int | None:
        """Return how many tokens behind `num_computed_tokens` can be loaded now, None if there will
        be more soon. One token at least is left to be computed, and only one of a prefetch."""
        tracked = self._track(request)
        count = self._num_matched(tracked, num_computed_tokens)
        if count is not None and self.params.is_prefetch(request):
            self._cut(tracked, num_computed_tokens + count + 1)
        return count

    def _num_matched(self, tracked: _Tracked, num_computed_tokens: int) -> int | None:
        request = tracked.request
        tracked.num_local_tokens = num_computed_tokens
        tracked.is_looked_up = True
        tiers, find = self._tiers, self._finder.find
        if tiers is None or tracked.is_computed or not self._has_whole_hashes(request):
            return 0
        if tracked.origin is None or self._held:  # while a copy hangs, others would wait behind it
            return 0
        if request.skip_reading_prefix_cache:  # whatever is found, vLLM computes all of it
            return 0
        self._follow_files(tiers)
        if self._nodes is not None and not self._knows_nodes(self._nodes, tracked):
            self.counts.for_files.begin(request.request_id, self._now())
            return None
        locate = self._locate if not tracked.node_of else partial(self._locate_for, tracked.node_of)
        hit = find(tracked, num_computed_tokens, locate, _is_coming)
        keys = [] if hit is None else hit.keys
        places = locate(keys)
        longest = (request.num_tokens - 1) // (step := self._finder.alignment_tokens) * step
        num_asked = self._setting.groups.num_blocks_between(num_computed_tokens, longest)
        if tracked.wait_until_s is None:  # otherwise what files had is in memory by now
            tracked.hits = places, max(num_asked, len(keys))
        least = num_computed_tokens + self._setting.options.offload.min_load_tokens
        if hit is not None and hit.num_tokens >= least and not _is_in_host(places).all():
            if self._waits(tracked, keys, places):
                self.counts.for_files.begin(request.request_id, self._now())
                return None
            hit = find(tracked, num_computed_tokens, self._locate, _is_in_host)
        elif tracked.wait_until_s is not None:
            self._stop_waiting(tracked, tracked.wait_until_s)
        if hit is None or hit.num_tokens < least:
            return 0
        return hit.num_tokens - num_computed_tokens

    def _cut(self, tracked: _Tracked, num_tokens: int) -> None:
        """Leave `num_tokens` of a prefetch: vLLM cannot end a request that computes nothing.

        Prompts with images or embeddings, whose positions vLLM has noted elsewhere, stay whole.
        """
        request = tracked.request
        request.max_tokens = 1
        if num_tokens >= request.num_tokens or request.mm_features:
            return
        if request.prompt_embeds is not None:
            return
        request.prompt_token_ids = request.prompt_token_ids[:num_tokens]  # the list is shared
        request.num_prompt_tokens = num_tokens
        del request._all_token_ids[num_tokens:]
        num_hashes = num_tokens // self._setting.groups.hash_tokens
        del request.block_hashes[num_hashes:]
        del tracked.digests[num_hashes:]

    def allocated(self, request: Any, tables: BlockTables, num_external_tokens: int) -> None:
        """Take note of a request's blocks; the next step loads its `num_external_tokens`."""
        tracked = self._track(request)
        if self._tiers is None:
            return
        if tracked.hits is not None:
            _count(self._tiers, *tracked.hits)
            tracked.hits = None
        if tracked.is_looked_up:
            tracked.is_looked_up = False
            if tracked.wait_until_s is not None:
                self._stop_waiting(tracked, tracked.wait_until_s)
                tracked.wait_until_s = None
            self.counts.admitted(request.num_tokens, tracked.num_local_tokens)
            if len(self.counts.for_files):
                self.counts.for_files.end(request.request_id, self._now())
        if not num_external_tokens:
            return
        self._waiting.add(request.request_id)
        keys, blocks = self._needed(tracked, tables, num_external_tokens)
        self._loaded_into.update(blocks)
        loads = self._plan_loads(self._tiers, request.request_id, keys, blocks)
        following = replace(self._next, loads=(*self._next.loads, *loads))
        if not loads:
            following = replace(following, received=(*following.received, request.request_id))
        loaded = {block for load in loads for block in load.blocks}
        missing = tuple(block for block in blocks if block not in loaded)
        tracked.is_computed = tracked.is_computed or bool(missing)
        if missing and self._setting.groups.fails_whole_requests:
            following = replace(following, failed=(*following.failed, request.request_id))
        elif missing:
            following = replace(following, invalid_blocks=following.invalid_blocks + missing)
        self._next = following

    def _track(self, request: Any) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            revision = self._adapters.revision_of(request.lora_request)
            origin = None if revision is None else self._weights + revision
            wait_s = self._setting.options.offload.wait_s
            tracked = self._requests[request.request_id] = _Tracked(request, origin, wait_s)
        return tracked

    def _needed(
        self, tracked: _Tracked, tables: BlockTables, num_external_tokens: int
    ) -> tuple[list[OffloadKey], tuple[int, ...]]:
        """Return keys and blocks of the tokens to be loaded, group by group, without null blocks:
        a group whose window does not reach back to a block does not need it."""
        start = tracked.num_local_tokens
        end = start + num_external_tokens
        keys: list[OffloadKey] = []
        blocks: list[int] = []
        for group, spec in enumerate(self._setting.groups.specs):
            table = tables[group]
            columns = range(start // spec.block_size, end // spec.block_size)
            needed = [column for column in columns if table[column] != NULL_BLOCK]
            keys += self._finder.keys_of(tracked, group, needed)
            blocks += [table[column] for column in needed]
        return keys, tuple(blocks)

    def finished(self, request_id: str) -> bool:
        """Forget a request; say whether its blocks are still needed, until a rank is told that it
        is `released`."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            self._follow_hints(tracked)
        self.counts.ended(request_id, self._now())
        if self._nodes is not None:
            self._nodes.forget(request_id)
        is_read = any(request_id in store.request_ids for store in self._stores.values())
        if not is_read:
            return False
        if request_id in self._waiting:
            return False  # vLLM keeps the blocks until they are loaded, and stores end before
        self._kept.add(request_id)
        return True

    def _follow_hints(self, tracked: _Tracked) -> None:
        """Follow the hints of a request that ends, in every tier."""
        if self._tiers is None or tracked.origin is None:
            return
        hints = self.params.hints_of(tracked.request)
        if not hints:
            return
        now_s = self._now()
        for group, spec in enumerate(self._setting.groups.specs):
            num_blocks = len(tracked.block_hashes) // self._hashes_per_block[group]
            keys = self._finder.keys_of(tracked, group, range(num_blocks))
            for hint in hints:
                meant = blocks_in(hint, spec.block_size, num_blocks)
                for tier in self._tiers:
                    tier.eviction.hint(keys, *meant, hint, now_s)

    # --- a step's way

    def commands(
        self,
        num_scheduled_tokens: Mapping[str, int],
        tables_of: Callable[[str], BlockTables | None],
        new_tables: Iterable[NewTable] = (),
    ) -> RankCommands:
        """Return what the ranks do in the step that schedules so many tokens of these requests.

        `new_tables` says which blocks requests have got for it.
        """
        tiers = self._tiers
        if tiers is None:
            return RankCommands()
        now_s = self._now()
        self._ask_at_s = now_s + ASK_S
        self._follow_files(tiers)
        if self._nodes is not None:
            self._follow_nodes(self._nodes, tiers)
        if len(tiers.transfers) or not tiers.is_disk_in_use:
            self._expire(tiers, now_s)
        following, self._next = self._next, RankCommands()
        reused = self._reused(new_tables)
        store = self._new_store(tiers, num_scheduled_tokens, tables_of, now_s)
        spills: list[FileCommand] = []
        while tiers.has_spills and (spill := tiers.plan_spills(now_s)) is not None:
            self._kinds[spill.job_id] = JobKind.SPILL
            spills.append(_file_command(spill.job_id, spill.addresses.tolist(), spill.keys))
        if tiers.discards:
            discards = tiers.discards.take()
            slots = following.forgotten_slots + tuple(discards.addresses.tolist())
            keys = following.forgotten_keys + b"".join(discards.keys)
            following = replace(following, forgotten_slots=slots, forgotten_keys=keys)
        if store is None and not spills and not reused:
            return following
        return replace(following, store=store, spills=tuple(spills), reused_blocks=reused)

    def received(self, request_ids: Collection[str]) -> None:
        """On all ranks, these requests wait no longer for their loads."""
        self._waiting.difference_update(request_ids)
        for request_id in request_ids:
            self.counts.for_loads.end(request_id, self._now())

    def reported(self, reports: RankReports) -> None:
        """Take note of what ranks have done."""
        for job_id in reports.overdue_loads:
            self._give_up(job_id)
        for rank, report in reports.jobs:
            ended = self._jobs.report(rank, report)
            if ended is not None:
                self._end(ended)

    def reset(self, *, keeps_weights: bool = False) -> None:
        """Forget everything: here now, on the ranks with the next step.

        The weights may be others from now on, unless `keeps_weights`. Blocks of requests that have
        begun follow from the old ones, and are not kept. Unless the options say that weights stay,
        no other engine finds what this one computes: it has read its weights where the old ones
        are.
        """
        if self._tiers is None:
            return
        self._tiers.reset()
        if not keeps_weights and not self._setting.options.adopt_after_reset:
            self._weights = uuid.uuid4().bytes
        for request_id, tracked in list(self._requests.items()):
            tracked.hits = tracked.origin = None
            if not tracked.request.num_computed_tokens and request_id not in self._waiting:
                del self._requests[request_id]
                self._track(tracked.request).is_computed = tracked.is_computed
        self.follow_events()

    def follow_events(self, *, is_cleared: bool = False) -> None:
        """Have events follow the tiers, once a step. `is_cleared`: the engine's stream has said
        that every medium is empty."""
        if self._events is None or self._tiers is None:
            return
        if is_cleared:
            self._events.state_again(self._tiers)
        else:
            self._events.follow(self._tiers)

    def check(self) -> None:
        """Raise InvariantError with the sum that failed."""
        self._jobs.check()
        if self._tiers is not None:
            self._tiers.check()

    # --- tiers

    def _make_tiers(self, num_slots: int, num_files: int, block_bytes: int) -> TierHierarchy:
        offload = self._setting.options.offload
        labels = None if self._events is None else self._events.contents.shape
        host = TierManager(
            TierOptions(
                HOST_MEDIUM,
                num_slots,
                policy=offload.policy,
                store_after=offload.store_after,
                labels=labels,
                block_bytes=block_bytes,
            )
        )
        disk = None
        if offload.disk is not None and num_files:
            disk = TierManager(
                TierOptions(
                    FILE_MEDIUM,
                    num_files,
                    policy=offload.disk.policy,
                    labels=labels,
                    block_bytes=block_bytes,
                )
            )
        options = HierarchyOptions(
            disk_write="on_evict" if offload.disk is None else offload.disk.write,
            spare_share=offload.spare_share,
            deadlines=Deadlines(offload.job_s, offload.job_s, 4 * offload.job_s, 4 * offload.job_s),
        )
        return TierHierarchy(host, disk, lambda: self._jobs.open("", 0), options)

    def _adopt_files(self, tiers: TierHierarchy, told: Sequence[Inventory]) -> int:
        """Take over the files that all ranks have; those of some only are removed."""
        sets = [set(inventory.file_keys) for inventory in told]
        common = set.intersection(*sets)
        keys = [key for key in told[0].file_keys if key in common]
        tiers.adopt_disk(block_labels(int32_array(range(len(keys))), keys))
        rest = sorted(set.union(*sets) - common)
        self._next = replace(self._next, forgotten_keys=b"".join(rest))
        problem = next((each.files_problem for each in told if each.files_problem), "")
        if problem:
            tiers.disk_use.leave(problem)
        return len(keys)

    def _follow_files(self, tiers: TierHierarchy) -> None:
        """Take note of files that other replicas have written and removed."""
        if self._directory is not None:
            self._directory.follow(tiers, self._now())

    def _expire(self, tiers: TierHierarchy, now_s: float) -> None:
        """Give jobs up that are overdue. What a store still reads then is of no use."""
        for job in tiers.expire(now_s):
            logger.warning("%s %d is overdue: it is given up", job.kind.value, job.job_id)
            store = self._stores.pop(job.job_id, None)
            if store is not None:
                self._release(store)

    def _waits(self, tracked: _Tracked, keys: Sequence[OffloadKey], places: PlaceArray) -> bool:
        """Have files read for a request; say whether it waits for them, or for what is pending."""
        now_s, tiers = self._now(), self._tiers
        assert tiers is not None
        if tracked.wait_until_s is None or tracked.wait_until_s == inf:
            tracked.wait_until_s = now_s + tracked.wait_left_s
        if now_s >= tracked.wait_until_s:
            return False
        is_own = (places != Place.PEER) & (places != Place.NODE)
        has_begun = self._import(tracked, keys, places)
        job = tiers.plan_fetch(list(compress(keys, is_own)), now_s)
        if job is not None:
            tracked.has_fetched = True
            self._kinds[job.job_id] = JobKind.FETCH
            self.counts.begins(job.job_id, len(job.keys), self._num_tokens(job.keys))
            fetch = _file_command(job.job_id, job.addresses.tolist(), job.keys)
            self._next = replace(self._next, fetches=(*self._next.fetches, fetch))
            return True
        if has_begun or places[np.flatnonzero(~_is_in_host(places))[0]] == Place.HOST_PENDING:
            return True
        # There is no room for them now. A second part of its files comes when the first has gone.
        return not tracked.has_fetched and tiers.is_disk_in_use and len(tiers.transfers) > 0

    def _stop_waiting(self, tracked: _Tracked, wait_until_s: float) -> None:
        """Keep what is left of a request's time until it must wait again."""
        tracked.wait_left_s = max(0.0, min(tracked.wait_left_s, wait_until_s - self._now()))
        tracked.wait_until_s = inf

    # --- other nodes

    def _follow_nodes(self, nodes: Nodes, tiers: TierHierarchy) -> None:
        """Take note of what was given to other nodes, and of what they keep, too."""
        if given := nodes.take_given():
            for tier in tiers:
                tier.touch(given)
        if beliefs := nodes.take_beliefs():
            for are_copies in (True, False):
                keys = [key for key, is_copy in beliefs.items() if is_copy is are_copies]
                tiers.mark_copies(keys, are_copies=are_copies)

    def _knows_nodes(self, nodes: Nodes, tracked: _Tracked) -> bool:
        """Ask, once, which other nodes hold what this one lacks of a request; say whether that is
        known."""
        if tracked.node_of is not None:
            return True
        request_id = tracked.request.request_id
        if not tracked.is_asked_about:
            tracked.is_asked_about = True
            keys = self._missing(tracked)
            if not keys:
                tracked.node_of = {}
                return True
            nodes.ask(request_id, keys)
        answer = nodes.answer_of(request_id)
        if answer is None:
            return False
        tracked.node_of = dict(answer)
        return True

    def _missing(self, tracked: _Tracked) -> list[OffloadKey]:
        """Return the keys of a request that this node lacks: those of all groups, up to the same
        token, as many as one question may have."""
        step, start = self._finder.alignment_tokens, tracked.num_local_tokens
        end = (tracked.num_tokens - 1) // step * step
        sizes = [spec.block_size for spec in self._setting.groups.specs]
        num_steps = MAX_KEYS // sum(step // size for size in sizes)
        end = min(end, (start // step + num_steps) * step)
        if end - start < self._setting.options.offload.min_load_tokens:
            return []
        keys: list[OffloadKey] = []
        for group, size in enumerate(sizes):
            keys += self._finder.keys_of(tracked, group, range(start // size, end // size))
        return list(compress(keys, self._locate(keys) == Place.NOWHERE))

    def _locate_for(self, node_of: Mapping[bytes, str], keys: Sequence[OffloadKey]) -> PlaceArray:
        """Return the places of a request's keys; `node_of` names other nodes that hold some."""
        places: PlaceArray = self._locate(keys).copy()
        absent = np.flatnonzero(places == Place.NOWHERE).tolist()
        places[[place for place in absent if keys[place] in node_of]] = Place.NODE
        return places

    def _import(self, tracked: _Tracked, keys: Sequence[OffloadKey], places: PlaceArray) -> bool:
        """Have blocks copied from other nodes, each once for a request; say whether any are."""
        tiers, node_of = self._tiers, tracked.node_of
        if tiers is None or not node_of:
            return False
        wanted: dict[str, list[OffloadKey]] = {}
        for place in np.flatnonzero(places == Place.NODE).tolist():
            wanted.setdefault(node_of[keys[place]], []).append(keys[place])
        has_begun = False
        for endpoint, of_node in wanted.items():
            labels = block_labels(int32_array(range(len(of_node))), of_node)
            job = tiers.plan_import(of_node, self._now(), labels=labels, spares=keys)
            if job is None:
                continue
            has_begun = True
            for key in job.keys:
                del node_of[key]
            self._kinds[job.job_id] = JobKind.IMPORT
            self.counts.begins(job.job_id, len(job.keys), self._num_tokens(job.keys))
            slots = tuple(job.addresses.tolist())
            curve = None if self._nodes is None else self._nodes.peer_keys
            command = ImportCommand(job.job_id, slots, b"".join(job.keys), endpoint, curve)
            self._next = replace(self._next, imports=(*self._next.imports, command))
        return has_begun

    # --- loads

    def _locate(self, keys: Sequence[OffloadKey]) -> PlaceArray:
        """Return the place of each key, in own tiers or with a peer."""
        assert self._tiers is not None
        return self._peer_loads.locate(keys, self._tiers.locate(keys))

    def _plan_loads(
        self,
        tiers: TierHierarchy,
        request_id: str,
        keys: Sequence[OffloadKey],
        blocks: Sequence[int],
    ) -> list[LoadCommand]:
        """Plan to load those of a request's blocks that are in host memory, own or a peer's."""
        is_peers = self._locate(keys) == Place.PEER
        loads = self._peer_loads.plan(
            request_id,
            list(compress(keys, is_peers)),
            list(compress(blocks, is_peers)),
            lambda: self._jobs.open("", 0),
        )
        own, job, now_s = list(compress(keys, ~is_peers)), None, self._now()
        if own:
            job = tiers.plan_load(own, now_s)
        if job is not None:
            load = LoadCommand(
                job.job_id,
                request_id,
                tuple(job.addresses.tolist()),
                tuple(compress(blocks, ~is_peers))[: len(job.keys)],
                job.keys,
            )
            loads.append(load)
        loaded = [OffloadKey(key) for load in loads for key in load.keys]
        rest = self._num_tokens(loaded) if loaded else 0  # groups may come from different memories
        for load in loads:
            self._kinds[load.job_id] = JobKind.LOAD
            self._loads[load.job_id] = _Load(request_id, load.blocks)
            num_tokens = min(self._num_tokens([OffloadKey(key) for key in load.keys]), rest)
            rest -= num_tokens
            self.counts.begins(load.job_id, len(load.blocks), num_tokens)
            self.counts.for_loads.begin(request_id, now_s)
        return loads

    # --- stores

    def _new_store(
        self,
        tiers: TierHierarchy,
        num_scheduled_tokens: Mapping[str, int],
        tables_of: Callable[[str], BlockTables | None],
        now_s: float,
    ) -> StoreCommand | None:
        """Plan to store the blocks that this step fills and no slot on this node holds."""
        filled = self._newly_filled(num_scheduled_tokens, tables_of)
        if filled and self._peer_loads.has_peers:
            is_stored = self._locate([each.key for each in filled]) != Place.PEER
            filled = list(compress(filled, is_stored))
        if not filled:
            return None
        keys, labels = [each.key for each in filled], None
        if self._events is not None:
            parents = [each.parent for each in filled]
            places = [(each.request, each.column) for each in filled]
            labels = self._events.describe(tiers, keys, parents, places)
        tiers.host.sightings.see(keys)
        job = tiers.plan_store(keys, now_s, labels=labels)
        if job is None:
            return None
        chosen = [filled[place] for place in job.positions.tolist()]
        blocks = tuple(each.block for each in chosen)
        owners = frozenset(each.request.request_id for each in chosen)
        self._kinds[job.job_id] = JobKind.STORE
        self._stores[job.job_id] = _Store(owners, frozenset(blocks))
        return StoreCommand(
            job.job_id,
            tuple(job.addresses.tolist()),
            blocks,
            job.keys,
            tuple(each.parent for each in chosen),
        )

    def _newly_filled(
        self,
        num_scheduled_tokens: Mapping[str, int],
        tables_of: Callable[[str], BlockTables | None],
    ) -> list[_Filled]:
        """Return the blocks that this step fills.

        A block counts as filled when vLLM has hashed it: then all its tokens are known, and none is
        a draft that may be rejected. A group's null blocks have left its window.
        """
        tokens, requests = self._setting.groups.hash_tokens, self._requests
        filled: list[_Filled] = []
        for request_id, num_tokens in num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is None or tracked.origin is None:
                continue
            request, first = tracked.request, tracked.next_hash
            end = (request.num_computed_tokens + num_tokens) // tokens
            if end <= first:
                continue
            end = min(end, len(request.block_hashes))
            if end <= first or not self._has_whole_hashes(request):
                continue
            tables = tables_of(request_id)
            if tables is None:
                continue
            tracked.next_hash = end
            hashes = tracked.block_hashes
            for last, group, column in self._filled(first, end):
                block = tables[group][column]
                if block == NULL_BLOCK:
                    continue
                before = last - self._hashes_per_block[group]
                key = make_offload_key(hashes[last], group)
                parent = NO_PARENT if before < 0 else hashes[before]
                filled.append(_Filled(key, parent, block, request, column))
        return filled

    def _filled(self, first: int, end: int) -> list[tuple[int, int, int]]:
        """Return the last hash, the group and the column of each block that ends in the hashes
        `[first, end)`, in this order: what fits is then of use to all groups."""
        return sorted(
            ((column + 1) * count - 1, group, column)
            for group, count in enumerate(self._hashes_per_block)
            for column in range(first // count, end // count)
        )

    def _reused(self, new_tables: Iterable[NewTable]) -> tuple[int, ...]:
        """Return the blocks that open stores read and that requests have got to write to them:
        those of a request that was preempted, or that have left a window."""
        got, self._loaded_into = self._loaded_into, set()
        if not self._stores:
            return ()
        for new in new_tables:
            tracked = self._requests.get(new.request_id)
            num_shared = tracked.num_local_tokens if new.is_whole and tracked is not None else 0
            for spec, blocks in zip(self._setting.groups.specs, new.blocks, strict=True):
                got.update(blocks[num_shared // spec.block_size :])
        return tuple(block for store in self._stores.values() for block in store.blocks & got)

    def _release(self, store: _Store) -> None:
        """Let the blocks go of finished requests that no store reads any more."""
        read = {name for other in self._stores.values() for name in other.request_ids}
        released = sorted(self._kept & store.request_ids - read)
        if released:
            self._kept -= set(released)
            self._next = replace(self._next, released=(*self._next.released, *released))

    # --- ends

    def _end(self, job: Job) -> None:
        """Take the reports of all ranks."""
        tiers = self._tiers
        kind = self._kinds.pop(job.job_id, None)
        if tiers is None or kind is None:
            return
        is_ok = not job.failures
        failed = set() if job.is_wholly_failed else job.block_ids
        if not is_ok:
            told = "; ".join(f"rank {each.rank}: {each.detail}" for each in job.failures)
            logger.warning("%s %d failed: %s", kind.value, job.job_id, told)
        visible = int32_array(())
        if kind is JobKind.STORE:
            store = self._stores.pop(job.job_id, None)
            if store is not None:
                self._release(store)
                if not is_ok:
                    self._store_again(store.request_ids)
            visible = tiers.end(job.job_id, is_ok)
        elif kind is JobKind.FETCH:
            visible = tiers.end(job.job_id, is_ok, failed, job.lost_ids)
            self.counts.fetch_ends(job.job_id, len(visible))
            if job.has_unread:
                tiers.disk_use.rest(job.failures[0].detail, self._now())
        elif kind is JobKind.IMPORT:
            visible = tiers.end(job.job_id, is_ok, failed)
            self.counts.import_ends(job.job_id, len(visible))
        elif kind is JobKind.SPILL:
            tiers.end(job.job_id, is_ok, failed)
        else:
            load = self._loads.pop(job.job_id)
            self._held.release(job.job_id)
            num_failed = 0 if is_ok else None if job.is_wholly_failed else len(failed)
            self.counts.load_ends(job.job_id, num_failed)
            if not self._peer_loads.ended(job.job_id, ok=is_ok, failed=failed):
                tiers.end(job.job_id, is_ok, failed)
            if not is_ok:
                self._doubt(load.request_id)
        if len(visible):
            sealed = self._next.sealed + tuple(visible.tolist())
            self._next = replace(self._next, sealed=sealed)

    def _give_up(self, job_id: int) -> None:
        """A rank waits no longer for a load: its request is computed, in other blocks.

        The copy may still write into the old ones, so they are held until all ranks have reported.
        """
        load = self._loads.get(job_id)
        if load is None:
            return
        logger.warning(
            "load %d has not ended: request %s is computed, and its %d blocks are not used until "
            "the load ends",
            job_id,
            load.request_id,
            len(load.blocks),
        )
        self._held.hold(job_id, load.blocks)
        self.counts.load_ends(job_id, None)
        if (tracked := self._requests.get(load.request_id)) is not None:
            tracked.is_computed = True
            tracked.next_hash = 0

    def _doubt(self, request_id: str) -> None:
        """A load of a request has failed: what was lost is stored again when it has been computed.

        The request is not loaded again: vLLM goes on to reserve blocks for it, and admits a second
        load only if they are free in spite of that.
        """
        self._store_again([request_id])
        if request_id in self._requests:
            self._requests[request_id].is_computed = True

    def _store_again(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.next_hash = 0

    def _num_tokens(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many tokens blocks have; of several groups, that with the most counts."""
        num_blocks = Counter(map(get_offload_group_idx, keys))
        specs = self._setting.groups.specs
        return max(count * specs[group].block_size for group, count in num_blocks.items())

    def _has_whole_hashes(self, request: Any) -> bool:
        """Say whether there is one hash for each block, as this class takes for granted."""
        tokens = self._setting.groups.hash_tokens
        return bool(len(request.block_hashes) == request.num_tokens // tokens)


def _is_in_host(places: PlaceArray) -> BoolArray:
    """Say which keys are in host memory, own or a peer's."""
    found: BoolArray = (places == Place.HOST) | (places == Place.PEER)
    return found


def _is_coming(places: PlaceArray) -> BoolArray:
    """Say which keys a tier has or is getting."""
    found: BoolArray = places > Place.UNKNOWN
    return found


def _count(tiers: TierHierarchy, places: PlaceArray, num_asked: int) -> None:
    """Add a look-up of `num_asked` blocks to the statistics of the engine's own tiers."""
    num_asked -= int(np.count_nonzero(places >= Place.PEER))
    own = ((Place.HOST, Place.HOST_PENDING), (Place.DISK, Place.DISK_PENDING))
    for tier, here in zip(tiers, own, strict=False):
        num_hits = int(np.count_nonzero(np.isin(places, here)))
        num_asked -= num_hits
        tier.counts.add_look_up(num_hits, num_asked)


def _agreed(slot_keys: Sequence[Mapping[int, bytes]]) -> dict[int, bytes]:
    """Return what all ranks have in the same slots, each key once, in the first rank's order."""
    first, *others = slot_keys
    agreed: dict[int, bytes] = {}
    seen: set[bytes] = set()
    for slot, key in first.items():
        if key not in seen and all(other.get(slot) == key for other in others):
            agreed[slot] = key
            seen.add(key)
    return agreed


def _file_command(job_id: int, slots: list[int], keys: Sequence[OffloadKey]) -> FileCommand:
    return FileCommand(job_id, tuple(slots), b"".join(keys))
