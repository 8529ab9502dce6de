"""The life of one coordinator's managers, drawn by a seed, and recorded.

An engine plays prompts in steps; between its steps other clients call, pin, evict, reset, leave,
and send invalid requests. Below it a `StepServer` with a `FileStepRecorder`, as in a coordinator,
and a worker's labels, so that an epoch can begin with a restored manager.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from actors.calls import RemoteCall, SentTokens
from actors.client import KVCacheClient
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import RequestError
from kvcache.coordinator.clients import ClientLedger
from kvcache.coordinator.job_table import JobTable
from kvcache.coordinator.serving import StepServer
from kvcache.coordinator.settings import CoordinatorSettings
from kvcache.coordinator.step_recorder import EpochBegun, LabelSource
from kvcache.manager import KVCacheManager
from kvcache.manager.cache_blocks import KVCacheBlocks
from kvcache.manager.statistics import ManagerStatistics
from kvcache.protocol.commands import Command, Label, Reset, Unlabel
from kvcache.protocol.labels import LabelTable
from kvcache.protocol.messages import Call
from kvcache.protocol.step import NewRequest, StepRequest, StepResult
from kvcache.recorder import FileStepRecorder, ManagerConfig, RecorderLimits, RecordingOrigin
from kvcache.recorder.segments import OpenFile, SegmentLimits, create_file
from kvcache.replay import EngineLimits, ModelTraits, ReplayEngine
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import Request
from tests.protocol.scenario import config_of
from tests.replay.manager_stepper import ManagerStepper
from tests.replay.test_replay_engine import ListedWorkload, random_workload

T = TypeVar("T")

MAX_MODEL_LEN = 256
MAX_NUM_SEQS = 12
DIGEST_BYTES = 32
NUM_RANKS = 2


def manager_config_of(model: str, num_blocks: int = 400) -> ManagerConfig:
    """Return the settings of a small manager for one of the tests' models."""
    config = config_of(model, num_blocks)
    return ManagerConfig(
        config,
        MAX_MODEL_LEN,
        enable_caching=all(g.kv_cache_spec.can_prefix_cache for g in config.kv_cache_groups),
        log_stats=True,
        enable_kv_cache_events=True,
        max_num_seqs=MAX_NUM_SEQS,
        max_pin_share=0.25,
    )


def make_recorder(
    directory: Path,
    manager_config: ManagerConfig,
    clock: VirtualClock,
    *,
    recording_id: str = "first",
    segment_bytes: int = 1 << 26,
    max_bytes: int = 1 << 30,
    is_synced: bool = False,
    open_file: OpenFile = create_file,
) -> FileStepRecorder:
    """Return a recorder that writes to `directory`."""
    limits = RecorderLimits(SegmentLimits(directory, segment_bytes, max_bytes), 1.0, is_synced)
    origin = RecordingOrigin(recording_id, "a plan", "{}", manager_config)
    return FileStepRecorder(limits, origin, clock, open_file)


class RecordedLife:
    """One coordinator's managers. `begin` an epoch, `play` some of it, `recorder.close`."""

    def __init__(
        self,
        recorder: FileStepRecorder,
        manager_config: ManagerConfig,
        clock: VirtualClock,
        seed: int | str = 0,
        *,
        has_hints: bool = False,
    ) -> None:
        self.recorder = recorder
        self.manager_config = manager_config
        self.clock = clock
        self.rng = random.Random(f"recorded life {seed}")
        self.has_hints = has_hints
        self.num_refused = 0
        self.num_calls = 0
        self._num_blocks = manager_config.kv_cache_config.num_blocks
        width = max(
            g.kv_cache_spec.block_size for g in manager_config.kv_cache_config.kv_cache_groups
        )
        self._labels = LabelTable(self._num_blocks, DIGEST_BYTES, width)
        self._epoch = 0
        self._steps: dict[str, int] = {}
        self._names = 0

    def begin(self, *, restores: bool = False) -> None:
        """Begin an epoch, cold or from the labels."""
        self._epoch += 1
        model_epoch = self.manager.model_epoch if self._epoch > 1 else 0
        self.manager: KVCacheManager = self.manager_config.make(self.recorder.clock, model_epoch)
        labels: LabelSource | None = None
        commands: list[Command] = []
        if restores:
            label_sets = [
                self._labels.collect(rank, self._epoch, 7, f"rank {rank}")
                for rank in range(NUM_RANKS)
            ]
            labels = partial(list, label_sets)
            self.manager.restore(label_sets)
            commands = self.manager.take_commands()
            self._obey(commands)
        else:
            self._labels.reset()
        self.recorder.record(EpochBegun(self._epoch, self.manager, labels, commands))
        settings = CoordinatorSettings(NUM_RANKS, "a plan")
        self.server = StepServer(settings, self.manager, JobTable(NUM_RANKS), self.recorder)
        self._caller = _Caller(self)
        self._callers: list[Request] = []
        self._pins: list[int] = []

    def play(self, num_requests: int = 12) -> None:
        """Play random prompts, with other clients in between, until all of them are done."""
        engine_sees: Any = _Disturbed(self)
        groups = self.manager_config.kv_cache_config.kv_cache_groups
        limits = EngineLimits(
            MAX_MODEL_LEN,
            max_num_batched_tokens=64,
            max_num_seqs=6,
            pipeline_depth=2,
            model=ModelTraits.of(groups),
        )
        failing = {self.rng.randrange(5, 60) for _ in range(2)}
        stepper = ManagerStepper(engine_sees, lag=1, fails=failing.__contains__)
        workload = random_workload(self.rng, num_requests)
        if self.has_hints:
            requests = [replace(request, hints=self._hints()) for request in workload]
            workload = ListedWorkload(requests)
        ReplayEngine(workload, stepper, limits, VirtualClock()).run()
        self.server.release("replay")
        self._steps.pop("replay", None)

    def step(self, request: StepRequest) -> StepResult:
        """Serve a step; raises RequestError if it is refused."""
        served = self.server.serve(ClientLedger("", 1, 1, 0.0), request)
        self._obey(served.commands)
        assert isinstance(served.answer, StepResult)
        if served.answer.error:
            self.num_refused += 1
            raise RequestError(served.answer.error)
        return served.answer

    def disturb(self) -> None:
        """Apply one operation of another client, or none."""
        self.clock.advance(self.rng.random())
        deeds: list[Callable[[], object]] = [
            self._call_for_blocks,
            self._call_for_blocks,
            self._free_a_caller,
            self.pin,
            self._look,
            self._evict,
            self.hold,
            self.withdraw,
            self._visit,
            self._be_refused,
            self._reset,
        ]
        if self.rng.random() < 0.7:
            with suppress(RequestError):
                self.rng.choice(deeds)()

    # --- other clients

    def call(self, call: RemoteCall[T]) -> T:
        """Execute a caller's method; raises RequestError if it is refused."""
        self.num_calls += 1
        message = Call("caller#1", self._next_step("caller#1"), 1, -1, call.method, call.pack())
        served = self.server.serve(ClientLedger("", 1, 1, 0.0), message)
        self._obey(served.commands)
        assert not isinstance(served.answer, StepResult)
        if served.answer.error_type:
            self.num_refused += 1
            raise RequestError(served.answer.error)
        return call.answer(served.answer.result)

    def _call_for_blocks(self) -> None:
        groups = self.manager_config.kv_cache_config.kv_cache_groups
        num_encoder_tokens = int(any(g.kv_cache_spec.keeps_encoder_tokens for g in groups))
        request = Request(self._name("call"), self._prompt(30))
        request.hints = self._hints()
        found = self._caller.get_computed_blocks(request)
        blocks, num_hit = found
        given = self._caller.allocate_slots(
            request,
            request.num_tokens - num_hit,
            num_hit,
            blocks,
            num_encoder_tokens=num_encoder_tokens,
        )
        if isinstance(given, KVCacheBlocks):
            request.num_computed_tokens = request.num_tokens
            self._callers.append(request)
            if self.rng.random() < 0.3:
                child = Request(self._name("fork"), request.all_token_ids)
                if self._caller.fork(request, child) is not None:
                    self._callers.append(child)

    def _free_a_caller(self) -> None:
        while len(self._callers) > 1:
            self._caller.free(self._callers.pop(self.rng.randrange(len(self._callers))))

    def _hints(self) -> tuple[CacheHint, ...]:
        if not self.has_hints:
            return ()
        seconds = self.rng.choice([1.0, 4.0])
        kinds = (
            CacheHint(is_over=True),
            CacheHint(returns_in_s=seconds),
            CacheHint(priority=self.rng.choice([10, 90]), duration_s=seconds),
        )
        return (self.rng.choice(kinds),)

    def pin(self) -> None:
        self._caller.pin_prefix(self._prompt(40), self.rng.uniform(0.1, 9.0))

    def _look(self) -> None:
        self.rng.choice([self._caller.usage, self._caller.make_prefix_cache_stats])()

    def _reset(self) -> None:
        chance = self.rng.random()
        if chance < 0.1:
            self._caller.begin_model_epoch()
        else:
            self._caller.reset_prefix_cache(chance < 0.5)

    def _evict(self) -> None:
        ids = [self.rng.randrange(1, self._num_blocks + 3) for _ in range(4)]
        self._caller.evict_blocks(ids)

    def withdraw(self) -> None:
        ids = [self.rng.randrange(1, self._num_blocks) for _ in range(self.rng.randrange(3))]
        self._obey(self.server.withdraw(ids))

    def hold(self) -> None:
        new = tuple(NewRequest(self._name("held"), self._prompt(40), 40) for _ in range(2))
        self.server.hold("held#1", new)
        if self.rng.random() < 0.8:
            self.server.let_go("held#1")

    def _visit(self) -> None:
        """Attach another engine, run a request, and give the engine up."""
        new = NewRequest(self._name("guest"), self._prompt(30), 40)
        self.step(StepRequest("guest#1", self._next_step("guest#1"), 1, new=(new,)))
        if self.rng.random() < 0.7:
            self.server.release("guest#1")

    def _be_refused(self) -> None:
        step = self._next_step("guest#1")
        self.step(StepRequest("guest#1", step, 1, finished=("unknown",)))

    # --- small things

    def _obey(self, commands: tuple[Command, ...] | list[Command]) -> None:
        for command in commands:
            if isinstance(command, Label):
                self._labels.validate(command)
                self._labels.apply(command)
            elif isinstance(command, Unlabel):
                self._labels.withdraw(command.block_ids)
            elif isinstance(command, Reset):
                self._labels.reset()

    def _prompt(self, longest: int) -> np.ndarray:
        start = self.rng.randrange(3) * 1000
        return np.arange(start, start + self.rng.randint(1, longest), dtype=np.int32)

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what} {self._names}"

    def _next_step(self, client_id: str) -> int:
        self._steps[client_id] = self._steps.get(client_id, 0) + 1
        return self._steps[client_id]


class _Caller(KVCacheClient):
    """A client's calls, executed at once."""

    def __init__(self, life: RecordedLife) -> None:
        self._life = life
        self._sent = SentTokens()

    def _run(self, call: RemoteCall[T]) -> T:
        return self._life.call(call)


class _Disturbed:
    """The manager as an engine sees it: other clients act before each of its steps."""

    def __init__(self, life: RecordedLife) -> None:
        self._life = life

    def step(self, request: StepRequest) -> StepResult:
        self._life.disturb()
        return self._life.step(request)

    def statistics(self) -> ManagerStatistics:
        return self._life.manager.statistics()

    @property
    def usage(self) -> float:
        return self._life.manager.usage
