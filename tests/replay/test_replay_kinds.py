"""Replays of every kind: on real workers with every byte checked, and on bare managers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.cli.playground import ClientStepper
from actors.local import LocalCluster
from kvcache.base.clock import VirtualClock
from kvcache.config import ClusterConfig, load_config
from kvcache.replay import EngineLimits, ModelTraits, ReplayEngine, ReplayReport
from kvcache.replay.rows import ReplayedRequest, ReplayedRows
from kvcache.simulate import Conversations, ConversationShape, WorkloadRequest
from kvcache.simulate.tokens import answer_token_ids
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)
from tests.replay.test_replay_engine import (
    FULL,
    LIMITS,
    WINDOW,
    RecordingStepper,
    assert_nothing_leaks,
    listed,
    make_manager,
    random_workload,
    tokens_of,
)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

ALIGN = MambaSpec(8, shapes=((4,),), dtypes=("float16",), mamba_cache_mode="align")
STATE = MambaSpec(8, shapes=((4,),), dtypes=("float16",))
CHUNK = ChunkedLocalAttentionSpec(4, num_kv_heads=1, head_size=1, attention_chunk_size=8)
CROSS = CrossAttentionSpec(4, num_kv_heads=1, head_size=1, max_encoder_tokens=9)

SHAPE = ConversationShape(
    num_conversations=6,
    num_turns=3,
    num_system_prompts=2,
    system_prompt_tokens=128,
    question_tokens=(20, 90),
    answer_tokens=(4, 24),
    document_share=0.0,
)


def traits_of(*specs: KVCacheSpec) -> ModelTraits:
    return ModelTraits.of([KVCacheGroupSpec((f"layer.{i}",), s) for i, s in enumerate(specs)])


# --- on real workers ------------------------------------------------------------------------------


def small(name: str, num_blocks: int) -> ClusterConfig:
    """A packaged configuration with a small pool, which is soon full."""
    config = load_config(CONFIGS / name)
    assert config.content_check.enabled
    cache = config.cache.model_copy(update={"num_blocks": num_blocks})
    model = config.model.model_copy(update={"max_model_len": 512})
    scheduler = config.scheduler.model_copy(
        update={"max_num_batched_tokens": 192, "max_num_seqs": 8}
    )
    return config.model_copy(update={"cache": cache, "model": model, "scheduler": scheduler})


def replay_on_workers(config: ClusterConfig) -> ReplayReport:
    with LocalCluster(config) as cluster, cluster.client("replay") as client:
        workers = [one.worker for one in cluster.workers]
        stepper = ClientStepper(
            client,
            lambda: (cluster.coordinator.statistics(), [w.statistics() for w in workers]),
            return_s=60.0,
        )
        limits = EngineLimits(
            max_model_len=cluster.plan.max_model_len,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            pipeline_depth=2,
            model=ModelTraits.of(cluster.plan.configs[0].kv_cache_groups),
        )
        report = ReplayEngine(Conversations(SHAPE, seed=5), stepper, limits, VirtualClock()).run()
        cluster.coordinator.check()
        for worker in workers:
            worker.check()
        return report


@pytest.mark.parametrize(
    ("name", "num_blocks", "has_hits"),
    [
        ("cpu_mla.yaml", 36, True),
        ("cpu_chunked_local.yaml", 135, True),
        ("cpu_mamba_hybrid.yaml", 30, True),
        ("cpu_mamba_none.yaml", 30, False),
        ("cpu_cross_attention.yaml", 200, False),
        ("cpu_three_kinds.yaml", 60, True),
    ],
)
def test_a_replay_in_a_small_pool_finds_every_byte_right(
    name: str, num_blocks: int, has_hits: bool
) -> None:
    report = replay_on_workers(small(name, num_blocks))
    assert (report.num_requests, report.num_wrong_blocks) == (18, 0)
    assert report.bytes_checked > 100_000
    assert (report.num_hit_tokens > 0) is has_hits
    assert report.num_preemptions > 0


# --- on bare managers -----------------------------------------------------------------------------


@pytest.mark.seeds(3)
@pytest.mark.parametrize(
    "specs",
    [(ALIGN,), (FULL, STATE), (FULL, CHUNK), (FULL, CROSS), (FULL, WINDOW, ALIGN)],
    ids=["align", "none", "chunk", "cross", "three"],
)
def test_everything_finishes_though_steps_fail(seed: int, specs: tuple[KVCacheSpec, ...]) -> None:
    rng = random.Random(seed)
    workload = random_workload(rng, 25)
    failing = set(rng.sample(range(1, 150), 30))
    stepper = RecordingStepper(
        make_manager(rng.randrange(40, 60) * len(specs), *specs),
        lag=rng.randrange(3),
        fails=failing.__contains__,
    )
    limits = replace(LIMITS, pipeline_depth=rng.randrange(1, 4), model=traits_of(*specs))
    report = ReplayEngine(workload, stepper, limits, VirtualClock()).run()
    assert report.num_failed_steps > 0
    assert report.num_requests == 25
    assert_nothing_leaks(stepper.manager)


def test_what_a_failed_step_ran_is_computed_again_where_states_are_kept() -> None:
    seatings = []
    for specs in ((FULL,), (FULL, STATE)):
        stepper = RecordingStepper(make_manager(64, *specs), fails={3}.__contains__)
        limits = replace(LIMITS, model=traits_of(*specs))
        workload = listed((tokens_of((0, 20)), 6), (tokens_of((500, 20)), 6))
        ReplayEngine(workload, stepper, limits, VirtualClock()).run()
        resumed = {item.request_id for request, _ in stepper.steps for item in request.resumed}
        withdrawn = {name for _, result in stepper.steps for name in result.withdrawn}
        seatings.append((resumed, withdrawn))
    assert seatings == [(set(), set()), ({"r0", "r1"}, {"r0", "r1"})]


def test_hits_of_single_requests_end_where_a_chunk_or_a_token_ended() -> None:
    # One seat, so that requests come one after another, and room for everything.
    limits = replace(LIMITS, max_num_seqs=1, model=traits_of(FULL, ALIGN))
    assert limits.model.boundary_tokens == 8
    workload = random_workload(random.Random(11), 20)
    stepper = RecordingStepper(make_manager(1000, FULL, ALIGN))
    report = ReplayEngine(workload, stepper, limits, VirtualClock()).run()
    states: set[tuple[int, ...]] = set()
    num_hit_tokens = 0
    for request in workload.requests:
        prompt = request.token_ids.tolist()
        answer = answer_token_ids(request.request_id, request.num_output_tokens).tolist()
        ends = range((len(prompt) - 1) // 8 * 8, 0, -8)
        hit = next((end for end in ends if tuple(prompt[:end]) in states), 0)
        num_hit_tokens += hit
        chunks = {hit + 8, min(len(prompt) // 8 * 8, hit + 8 + 64)}
        decoded = range(len(prompt), len(prompt) + len(answer))
        tokens = prompt + answer
        states |= {
            tuple(tokens[:end])
            for end in (*chunks, *decoded)
            if end % 8 == 0 and hit < end <= max(len(prompt), len(tokens) - 1)
        }
    assert num_hit_tokens > 50
    assert report.num_hit_tokens == num_hit_tokens


def test_a_chunk_ends_at_the_last_boundary_it_reaches() -> None:
    rows = ReplayedRows(4)
    prompts = (150, 40, 9)
    for slot, (num_tokens, computed) in enumerate(zip(prompts, (64, 32, 9), strict=True)):
        request = WorkloadRequest(f"r{slot}", num_tokens, 9, lambda: np.zeros(0, np.int32))
        rows.add(ReplayedRequest(request, num_tokens), slot, computed)
    assert rows.plan(1000).running.num_new_tokens.tolist() == [86, 8, 1]
    assert rows.plan(1000, 16).running.num_new_tokens.tolist() == [80, 8, 1]
    assert rows.plan(1000, 8).running.num_new_tokens.tolist() == [80, 8, 1]
    assert rows.plan(70, 16).running.num_new_tokens.tolist() == [64]
    assert rows.plan(7, 16).running.num_new_tokens.tolist() == [7]


def test_every_request_brings_encoder_tokens_where_they_are_read() -> None:
    counts = []
    for specs in ((FULL, CROSS), (FULL, CROSS), (FULL,)):
        stepper = RecordingStepper(make_manager(300, *specs))
        limits = replace(LIMITS, model=traits_of(*specs))
        workload = random_workload(random.Random(2), 20)
        ReplayEngine(workload, stepper, limits, VirtualClock()).run()
        new = [item for request, _ in stepper.steps for item in request.new]
        counts.append({item.request_id: item.num_encoder_tokens for item in new})
    assert counts[0] == counts[1]
    assert set(counts[0].values()) <= set(range(1, 10)) and len(set(counts[0].values())) > 4
    assert set(counts[2].values()) == {0}


def test_traits_of_a_model() -> None:
    assert traits_of(FULL, WINDOW) == ModelTraits()
    assert traits_of(FULL, STATE) == ModelTraits(None, keeps_states=True)
    assert traits_of(replace(FULL, block_size=12), ALIGN) == ModelTraits(24, keeps_states=True)
    assert traits_of(FULL, CROSS, ALIGN) == ModelTraits(None, True, 9)
