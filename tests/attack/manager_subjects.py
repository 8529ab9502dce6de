"""Part of the table: requests, managers by call and by step, clients, pools, single-type
managers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors import AsyncKVCacheClient, KVCacheClient, LocalCluster
from kvcache import (
    BlockPool,
    CacheHint,
    Fork,
    FreeKVCacheBlockQueue,
    HybridKVCacheCoordinator,
    KVCacheBlocks,
    KVCacheCoordinatorNoPrefixCache,
    KVCacheManager,
    LoRARequest,
    MultiModalPosition,
    Namespace,
    NewRequest,
    Pin,
    PrefixCacheStats,
    PrefixCachingMetrics,
    Request,
    RequestHints,
    ResumedRequest,
    RunningRequests,
    RunningRow,
    SingleTypeKVCacheManager,
    StepRequest,
    UnitaryKVCacheCoordinator,
    VirtualClock,
    get_hash_fn,
    get_kv_cache_coordinator,
    get_manager_for_kv_cache_spec,
    get_request_block_hasher,
)
from kvcache.base.arrays import int32_array
from kvcache.config import parse_config
from kvcache.config.tenants import TenantsConfig
from kvcache.core import CacheHit, ReferenceKind, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.policies import EVICTION_POLICIES
from kvcache.protocol.labels import LabelSet
from kvcache.requests.hashing import BlockHash
from kvcache.requests.request_content import DEFAULT_NAMESPACE
from kvcache.specs import KVCacheSpec
from kvcache.tables.single_type_managers import MANAGERS
from tests.attack.argument_kinds import (
    BOOL,
    BYTES,
    COUNT,
    COUNTS,
    HOSTILE,
    ID,
    IDS,
    INTEGER,
    NO_LIST,
    NUMBER,
    OPTIONAL_TEXT,
    OPTIONAL_THING,
    POSITIVE,
    SECONDS,
    SHARE,
    TEXT,
    TEXTS,
    THING,
    TIME_LIMIT,
    TOKENS,
    Kind,
    instance_of,
    list_of,
)
from tests.attack.parameter_kinds import REQUEST_ID
from tests.attack.type_table import Arguments, Builder, Case, Subject, function_case
from tests.core.builders import chunked, cross, full, mamba, plan, window
from tests.manager.managers_under_test import ENCODER, HYBRID, Shape, make_config

STEP_NUMBER = INTEGER.also(-2, 2**63)
LABELS = list_of("label sets", {"a": 1})
HIT = instance_of(CacheHit)
HINTS = list_of("hints", [CacheHint], [CacheHint(is_over=True)] * 17, [{"is_over": True}])

PLAN = make_config(HYBRID, 64)
HASHER = get_request_block_hasher(4, get_hash_fn("sha256"))


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


COLUMN = Kind(
    "int32 column",
    (
        *NO_LIST,
        [0],
        (0,),
        ints(0, 0, 0),
        np.array([0]),
        np.array([0.0]),
        np.array(["0"]),
        np.array([True]),
        np.array([None]),
        np.zeros((1, 1), np.int32),
        np.int32(0),
        np.zeros(1, ">i4"),
    ),
)

# --- requests ------------------------------------------------------------------------------------


def make_request(name: str = "r", **options: Any) -> Request:
    return Request(name, list(range(9)), block_hasher=HASHER, **options)


def state_of_request(request: Request) -> object:
    return (
        request.all_token_ids.tolist(),
        request.num_computed_tokens,
        request.num_preemptions,
        len(request.known_block_hashes),
        request.block_hasher,
    )


def request_subject() -> Subject:
    of = Builder(Request)
    of.made(
        lambda world: {
            "request_id": "r",
            "prompt_token_ids": [1, 2, 3, 4],
            "lora": LoRARequest("a", "b"),
            "mm_positions": [(1, 2)],
            "mm_hashes": ["h"],
            "cache_salt": "s",
            "skip_reading_prefix_cache": True,
            "block_hasher": HASHER,
            "tenant": "t",
            "model_epoch": 1,
        },
        request_id=TEXT,
        prompt_token_ids=TOKENS.also([], np.array([], np.int32)),
        mm_positions=list_of("positions", [(1,)], [(1, 2.0)], [("1", 2)], [(0, 0)], [(8, 9)]),
        block_hasher=OPTIONAL_THING,
    )
    of.method("append_output_token_ids", {"ids": [1, 2]}, ids=TOKENS)
    of.method("attach_block_hasher", {"block_hasher": HASHER}, block_hasher=THING)
    of.method("truncate_tokens", {"num_tokens": 9}, num_tokens=ID)
    of.attribute("num_computed_tokens", ID, 3)
    of.attribute("num_preemptions", COUNT, 3)
    of.attribute("hints", HINTS, (CacheHint(is_over=True),))
    return Subject("request", make_request, state_of_request, cases=tuple(of.cases))


def plain_subject() -> Subject:
    """Functions without other state."""
    lora = Builder(LoRARequest)
    lora.made({"name": "a", "path": "b"}, name=TEXT, path=TEXT.without(""))
    position = Builder(MultiModalPosition)
    position.made({"offset": 0, "length": 1}, length=POSITIVE)
    hint = Builder(CacheHint)
    hint.made(
        {"start": 0, "end": 4, "priority": 50, "duration_s": 1.0},
        start=COUNT,
        end=POSITIVE.without(None),
        priority=COUNT.also(101),
        duration_s=TIME_LIMIT.without(None),
    )
    hint.made({"returns_in_s": 1.0}, returns_in_s=TIME_LIMIT)
    hint.made({"is_over": True}, is_over=BOOL)
    namespace = Builder(Namespace)
    namespace.made(
        {"model_epoch": 0, "lora": "l", "salt": "s", "tenant": "t"},
        lora=OPTIONAL_TEXT.without(""),
        salt=OPTIONAL_TEXT.without(""),
        tenant=OPTIONAL_TEXT.without(""),
    )
    blocks = Builder(KVCacheBlocks)
    blocks.made(
        {"block_ids": [[1, 2]], "unhashed_ids": [[2]]},
        block_ids=Kind("tables", (*NO_LIST, [1], [[1.5]], [["1"]], [[True]], [[-1]], [[2**40]])),
        unhashed_ids=Kind("tables", (5, 1.5, True, "x", HOSTILE, [1], [[1.5]], [[-1]])),
    )
    clock = Builder(VirtualClock, lambda world: VirtualClock(1.0))
    clock.made({"start_s": 1.0}, start_s=NUMBER)
    clock.method("advance", {"seconds": 1.0}, seconds=SECONDS)
    metrics = Builder(PrefixCachingMetrics, lambda world: PrefixCachingMetrics(3))
    metrics.made({"max_recent_requests": 3}, max_recent_requests=POSITIVE)
    metrics.method(
        "observe", lambda world: {"stats": PrefixCacheStats()}, stats=instance_of(PrefixCacheStats)
    )
    stats = Builder(PrefixCacheStats, lambda world: PrefixCacheStats())
    stats.method("record", {"num_tokens": 4, "num_hit_tokens": 2, "is_preempted": False})
    row = Builder(RunningRow)
    row.handed_to(
        lambda world, each: RunningRequests.from_rows([each]),
        {
            "slot": 1,
            "num_new_tokens": 1,
            "token_ids": (7, 8),
            "num_draft_tokens": 1,
            "num_rejected_tokens": 2,
        },
        slot=COUNT,
        num_new_tokens=COUNT,
        num_draft_tokens=COUNT,
        num_rejected_tokens=COUNT,
    )
    rows = Builder(RunningRequests, lambda world: RunningRequests)
    rows.method("from_rows", {"rows": [RunningRow(1, 1)]}, rows=list_of("rows", [RunningRow]))
    built = (lora, position, hint, namespace, blocks, clock, metrics, stats, row, rows)
    return Subject("plain", cases=tuple(case for each in built for case in each.cases))


# --- managers ------------------------------------------------------------------------------------


@dataclass
class ManagerWorld:
    """A manager with a caller's request, and three requests of steps, one of them preempted."""

    manager: KVCacheManager
    running: Request
    client: Any = None

    def step(self, step: int, **changes: Any) -> StepRequest:
        return StepRequest("engine", step, 1, **changes)

    def new_request(self) -> Request:
        return Request("new", list(range(12)))


def make_manager(shape: Shape = HYBRID) -> KVCacheManager:
    return KVCacheManager(
        make_config(shape, 64),
        shape.max_model_len,
        log_stats=True,
        enable_kv_cache_events=True,
        has_workers=True,
        max_num_seqs=8,
        clock=VirtualClock(),
    )


def make_world(shape: Shape = HYBRID) -> ManagerWorld:
    manager = make_manager(shape)
    running = Request("a", list(range(9)))
    num_encoder = 3 if shape is ENCODER else 0
    manager.allocate_slots(running, 9, num_encoder_tokens=num_encoder)
    running.num_computed_tokens = 9
    running.append_output_token_ids([9, 10])
    world = ManagerWorld(manager, running)
    new = [NewRequest(name, ints(*range(5)), 10) for name in "stp"]
    manager.step(world.step(1, new=tuple(new)))
    manager.step(world.step(2, completed_step=1, preempted_recompute=("p",)))
    manager.take_commands()
    return world


def state_of_world(world: ManagerWorld) -> object:
    return world.manager.dump_state(), state_of_request(world.running)


def check_world(world: ManagerWorld) -> None:
    world.manager.check()


def slots_good(world: ManagerWorld) -> Arguments:
    request = world.new_request()
    blocks, num_hit = world.manager.get_computed_blocks(request)
    return {
        "request": request,
        "num_new_tokens": 4,
        "num_new_computed_tokens": num_hit,
        "new_computed_blocks": blocks,
        "num_draft_tokens": 1,
        "num_lookahead_tokens": 2,
        "delay_cache_blocks": True,
        "num_external_computed_tokens": 0,
        "num_encoder_tokens": 0,
    }


def slot_kinds(number: Kind, blocks: Kind) -> dict[str, Kind]:
    return {
        "num_new_tokens": number,
        "num_new_computed_tokens": number,
        "new_computed_blocks": blocks,
        "num_draft_tokens": number,
        "num_lookahead_tokens": COUNT,
        "delay_cache_blocks": BOOL,
        "num_external_computed_tokens": number,
        "num_encoder_tokens": number,
    }


BLOCKS = instance_of(KVCacheBlocks)
SENT_IDS = Kind("ids", (*COUNTS.wrong, [2**31]), COUNTS.forms)
"""Ids that a client can send; the coordinator checks whether such a block exists."""


def manager_subject() -> Subject:
    of = Builder(KVCacheManager, lambda world: world.manager)
    of.made(
        lambda world: {
            "kv_cache_config": PLAN,
            "max_model_len": 80,
            "enable_caching": True,
            "caching_hash_algo": "sha256",
            "use_eagle": False,
            "log_stats": False,
            "enable_kv_cache_events": False,
            "watermark": 0.5,
            "eviction_policy": "lru",
            "max_num_seqs": 8,
            "max_pin_share": 0.5,
            "hash_seed": "seed",
            "clock": VirtualClock(),
            "offload_hooks": None,
            "event_sink": None,
            "zero_new_blocks": False,
            "has_workers": False,
            "model_epoch": 3,
            "merge_duplicates": False,
            "publish_all_groups": False,
            "tenants": None,
            "core_factory": FlatCore,
        },
        max_model_len=POSITIVE,
        watermark=SHARE.also(1.0),
        max_pin_share=SHARE,
        clock=OPTIONAL_THING,
        offload_hooks=OPTIONAL_THING,
        event_sink=OPTIONAL_THING,
        tenants=instance_of(TenantsConfig).without(None),
        core_factory=THING,
    )
    _request_methods(of, ID, IDS, BLOCKS)
    of.method("get_request", {"request_id": "s"})
    of.method("slot_of", {"request_id": "s"})
    of.method("request_in_slot", {"slot": 1}, slot=ID)
    of.method("release_client", {"client_id": "unknown"})
    of.method(
        "step",
        lambda world: {"request": world.step(3, completed_step=2)},
        request=instance_of(StepRequest),
    )
    of.method(
        "pin_prefix",
        {
            "tokens": list(range(8)),
            "ttl_s": 5.0,
            "lora": LoRARequest("a", "b"),
            "cache_salt": "s",
            "tenant": "t",
        },
        tokens=TOKENS.also([]),
    )
    of.method(
        "prefetch_prefix",
        {
            "tokens": list(range(8)),
            "lora": LoRARequest("a", "b"),
            "cache_salt": "s",
            "tenant": "t",
        },
        tokens=TOKENS.also([]),
    )
    step = Builder(StepRequest)
    step.handed_to(
        lambda world, request: world.manager.step(request),
        lambda world: {
            "client_id": "engine",
            "step": 3,
            "epoch": 1,
            "completed_step": 2,
            "failed_step": -1,
            "finished": ("t",),
            "preempted_recompute": (),
            "preempted_swap": (),
            "running": running_row(world.manager.slot_of("s")),
            "num_lookahead_tokens": 1,
            "resumed": (ResumedRequest("p", 4),),
            "new": (NewRequest("n", ints(*range(6)), 10),),
            "forks": (Fork("s", "f"),),
            "hints": (RequestHints("s", (CacheHint(is_over=True),)),),
        },
        step=POSITIVE.also(2),
        epoch=COUNT,
        completed_step=STEP_NUMBER,
        failed_step=STEP_NUMBER,
        finished=TEXTS,
        preempted_recompute=TEXTS,
        preempted_swap=TEXTS,
        running=instance_of(RunningRequests),
        resumed=list_of("resumed requests", [ResumedRequest]),
        new=list_of("new requests", [NewRequest]),
        forks=list_of("forks", [Fork]),
        hints=list_of("hints of requests", [RequestHints]),
    )
    hints = Builder(RequestHints)
    hints.handed_to(
        lambda world, each: world.manager.step(world.step(3, hints=(each,))),
        {"request_id": "s", "hints": (CacheHint(is_over=True),)},
        hints=HINTS,
    )
    resumed = Builder(ResumedRequest)
    resumed.handed_to(
        lambda world, each: world.manager.step(world.step(3, resumed=(each,))),
        {"request_id": "p", "max_new_tokens": 4},
    )
    fork = Builder(Fork)
    fork.handed_to(
        lambda world, each: world.manager.step(world.step(3, forks=(each,))),
        {"parent_id": "s", "child_id": "f"},
        parent_id=REQUEST_ID,
        child_id=REQUEST_ID,
    )
    new = Builder(NewRequest)
    new.handed_to(
        lambda world, each: world.manager.step(world.step(3, new=(each,))),
        lambda world: {
            "request_id": "n",
            "token_ids": ints(*range(9)),
            "max_new_tokens": 20,
            "num_external_computed_tokens": 1,
            "num_lookahead_tokens": 2,
            "lora_name": "l",
            "lora_path": "p",
            "mm_hashes": ("h",),
            "mm_offsets": ints(1),
            "mm_lengths": ints(2),
            "cache_salt": "s",
            "tenant": "t",
            "skip_reading_prefix_cache": True,
            "num_encoder_tokens": 0,
            "delay_cache_blocks": True,
            "hints": (CacheHint(priority=80),),
        },
        request_id=TEXT,
        token_ids=TOKENS.also([], np.array([], np.int32)),
        num_external_computed_tokens=ID,
        lora_name=TEXT,
        lora_path=OPTIONAL_TEXT.without(""),
        mm_offsets=COUNTS,
        mm_lengths=COUNTS,
        num_encoder_tokens=ID,
        hints=HINTS,
    )
    rows = Builder(RunningRequests)
    rows.handed_to(
        lambda world, each: world.manager.step(world.step(3, running=each)),
        lambda world: vars(running_row(world.manager.slot_of("s"))),
        slots=COLUMN,
        num_new_tokens=COLUMN,
        num_draft_tokens=COLUMN,
        num_rejected_tokens=COLUMN,
        token_offsets=COLUMN,
        token_ids=COLUMN,
        draft_token_ids=COLUMN,
    )
    pin = pin_case(lambda world, each: world.manager.unpin_prefix(each))
    cases = (*of.cases, *step.cases, *resumed.cases, *fork.cases, *hints.cases, *new.cases)
    cases += (*rows.cases, pin)
    return Subject("manager", make_world, state_of_world, check_world, cases)


def _request_methods(of: Builder, number: Kind, ids: Kind, blocks: Kind) -> None:
    """The methods that a manager and its clients share."""
    of.method("get_computed_blocks", lambda world: {"request": world.new_request()})
    of.method("allocate_slots", slots_good, **slot_kinds(number, blocks))
    of.method(
        "fork",
        lambda world: {
            "parent_request": world.running,
            "child_request": Request("child", list(range(11))),
        },
    )
    of.method(
        "cache_blocks",
        lambda world: {"request": world.running, "num_computed_tokens": 8},
        num_computed_tokens=number,
    )
    of.method("free", lambda world: {"request": world.new_request()})
    of.method("free_block_hashes", lambda world: {"request": world.running})
    of.method("get_block_ids", {"request_id": "a"})
    of.method("get_blocks", {"request_id": "a"})
    of.method(
        "get_num_common_prefix_blocks",
        lambda world: {"request": world.running, "num_running_requests": 3},
    )
    of.method("reset_prefix_cache", {"drain": False})
    of.method("evict_blocks", {"block_ids": [1, 2]}, block_ids=ids)
    of.method("unpin_prefix", {"pin": Pin(1, 0, 0, 0.0)}, pin=instance_of(Pin))


def pin_case(call: Any) -> Case:
    """A pin of any client: only its number matters."""
    return Case(
        "Pin.__init__",
        {"pin_id": COUNT},
        lambda world: {"pin_id": 1},
        lambda world, arguments: call(world, Pin(arguments["pin_id"], 1, 1, 1.0)),
    )


def running_row(slot: int | None) -> RunningRequests:
    return RunningRequests.from_rows([RunningRow(slot or 0, 1, (7,))])


def encoder_subject() -> Subject:
    """A manager with encoder tokens."""
    of = Builder(KVCacheManager, lambda world: world.manager)

    def good(world: ManagerWorld) -> Arguments:
        return {"request": world.new_request(), "num_new_tokens": 4, "num_encoder_tokens": 3}

    of.method("allocate_slots", good, **slot_kinds(ID, BLOCKS.without(None)))
    return Subject(
        "manager with an encoder",
        lambda: make_world(ENCODER),
        state_of_world,
        check_world,
        tuple(of.cases),
    )


def empty_subject() -> Subject:
    """A manager without requests that can be restored."""
    of = Builder(KVCacheManager, lambda world: world)
    of.method("restore", {"labels": []}, labels=LABELS.also([LabelSet]))
    return Subject(
        "empty manager",
        make_manager,
        lambda world: world.dump_state(),
        lambda world: world.check(),
        tuple(of.cases),
    )


# --- clients -------------------------------------------------------------------------------------

CLUSTER = parse_config(
    {
        "name": "types",
        "model": {
            "name": "small",
            "max_model_len": 128,
            "layers": [{"kind": "full", "count": 2, "num_kv_heads": 2, "head_size": 8}],
        },
        "cache": {"block_size": 4, "memory_per_rank": "1MiB"},
        "content_check": {"enabled": False},
    }
)


@dataclass
class ClientWorld:
    """A client and its manager."""

    cluster: LocalCluster
    client: KVCacheClient
    running: Request

    @property
    def manager(self) -> KVCacheManager:
        manager = self.cluster.coordinator.manager
        assert manager is not None
        return manager

    def new_request(self) -> Request:
        return Request("new", list(range(12)))


class BorrowedAsyncClient(AsyncKVCacheClient):
    """The asyncio client's methods over the connection of a synchronous one."""

    def __init__(self, client: KVCacheClient) -> None:
        self._client = client
        self._connection = client._connection
        self._sent = client._sent
        self._last_seq = 0

    async def _run(self, call: Any) -> Any:
        return self._client._run(call)

    async def _submit(self, make: Any, timeout_s: float | None) -> int:
        return self._client._submit(make, timeout_s)

    async def _wait(self, is_done: Any, timeout_s: float, what: str) -> None:
        self._client._wait(is_done, timeout_s, what)


def make_client_world() -> ClientWorld:
    cluster = LocalCluster(CLUSTER)
    client = cluster.client()
    running = Request("a", list(range(9)))
    client.allocate_slots(running, 9)
    running.num_computed_tokens = 9
    running.append_output_token_ids([9, 10])
    return ClientWorld(cluster, client, running)


def state_of_client(world: ClientWorld) -> object:
    session = world.client._connection.session
    return (
        world.manager.dump_state(),
        state_of_request(world.running),
        session.state,
        session.next_step,
    )


WAIT = SECONDS.without(None)


def client_subject(is_async: bool) -> Subject:
    cls = AsyncKVCacheClient if is_async else KVCacheClient

    def target(world: ClientWorld) -> Any:
        return BorrowedAsyncClient(world.client) if is_async else world.client

    of = Builder(cls, target)
    _request_methods(of, COUNT, SENT_IDS, BLOCKS.without(None))
    of.method(
        "pin_prefix",
        {
            "token_ids": list(range(8)),
            "ttl_s": 5.0,
            "lora": LoRARequest("a", "b"),
            "cache_salt": "s",
            "tenant": "t",
        },
        ("ttl_s",),
    )
    of.method(
        "prefetch_prefix",
        {
            "token_ids": list(range(8)),
            "lora": LoRARequest("a", "b"),
            "cache_salt": "s",
            "tenant": "t",
        },
    )
    step = instance_of(StepRequest).also(
        StepRequest(completed_step=True),  # type: ignore[arg-type]  # must be refused
        StepRequest(finished="a"),  # type: ignore[arg-type]
        StepRequest(completed_step=1.5),  # type: ignore[arg-type]
        StepRequest(new=(NewRequest("n", ints(1), 1.5),)),  # type: ignore[arg-type]
        StepRequest(running=[1]),  # type: ignore[arg-type]
    )

    def step_good(world: ClientWorld) -> Arguments:
        return {"request": StepRequest(), "timeout_s": 5.0}

    of.method("step", step_good, request=step, timeout_s=WAIT)
    of.method("submit", step_good, request=step, timeout_s=WAIT)
    of.method("attach", {"timeout_s": 5.0}, timeout_s=WAIT)

    def waits(world: ClientWorld) -> Arguments:
        return {"step": world.client.submit(StepRequest()), "timeout_s": 5.0}

    for name in ("wait_result", "wait_applied", "wait_finished"):
        of.method(name, waits, step=POSITIVE, timeout_s=WAIT)
    cases = of.cases
    if is_async:
        cases = [_awaited(case) for case in cases]
    return Subject(
        "asyncio client" if is_async else "client",
        make_client_world,
        state_of_client,
        lambda world: world.manager.check(),
        tuple(cases),
        lambda world: (world.manager.dump_state()["requests"], state_of_request(world.running)),
    )


def _awaited(case: Case) -> Case:
    async def wait(world: Any, arguments: Arguments) -> object:
        return await case.call(world, arguments)  # type: ignore[misc]

    return Case(
        case.name,
        case.kinds,
        case.good,
        lambda world, arguments: asyncio.run(wait(world, arguments)),
        case.skips_forms,
    )


# --- pools, queues, single-type managers, coordinators -------------------------------------------


def make_pool() -> BlockPool:
    pool = BlockPool(16)
    ids = pool.get_new_blocks(6)
    pool.cache_full_blocks(make_request(), ids, 0, 2, 4)
    pool.free_blocks(ids[1:2])
    pool.touch(ids[:2], ReferenceKind.TRANSFER)
    pool.quarantine([5])
    return pool


def state_of_pool(pool: BlockPool) -> object:
    blocks = [pool.block(b) for b in range(pool.num_blocks)]
    references = [[pool.num_references(b.block_id, kind) for kind in ReferenceKind] for b in blocks]
    return [(b.state, b.block_hash) for b in blocks], references, pool.get_all_free_blocks()


def digest(number: int) -> BlockHash:
    return make_request().block_hashes[number]


REFERENCES = instance_of(ReferenceKind)


def pool_subject() -> Subject:
    of = Builder(BlockPool, kinds={"block_id": ID})
    of.made(
        {
            "num_blocks": 4,
            "enable_caching": True,
            "ordered_groups": frozenset({0}),
            "eviction_policy": "lru",
            "policies": EVICTION_POLICIES,
            "enable_kv_cache_events": True,
        },
        num_blocks=POSITIVE,
        ordered_groups=COUNTS,
    )
    of.method("get_new_blocks", {"num_blocks": 2}, num_blocks=COUNT)
    of.method("block", {"block_id": 3})
    of.method(
        "num_references",
        {"block_id": 1, "kind": ReferenceKind.REQUEST},
        kind=REFERENCES.without(None),
    )
    of.method(
        "get_cached_block",
        {"block_hash": digest(0), "group_ids": [0], "namespace": DEFAULT_NAMESPACE},
    )
    of.method(
        "cache_full_blocks",
        lambda world: {
            "request": Request("n", list(range(20, 29)), block_hasher=HASHER),
            "block_ids": [4, 6],
            "num_cached_blocks": 0,
            "num_full_blocks": 2,
            "block_size": 4,
            "group_id": 1,
        },
        num_cached_blocks=COUNT,
        num_full_blocks=COUNT,
        group_id=COUNT,
    )
    of.method(
        "cache_block",
        {"block_id": 4, "digest": b"d", "parent": digest(0)},
        parent=BYTES.without(None),
    )
    of.method("touch", {"block_ids": [1, 4], "kind": ReferenceKind.PIN}, kind=REFERENCES)
    of.method("free_blocks", {"block_ids": [4], "kind": ReferenceKind.REQUEST}, kind=REFERENCES)
    of.method("evict_blocks", {"block_ids": [1, 2]})
    of.method("quarantine", {"block_ids": [6]})
    of.method("release_quarantine", {"block_ids": [5]})
    return Subject("pool", make_pool, state_of_pool, BlockPool.check, tuple(of.cases))


def queue_subject() -> Subject:
    of = Builder(FreeKVCacheBlockQueue, kinds={"block_id": ID})
    of.made({"num_blocks": 4, "block_ids": [2, 1]}, num_blocks=COUNT)
    of.method("append", {"block_id": 7})
    of.method("append_n", {"block_ids": [7, 8]})
    of.method("prepend_n", {"block_ids": [7, 8]})
    of.method("remove", {"block_id": 1})
    of.method("popleft_n", {"n": 2}, n=COUNT)
    return Subject(
        "free queue",
        lambda: FreeKVCacheBlockQueue(9, [1, 2, 3]),
        lambda queue: queue.get_all_free_blocks(),
        lambda queue: queue.check(),
        tuple(of.cases),
    )


@dataclass
class TablesWorld:
    """A pool, the tables of one coordinator on it, and a request that has blocks."""

    pool: BlockPool
    coordinator: Any
    request: Request

    @property
    def manager(self) -> Any:
        return self.coordinator.managers[0]


def make_tables(*specs: KVCacheSpec, **options: Any) -> TablesWorld:
    pool = BlockPool(32)
    coordinator = get_kv_cache_coordinator(plan(32, *specs), pool, **options)
    request = Request("a", list(range(13)), block_hasher=HASHER)
    coordinator.allocate_new_blocks("a", Reservation(0, 13, 0, num_encoder_tokens=5))
    return TablesWorld(pool, coordinator, request)


def state_of_tables(world: TablesWorld) -> object:
    cached = [manager.num_cached_blocks("a") for manager in world.coordinator.managers]
    tables = [world.coordinator.get_blocks(name) for name in "ab"]
    return state_of_pool(world.pool), tables, cached


def tables_subject(
    title: str,
    spec: KVCacheSpec,
    managers: Mapping[str, type[SingleTypeKVCacheManager]] = MANAGERS,
) -> Subject:
    cls = get_manager_for_kv_cache_spec(spec, managers)
    of = Builder(cls, lambda world: world.manager)
    of.made(lambda world: {"spec": spec, "pool": world.pool, "group": 0}, group=COUNT)
    of.method(
        "find_longest_cache_hit",
        lambda world: {
            "block_hashes": world.request.block_hashes,
            "max_length": 12,
            "group_ids": [0],
            "pool": world.pool,
            "spec": spec,
            "use_eagle": False,
            "namespace": DEFAULT_NAMESPACE,
        },
    )
    of.method(
        "get_num_blocks_to_allocate",
        {"request_id": "b", "reservation": Reservation(0, 9, 0), "new_computed_blocks": [1]},
        new_computed_blocks=IDS,
    )
    of.method(
        "save_new_computed_blocks",
        lambda world: {
            "request_id": "b",
            "block_ids": [block_id for block_id in world.manager.table("a") if block_id][:1],
            "num_computed_tokens": 1,
        },
    )
    of.method("allocate_new_blocks", {"request_id": "b", "reservation": Reservation(0, 9, 0)})
    of.method("cache_blocks", lambda world: {"request": world.request, "num_tokens": 8})
    of.method("free", {"request_id": "a"})
    of.method("remove_skipped_blocks", {"request_id": "a", "num_computed_tokens": 12})
    of.method("get_num_common_prefix_blocks", {"request_id": "a", "num_running_requests": 1})
    of.method("num_skipped_blocks", {"num_computed_tokens": 12})
    of.method("table", {"request_id": "a"})
    return Subject(
        title,
        lambda: make_tables(spec, managers=managers),
        state_of_tables,
        lambda world: world.pool.check(),
        tuple(of.cases),
    )


def coordinator_subject(cls: type[Any], *specs: KVCacheSpec, **options: Any) -> Subject:
    of = Builder(cls, lambda world: world.coordinator)
    of.made(
        lambda world: {
            "kv_cache_config": plan(32, *specs),
            "pool": world.pool,
            "use_eagle": False,
            "managers": MANAGERS,
        }
    )
    of.method(
        "find_longest_cache_hit",
        lambda world: {
            "block_hashes": world.request.block_hashes,
            "max_length": 12,
            "namespace": DEFAULT_NAMESPACE,
        },
    )

    def hit(world: TablesWorld) -> CacheHit:
        ids = tuple(int32_array([1, 2]) for _ in world.coordinator.managers)
        return CacheHit(ids, 8)

    of.method(
        "get_num_blocks_to_allocate",
        lambda world: {
            "request_id": "b",
            "reservation": Reservation(0, 9, 0),
            "hit": hit(world),
        },
        hit=HIT.without(None),
    )
    of.method(
        "save_new_computed_blocks",
        lambda world: {"request_id": "b", "hit": hit(world), "num_computed_tokens": 8},
        hit=HIT,
    )
    of.method("allocate_new_blocks", {"request_id": "b", "reservation": Reservation(0, 9, 0)})
    of.method("cache_blocks", lambda world: {"request": world.request, "num_tokens": 12})
    of.method("free", {"request_id": "a"})
    of.method("remove_skipped_blocks", {"request_id": "a", "num_computed_tokens": 12})
    of.method("get_num_common_prefix_blocks", {"request_id": "a", "num_running_requests": 1})
    of.method("get_blocks", {"request_id": "a"})
    chosen = function_case(
        get_kv_cache_coordinator,
        lambda world: {
            "kv_cache_config": plan(32, *specs),
            "pool": world.pool,
            "enable_caching": True,
            "use_eagle": False,
            "managers": MANAGERS,
        },
    )
    return Subject(
        cls.__name__,
        lambda: make_tables(*specs, **options),
        state_of_tables,
        lambda world: world.pool.check(),
        (*of.cases, chosen),
    )


REQUEST_SUBJECTS = (
    request_subject(),
    plain_subject(),
    manager_subject(),
    empty_subject(),
    encoder_subject(),
)
CLIENT_SUBJECTS = (client_subject(is_async=False), client_subject(is_async=True))
POOL_SUBJECTS = (
    pool_subject(),
    queue_subject(),
    tables_subject("any kind", full(), {"full": SingleTypeKVCacheManager}),
    tables_subject("full attention", full()),
    tables_subject("sliding window", window(6)),
    tables_subject("chunked local attention", chunked(8)),
    tables_subject("states", mamba()),
    tables_subject("cross attention", cross()),
    coordinator_subject(UnitaryKVCacheCoordinator, full()),
    coordinator_subject(HybridKVCacheCoordinator, full(), window(6)),
    coordinator_subject(KVCacheCoordinatorNoPrefixCache, full(), enable_caching=False),
)
