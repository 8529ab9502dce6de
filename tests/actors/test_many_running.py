"""A hundred requests run when the coordinator dies: all finish, and every byte is right."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from actors import KVCacheCluster
from actors.cli.playground import ClientStepper
from actors.step_client import StepClient
from kvcache.base.clock import SystemClock
from kvcache.protocol.step import StepRequest
from kvcache.replay import EngineLimits, ReplayEngine
from kvcache.simulate import Conversations, ConversationShape

pytestmark = [pytest.mark.ray, pytest.mark.faults]

NUM_RUNNING = 100
NUM_STEPS_BEFORE = 5

SHAPE = ConversationShape(
    num_conversations=140,
    num_turns=1,
    num_system_prompts=3,
    system_prompt_tokens=64,
    question_tokens=(8, 60),
    answer_tokens=(30, 60),
    document_share=0.0,
)


class KillingStepper(ClientStepper):
    """Kills the coordinator right after a step in which enough requests run."""

    def __init__(self, client: StepClient, cluster: KVCacheCluster) -> None:
        return_s = cluster.config.deadlines.return_s
        super().__init__(client, lambda: (None, ()), return_s=return_s)
        self._victim = cluster.status().coordinator_process_id
        self._num_wide_steps = 0
        self.num_running_at_kill = 0

    def submit(self, step: StepRequest) -> int:
        """Send the step, then kill, once."""
        number = super().submit(step)
        num_running = len(step.running.slots)
        self._num_wide_steps += num_running >= NUM_RUNNING
        if self._num_wide_steps == NUM_STEPS_BEFORE and not self.num_running_at_kill:
            self.num_running_at_kill = num_running
            os.kill(self._victim, signal.SIGKILL)
        return number


def test_the_coordinator_is_killed_in_the_middle_of_a_hundred_running_requests(
    launch: Any, make_config: Any, traces: Any
) -> None:
    config = make_config(
        cache={"memory_per_rank": "16MiB"},
        scheduler={"max_num_batched_tokens": 4096, "max_num_seqs": 128},
    )
    cluster = launch(config)
    with cluster.client("replay") as client:
        stepper = KillingStepper(client, cluster)
        limits = EngineLimits(
            max_model_len=cluster.status().max_model_len,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            pipeline_depth=2,
        )
        workload = Conversations(SHAPE, seed=3)
        report = ReplayEngine(workload, stepper, limits, SystemClock()).run()
    assert stepper.num_running_at_kill >= NUM_RUNNING
    assert (report.num_requests, report.num_returns) == (SHAPE.num_conversations, 1)
    assert report.num_prompt_tokens == workload.total_input_tokens
    assert (report.num_wrong_blocks, report.history) == (0, "")
    assert report.bytes_checked > 0
    statistics = cluster.statistics()
    assert (statistics.coordinator.epoch, statistics.coordinator.cold_reason) == (2, "")
    assert statistics.coordinator.num_kept_blocks > NUM_RUNNING  # a block of each, and the prompts
    assert [worker is not None and worker.num_failed_jobs for worker in statistics.workers] == [
        0,
        0,
    ]
    cluster.stop()
    traces.check(config.name)
