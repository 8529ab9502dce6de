"""The replay during faults: small conversations from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from actors.cli.playground import ClientStepper
from actors.step_client import StepClient
from kvcache.base.clock import SystemClock
from kvcache.config import ClusterConfig, layer_specs
from kvcache.planner.grouping import get_kv_cache_groups, merge_rank_specs
from kvcache.protocol.step import StepRequest, StepResult
from kvcache.replay import EngineLimits, ModelTraits, ReplayEngine
from kvcache.replay.report import ReplayReport
from kvcache.simulate import Conversations, ConversationShape
from kvcache.simulate.workload import Workload, WorkloadRequest

OnMoment = Callable[[int], None]
"""Called at the moments of a game, numbered from 1: before and after each step is sent, and when
its answer has arrived."""


@dataclass(frozen=True)
class Dealt:
    """The workload and limits of an engine: see `ConversationShape` and `EngineLimits`."""

    name: str
    seed: int
    num_conversations: int
    num_turns: int
    system_prompt_tokens: int
    question_tokens: int
    answer_tokens: int
    pipeline_depth: int
    max_num_seqs: int

    def workload(self) -> Workload:
        """Return the requests."""
        shape = ConversationShape(
            num_conversations=self.num_conversations,
            num_turns=self.num_turns,
            num_system_prompts=2,
            system_prompt_tokens=self.system_prompt_tokens,
            question_tokens=(1, self.question_tokens),
            answer_tokens=(1, self.answer_tokens),
            document_share=0.0,
        )
        return NamedWorkload(Conversations(shape, seed=self.seed), self.name)


class NamedWorkload:
    """Another workload with renamed requests, so that several can play at the same time."""

    def __init__(self, workload: Workload, name: str) -> None:
        self._workload = workload
        self.name = name
        self.num_requests = workload.num_requests
        self.total_input_tokens = workload.total_input_tokens
        self.block_size = workload.block_size

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield its requests."""
        for request in self._workload:
            after = None if request.after is None else f"{self.name}/{request.after}"
            yield replace(request, request_id=f"{self.name}/{request.request_id}", after=after)


class DisturbedStepper(ClientStepper):
    """A client that reports its moments."""

    def __init__(self, client: StepClient, on_moment: OnMoment, return_s: float) -> None:
        super().__init__(client, lambda: (None, ()), return_s=return_s)
        self._on_moment = on_moment
        self._num_moments = 0

    def submit(self, step: StepRequest) -> int:
        """Send the step: a moment before, and one after."""
        self._pass()
        number = super().submit(step)
        self._pass()
        return number

    def wait_result(self, step: int) -> StepResult:
        """Wait for the answer: a moment after it."""
        result = super().wait_result(step)
        self._pass()
        return result

    def _pass(self) -> None:
        self._num_moments += 1
        self._on_moment(self._num_moments)


def play_game(
    config: ClusterConfig,
    max_model_len: int,
    client: StepClient,
    dealt: Dealt,
    on_moment: OnMoment = lambda moment: None,
) -> ReplayReport:
    """Play to the end; raises the errors of `ReplayEngine.run`, AssertionError if requests or
    tokens are missing."""
    groups = get_kv_cache_groups(merge_rank_specs(layer_specs(config)))
    limits = EngineLimits(
        max_model_len=max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=dealt.max_num_seqs,
        pipeline_depth=dealt.pipeline_depth,
        stall_s=config.deadlines.step_s,
        model=ModelTraits.of(groups),
    )
    workload = dealt.workload()
    stepper = DisturbedStepper(client, on_moment, config.deadlines.return_s)
    report = ReplayEngine(workload, stepper, limits, SystemClock()).run()
    wanted = (workload.num_requests, workload.total_input_tokens)
    assert (report.num_requests, report.num_prompt_tokens) == wanted, (report, wanted)
    assert report.num_wrong_blocks == 0, report
    return report
