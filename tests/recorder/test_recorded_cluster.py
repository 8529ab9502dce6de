"""Clusters in one process, recorded: whole replays of workloads, calls, clients that go, epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.cli.playground import ClientStepper
from actors.local import LocalCluster
from actors.step_client import StepClient
from kvcache.base.clock import SystemClock
from kvcache.base.errors import ClusterError, StaleEpochError
from kvcache.config import ClusterConfig
from kvcache.protocol.state_store import MemoryStateStore, SmallState
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.recorder import RecordReplay, RecordReplayReport, open_recording
from kvcache.replay import EngineLimits, ModelTraits, ReplayEngine, ReplayReport
from kvcache.requests.request import Request
from kvcache.simulate import Conversations, ConversationShape
from tests.actors.conftest import build_config

SHAPE = ConversationShape(
    num_conversations=6,
    num_turns=3,
    num_system_prompts=2,
    system_prompt_tokens=64,
    question_tokens=(20, 60),
    answer_tokens=(4, 16),
    document_share=0.0,
)
LAYERS = [
    {"kind": "full", "count": 1, "num_kv_heads": 2, "head_size": 4},
    {"kind": "sliding_window", "count": 1, "num_kv_heads": 2, "head_size": 4, "window_tokens": 40},
]


def configured(directory: Path, **recorder: object) -> ClusterConfig:
    """Return a hybrid with a pool that is soon full, every byte checked."""
    return build_config(
        "recorded",
        model={"name": "hybrid", "max_model_len": 512, "layers": LAYERS},
        cache={"num_blocks": 100, "memory_per_rank": "1MiB"},
        scheduler={"max_num_batched_tokens": 128, "max_num_seqs": 6},
        deadlines={"reattach_s": 0.1},
        recorder={"directory": str(directory), **recorder},
    )


def replay(directory: Path) -> RecordReplayReport:
    return RecordReplay(open_recording(directory / "recorded")).run()


def prompt(request_id: str, num_tokens: int) -> NewRequest:
    return NewRequest(request_id, np.arange(num_tokens, dtype=np.int32), num_tokens)


def play_conversations(
    cluster: LocalCluster, client: StepClient, shape: ConversationShape = SHAPE
) -> ReplayReport:
    workers = [one.worker for one in cluster.workers]
    stepper = ClientStepper(
        client,
        lambda: (cluster.coordinator.statistics(), [w.statistics() for w in workers]),
        return_s=60.0,
    )
    model = ModelTraits.of(cluster.plan.model_groups)
    limits = EngineLimits(512, max_num_batched_tokens=128, max_num_seqs=6, model=model)
    return ReplayEngine(Conversations(shape, seed=3), stepper, limits, SystemClock()).run()


def test_a_workload_on_a_cluster_replays_to_the_identical_state(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with LocalCluster(config) as cluster, cluster.client("replay") as client:
        played = play_conversations(cluster, client)
        assert played.num_wrong_blocks == 0
        assert played.num_evictions > 0
        manager = cluster.coordinator.manager
        state = manager.dump_state()
        cluster.coordinator.close()
    statistics = cluster.coordinator.statistics().recorder
    assert (statistics.num_lost_records, statistics.num_failures) == (0, 0)
    replayed = RecordReplay(open_recording(tmp_path / "recorded"))
    report = replayed.run()
    assert (report.difference, report.notes, report.num_epochs) == (None, (), 1)
    assert report.num_steps >= played.num_steps
    assert report.state_digest == report.recorded_state_digest
    assert replayed.manager.dump_state() == state


def test_calls_pins_and_a_client_that_leaves_are_replayed(tmp_path: Path) -> None:
    with LocalCluster(configured(tmp_path)) as cluster:
        with cluster.client("steps") as client:
            client.wait_finished(client.step(StepRequest(new=(prompt("a", 70),))).step)
            client.wait_finished(client.step(StepRequest(completed_step=1)).step)
        with cluster.client("calls") as client:
            request = Request("r", list(range(70)))
            blocks, num_hit = client.get_computed_blocks(request)
            client.allocate_slots(request, 70 - num_hit, num_hit, blocks)
            client.pin_prefix(list(range(40)), ttl_s=0.001)
            client.unpin_prefix(client.pin_prefix(list(range(40)), ttl_s=60.0))
            client.free(request)
            client.reset_prefix_cache()
        for _ in range(100):
            cluster.pump()
        manager = cluster.coordinator.manager
        assert manager.statistics().num_clients == 0
    report = replay(tmp_path)
    assert (report.difference, report.num_calls, report.num_epochs) == (None, 7, 1)
    assert report.state_digest == report.recorded_state_digest


class FailingStore(MemoryStateStore):
    """A store that fails to save once on request, which ends the epoch."""

    fails_next = False

    def save(self, state: SmallState, replaces: SmallState | None) -> None:
        fails, self.fails_next = self.fails_next, False
        if fails:
            raise ClusterError("the store is out of order")
        super().save(state, replaces)


def test_every_epoch_and_every_coordinator_is_replayed(tmp_path: Path) -> None:
    store, config = FailingStore(), configured(tmp_path)
    for life in range(2):
        with LocalCluster(config, state_store=store) as cluster, cluster.client() as client:
            client.wait_finished(client.step(StepRequest(new=(prompt("a", 70),))).step)
            client.wait_finished(client.step(StepRequest(completed_step=1, finished=("a",))).step)
            store.fails_next = True
            with pytest.raises(StaleEpochError, match="the store is out of order"):
                client.reset_prefix_cache(drain=True)
            client.attach()
            step = client.step(StepRequest(new=(prompt(f"b{life}", 70),)))
            client.wait_finished(step.step)
            assert client.failures == ()
    report = replay(tmp_path)
    assert (report.difference, report.notes, report.num_epochs) == (None, (), 4)
    assert report.state_digest == report.recorded_state_digest


def test_nothing_is_recorded_unless_a_directory_is_configured(tmp_path: Path) -> None:
    with LocalCluster(build_config("silent")) as cluster, cluster.client() as client:
        client.step(StepRequest(new=(prompt("a", 40),)))
        assert cluster.coordinator.statistics().recorder is None
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_said_and_service_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = configured(tmp_path / "file")
    with LocalCluster(config) as cluster, cluster.client() as client:
        client.wait_finished(client.step(StepRequest(new=(prompt("a", 40),))).step)
        statistics = cluster.coordinator.statistics().recorder
        assert statistics.problem.startswith("NotADirectoryError: ")
        assert statistics.num_lost_records == 2
