"""A replay that loses the coordinator or a worker: everything finishes, with right bytes."""

from __future__ import annotations

from collections.abc import Callable

from actors import LocalCluster
from actors.cli.playground import ClientStepper
from kvcache.base.clock import SystemClock
from kvcache.config import ClusterConfig, parse_config
from kvcache.protocol.step import StepRequest
from kvcache.replay import EngineLimits, ReplayEngine
from kvcache.replay.report import ReplayReport
from kvcache.simulate import Conversations, ConversationShape

SHAPE = ConversationShape(
    num_conversations=24,
    num_turns=2,
    num_system_prompts=2,
    system_prompt_tokens=40,
    question_tokens=(5, 30),
    answer_tokens=(4, 20),
    document_share=0.0,
)
LIMITS = EngineLimits(max_model_len=256, max_num_batched_tokens=256, max_num_seqs=16)

Loss = Callable[[LocalCluster], None]


def config(num_blocks: int) -> ClusterConfig:
    return parse_config(
        {
            "name": "returns",
            "model": {
                "name": "m",
                "max_model_len": 256,
                "layers": [
                    {"kind": "full", "count": 2, "num_kv_heads": 2, "head_size": 4},
                    {
                        "kind": "sliding_window",
                        "count": 2,
                        "num_kv_heads": 2,
                        "head_size": 4,
                        "window_tokens": 32,
                    },
                ],
            },
            "cache": {"memory_per_rank": "64MiB", "num_blocks": num_blocks},
            "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 256},
            "parallel": {"tensor_parallel_size": 2},
            "content_check": {"enabled": True},
        }
    )


class LosingStepper(ClientStepper):
    """Loses a process of its cluster at these steps."""

    def __init__(self, cluster: LocalCluster, losses: dict[int, Loss]) -> None:
        self.cluster = cluster
        self.losses = losses
        self.num_running: list[int] = []
        client = cluster.client("replay")
        super().__init__(
            client,
            lambda: (cluster.coordinator.statistics(), []),
            return_s=cluster.config.deadlines.return_s,
        )

    def submit(self, step: StepRequest) -> int:
        number = super().submit(step)
        if number in self.losses:
            self.num_running.append(len(step.running.slots))
            self.losses.pop(number)(self.cluster)
            self.cluster.coordinator.check()
        return number


def replay(losses: dict[int, Loss], num_blocks: int = 600) -> ReplayReport:
    workload = Conversations(shape=SHAPE, seed=3)
    with LocalCluster(config(num_blocks)) as cluster:
        stepper = LosingStepper(cluster, losses)
        report = ReplayEngine(workload, stepper, LIMITS, SystemClock()).run()
        assert stepper.losses == {}
        assert max(stepper.num_running, default=1) > 0
        cluster.coordinator.check()
        manager = cluster.coordinator.manager
        assert manager.statistics().num_running_requests == 0
    return report


def test_the_coordinator_is_lost_and_every_request_finishes_with_right_bytes() -> None:
    losses = dict.fromkeys((9, 25, 26), LocalCluster.restart_coordinator)
    report = replay(losses)
    whole = replay({})
    assert report.num_returns == 3
    assert report.num_wrong_blocks == 0
    assert report.num_requests == whole.num_requests
    assert report.num_output_tokens == whole.num_output_tokens
    # Running requests continue: less than two blocks of each are computed again.
    assert 0 < report.num_recomputed_tokens <= 3 * LIMITS.max_num_seqs * 2 * 16
    assert report.num_resumed_hit_tokens > 0


def test_a_worker_is_lost_and_every_request_finishes_with_right_bytes() -> None:
    report = replay({12: lambda cluster: cluster.restart_worker(1)})
    assert report.num_returns == 1
    assert report.num_wrong_blocks == 0
    assert report.num_requests == replay({}).num_requests
    # One rank holds nothing, so nothing is kept: the hit is a system prompt of the same step.
    assert report.num_resumed_hit_tokens <= LIMITS.max_num_seqs * SHAPE.system_prompt_tokens


def test_requests_that_fill_the_pool_come_back_to_what_they_had() -> None:
    losses = dict.fromkeys(range(10, 60, 7), LocalCluster.restart_coordinator)
    report = replay(losses, num_blocks=120)
    assert report.num_returns == len(range(10, 60, 7))
    assert report.num_wrong_blocks == 0
