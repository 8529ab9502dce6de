"""The cost of metrics: the same steps with and without meters, alternating.

One part runs a coordinator and its manager in this process, with one rank that answers at once: it
times a step in the coordinator's thread, with decoded messages. The other runs churn in a manager
alone. Collecting and exporting run between the steps, every few seconds.
"""

from __future__ import annotations

import gc
import statistics
import sys
from pathlib import Path

import numpy as np
from rich.progress import Progress

from bench.cores import OURS, PEER
from bench.manager_rows import advancing
from bench.measure import Figure, Row, alternate
from kvcache.base.arrays import int32_array
from kvcache.base.clock import SystemClock
from kvcache.config.models import MetricsConfig
from kvcache.coordinator import Coordinator, Phase
from kvcache.coordinator.parts import CoordinatorParts
from kvcache.coordinator.settings import CoordinatorSettings
from kvcache.core.flat_core import FlatCore
from kvcache.manager import KVCacheManager
from kvcache.metrics import AgeMeter, MeteredCoordinator, StepMeter
from kvcache.protocol.labels import LabelTable
from kvcache.protocol.messages import Ack, Acknowledge, Attach, Granted, Hello, LabelReport
from kvcache.protocol.state_store import MemoryStateStore
from kvcache.protocol.step import (
    EMPTY_RUNNING,
    NewRequest,
    RunningRequests,
    StepRequest,
    StepResult,
)
from kvcache.protocol.wire import encode
from kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

sys.path.insert(0, str(Path(__file__).resolve().parent))

from churn import Churn
from our_manager import OurManager, one_token_each
from side_setup import Setup
from stopwatch import now_s

NAME = "metrics off"
GOAL = ">= 0.97x"
IN_A_ROW = 32
NUM_BLOCKS = 120_000
"""Room for all tokens that 256 requests decode during the run."""


class Steps:
    """One coordinator of one rank, its steps applied as soon as they are sent."""

    def __init__(self, num_running: int, *, is_metered: bool) -> None:
        settings = MetricsConfig()
        ages = AgeMeter(settings.age_bounds_s)
        core_factory = ages.watching() if is_metered else FlatCore
        group = KVCacheGroupSpec(("layer",), FullAttentionSpec(16, 1, 8))
        config = KVCacheConfig(NUM_BLOCKS, (), (group,))
        parts = CoordinatorParts(
            lambda model_epoch: KVCacheManager(
                config,
                1 << 16,
                max_num_seqs=512,
                log_stats=True,
                has_workers=True,
                model_epoch=model_epoch,
                core_factory=core_factory,
            ),
            SystemClock(),
            MemoryStateStore(),
        )
        coordinator = Coordinator(CoordinatorSettings(1, "plan"), parts, "n")
        self._epoch = begin(coordinator)
        meter = StepMeter(settings.latency_bounds_s)
        self._decider = MeteredCoordinator(coordinator, meter, ages) if is_metered else coordinator
        self._step = 0
        self._running = EMPTY_RUNNING
        if num_running:
            self._running = self._admit(num_running)

    def run(self, count: int = IN_A_ROW) -> float:
        """Return the seconds of one step out of `count` in a row."""
        start = now_s()
        for _ in range(count):
            self._ask(self._running)
        taken = now_s() - start
        self._decider.on_client_message(Acknowledge("c", self._epoch, self._step))
        return taken / count

    def _admit(self, count: int) -> RunningRequests:
        new = tuple(
            NewRequest(f"r{i}", int32_array(np.arange(64) + 1000 * i), max_new_tokens=64)
            for i in range(count)
        )
        result = self._ask(EMPTY_RUNNING, new)
        return one_token_each(result.admitted_slots, np.full(count, 7, np.int32))

    def _ask(self, running: RunningRequests, new: tuple[NewRequest, ...] = ()) -> StepResult:
        self._step += 1
        request = StepRequest(
            "c", self._step, self._epoch, self._step - 1 or -1, running=running, new=new
        )
        out = self._decider.on_client_message(request)
        (result,) = [item.message for item in out if isinstance(item.message, StepResult)]
        applied = encode(Ack("n", "p", 0, self._epoch, result.seq))
        is_served = not result.error and result.running_scheduled.all()
        if not (is_served and self._decider.on_plain_applied(0, applied)):
            raise RuntimeError(f"a step was not served: {result.error or 'no room'}")
        self._decider.settle()
        return result


def begin(coordinator: Coordinator) -> int:
    """Let the one rank obey and a client attach; return the epoch."""
    coordinator.start()
    coordinator.on_worker_message(0, Hello("p", 0, 0, "plan"))
    epoch = coordinator.epoch
    coordinator.on_worker_message(0, Granted("n", "p", 0, epoch))
    known = LabelTable(NUM_BLOCKS, 32, 1).collect(0, epoch, 0, "layout")
    counts = (NUM_BLOCKS, NUM_BLOCKS, 0, known.version, known.layout_fingerprint)
    rest = (known.digest_bytes, known.labels, known.checksums, ())
    coordinator.on_worker_message(0, LabelReport("n", "p", 0, epoch, 0, *counts, *rest))
    coordinator.on_worker_message(0, Ack("n", "p", 0, epoch, 1))
    if coordinator.phase is not Phase.RUNNING:
        raise RuntimeError(f"the coordinator is {coordinator.phase.value}")
    coordinator.on_client_message(Attach("c", 1))
    return epoch


def measure_metrics(is_smoke: bool, progress: Progress) -> list[Row]:
    """Return the rows of o1: with metrics in the first column, without in the peer's."""
    repetitions = 3 if is_smoke else 151
    rows = []
    for num_running, what in ((0, "empty step"), (256, "step of 256 decodes")):
        task = progress.add_task(f"o1 {what}", total=repetitions)
        sides = {PEER: Steps(num_running, is_metered=False)}
        sides[OURS] = Steps(num_running, is_metered=True)
        for side in sides.values():
            side.run()
        gc.collect()
        gc.freeze()
        calls = {name: side.run for name, side in sides.items()}
        figures = alternate(calls, repetitions, advancing(progress, task))
        rows.append(Row("o1", f"coordinator, {what}", figures, NAME, GOAL, share(figures)))
    churn = [measure_churn(is_smoke, progress, is_full=is_full) for is_full in (False, True)]
    return [*rows, *churn]


def share(figures: dict[str, Figure]) -> str:
    """Return the slowdown with metrics, pair by pair, because the load of two repetitions
    and the machine's other work differ by more than the effect."""
    pairs = zip(figures[OURS].samples, figures[PEER].samples, strict=True)
    return f"{statistics.median(on / off for on, off in pairs) - 1:+.1%} with metrics"


def measure_churn(is_smoke: bool, progress: Progress, *, is_full: bool) -> Row:
    """Return a row of W7's churn; `is_full`: every new block takes the
    place of a cached one."""
    num_blocks, num_warm_up = (70_000, 2500) if is_full else (100_000, 1500)
    setup = Setup("churn", num_blocks, size=256, num_warm_up=num_warm_up)
    if is_smoke:
        setup = Setup("churn", 8_000, size=16, num_warm_up=16)
    repetitions, num_turns = (3, 16) if is_smoke else (151, 20)
    what = "churn, full" if is_full else "churn"
    task = progress.add_task(f"o1 {what}", total=repetitions)
    ages = AgeMeter(MetricsConfig().age_bounds_s)
    sides = {
        PEER: Churn(OurManager, setup),
        OURS: Churn(lambda s: OurManager(s, ages.watching()), setup),
    }
    calls = {name: lambda side=side: side.serve(num_turns) for name, side in sides.items()}
    figures = alternate(calls, repetitions, advancing(progress, task))
    same = sides[PEER].hit_tokens() == sides[OURS].hit_tokens()
    note = f"{share(figures)}; hit tokens {'the same' if same else 'differ'}"
    return Row("o1", f"manager, {what}, {num_turns} turns", figures, NAME, GOAL, note)
