"""A live cluster's requests, recorded: a simulation of them has the same hits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from actors import KVCacheCluster
from actors.cli.playground import ClientStepper
from actors.cli.record import RecordingFollower, RecordingLimits
from kvcache.base.clock import SystemClock, VirtualClock
from kvcache.base.errors import AlreadyRunningError
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.recorder import RecordedBatch
from kvcache.replay import EngineLimits
from kvcache.replay.engine import ReplayEngine
from kvcache.requests.hints import CacheHint
from kvcache.simulate.opening import open_block_trace
from kvcache.simulate.passages import Passage, passage_tokens
from kvcache.simulate.request_recording import RecordingOptions, RequestRecording
from kvcache.simulate.simulated_cache import SimulatedCache
from kvcache.simulate.simulation import simulate
from kvcache.simulate.workload import WorkloadRequest
from tests.actors.conftest import Launch, MakeConfig
from tests.cli.commands import KVCACHE

pytestmark = pytest.mark.ray

PATIENCE_S = 120.0

SALT = bytes(range(32))
NUM_REQUESTS = 120


class Readings:
    """Documents that are read repeatedly, with a question after them; nothing is answered. The
    first ones are hinted to be kept."""

    name = "readings"
    num_requests = NUM_REQUESTS
    total_input_tokens = None
    block_size = 16

    def __iter__(self) -> Iterator[WorkloadRequest]:
        rng = random.Random(3)
        for i in range(NUM_REQUESTS):
            document = Passage(
                1 + min(rng.randrange(20), rng.randrange(20)), rng.randrange(16, 300)
            )
            passages = (document, Passage(1_000 + i, rng.randrange(1, 40)))
            tokens = passage_tokens(passages)
            kept = (CacheHint(end=document.num_tokens + 1, priority=90),)
            hints = kept if document.seed <= 3 else ()
            yield WorkloadRequest(f"reading-{i}", len(tokens), 0, tokens.copy, hints=hints)


def play(cluster: KVCacheCluster, max_num_seqs: int) -> float:
    """Play the readings; return their hit tokens over all tokens."""
    with cluster.client() as client:

        def look() -> tuple[object, tuple[object, ...]]:
            statistics = cluster.statistics()
            return statistics.coordinator, statistics.workers

        limits = EngineLimits(512, 512, max_num_seqs)
        stepper = ClientStepper(client, look, return_s=60.0)  # type: ignore[arg-type]
        report = ReplayEngine(Readings(), stepper, limits, SystemClock()).run()
    assert report.num_requests == NUM_REQUESTS
    return report.hit_rate


def test_a_recorded_load_simulates_to_the_hit_rate_it_had(
    launch: Launch, make_config: MakeConfig, tmp_path: Path
) -> None:
    cluster = launch(make_config(cache={"memory_per_rank": "1MiB", "num_blocks": 101}))

    def take(is_last: bool) -> RecordedBatch:
        return cluster.record_requests("me", SALT, is_last=is_last)

    begun = threading.Event()
    path = tmp_path / "recorded.jsonl"
    summaries = []

    def record() -> None:
        def take_and_tell(is_last: bool) -> RecordedBatch:
            batch = take(is_last)
            begun.set()
            return batch

        with RequestRecording(path, RecordingOptions(10**7)) as recording:
            follower = RecordingFollower(
                recording,
                take_and_tell,
                SystemClock(),
                RecordingLimits(60.0, seconds=300, num_requests=NUM_REQUESTS),
            )
            summaries.append(follower.run(threading.Event()))

    recording = threading.Thread(target=record)
    recording.start()
    assert begun.wait(60)
    with pytest.raises(AlreadyRunningError, match="are being recorded already"):
        cluster.record_requests("you", SALT)
    rate = play(cluster, max_num_seqs=1)
    recording.join(120)
    (summary,) = summaries
    assert (summary.ended_by, summary.num_requests, summary.num_lost) == (
        "requests",
        NUM_REQUESTS,
        0,
    )
    trace = open_block_trace(str(path))
    lengths = [request.num_prompt_tokens for request in Readings()]
    assert trace.input_lengths.tolist() == lengths
    rates = {}
    for hints in ("none", "session"):
        simulated = simulate(trace, SimulatedCache("lru", 100, hints=hints), VirtualClock())
        rates[hints] = simulated.num_hit_tokens / simulated.num_input_tokens
    assert rates["session"] == pytest.approx(rate, abs=1e-9)
    assert rates["none"] < rate - 0.01
    roomy = simulate(trace, SimulatedCache("lru", 10_000), VirtualClock())
    assert 0.1 < rate < roomy.num_hit_tokens / roomy.num_input_tokens
    assert str(np.asarray(next(iter(Readings())).token_ids)[0]) not in path.read_text()


def test_the_command_records_served_requests_until_ctrl_c(
    shared: KVCacheCluster, ray_cluster: str, tmp_path: Path
) -> None:
    path = tmp_path / "recorded.jsonl"
    command = [*KVCACHE, "record", str(path), "--name", shared.name, "--json"]
    with subprocess.Popen(
        command,
        env={**os.environ, "RAY_ADDRESS": ray_cluster},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        begun = process.stderr.readline()
        assert begun == f"recording {path}: Ctrl-C ends it\n"
        with shared.client() as client:
            tokens = np.arange(50, dtype=np.int32)
            for name in ("a", "b"):
                request = NewRequest(name, tokens, max_new_tokens=50, tenant="somebody")
                computed = client.step(StepRequest(new=(request,)))
                client.wait_finished(computed.step)
                ended = StepRequest(completed_step=computed.step, finished=(name,))
                client.wait_finished(client.step(ended).step)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, process.stderr.read()
        summary = json.loads(process.stdout.read())
    assert (summary["num_requests"], summary["ended_by"]) == (2, "signal")
    trace = open_block_trace(str(path))
    assert trace.blocks.tolist() == [0, 1, 2, 3] * 2
    assert "somebody" not in path.read_text(encoding="utf-8")
