"""Ranks as Ray actors, each with its worker of the cluster and its part of the model.

    engine's process                     actor of rank r
    RayExecutor.submit(work) ──call──▶ EngineRank.execute: begin ─ all ranks agree ─ compute ─ end
               .collect()    ◀─chosen──      thread of the rank's worker serves the coordinator

Calls of an actor run in order, so the ranks may be a step behind the engine and never mix steps up.
Before a forward computes, all ranks report whether they could begin it. If one could not, because
its coordinator has changed, none waits for it in a sum.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from actors import KVCacheClient, KVCacheCluster
from actors.workers.worker import WorkerActor
from examples.engine.checkpoint import weight_source
from examples.engine.config import EngineConfig
from examples.engine.parallel import (
    LOOPBACK,
    Communicator,
    RankGroup,
    SingleRank,
    join_store,
    open_store,
)
from examples.engine.runner import RankRunner
from examples.engine.weights import RankPlace
from examples.engine.work import StepOutput, StepWork
from kvcache.base.errors import (
    ClusterError,
    DeadlineError,
    KVCacheError,
    RequestError,
    WorkerLostError,
)

PATIENCE = 2
"""Ranks wait this many times longer for each other than a rank waits for its coordinator."""


class EngineRank(WorkerActor):
    """The process of one rank: `kvcache.worker` owns its pages, `RankRunner` reads and writes."""

    def load(self, config: EngineConfig, host: str, port: int, generation: int) -> int | None:
        """Load this rank's weights and connect to the other ranks. The launch has assigned the
        rank.

        Returns `RankRunner.boundary_tokens`.
        """
        torch.set_num_threads(max(1, torch.get_num_threads() // config.num_ranks))
        worker = self.kvcache.worker
        self._forward_s = config.cluster_config().deadlines.forward_s
        self._place = RankPlace.of(
            worker.settings.rank, config.tensor_parallel_size, config.pipeline_parallel_size
        )
        self._runner = RankRunner(
            config.model,
            weight_source(config.checkpoint, config.seed),
            worker,
            self._place,
            communicator=self._meet(host, port, generation),
            adapters=config.adapters,
        )
        return self._runner.boundary_tokens

    def connect(self, host: str, port: int, generation: int) -> None:
        """Connect to the other ranks again."""
        self._runner.communicator = self._meet(host, port, generation)

    def execute(self, work: StepWork) -> StepOutput | None:
        """Run a forward; return the chosen tokens on the first rank of the last stage.

        Raises as `begin_forward` does, and ClusterError if another rank could not begin.
        """
        problem: KVCacheError | None = None
        try:
            self._runner.begin(work, self._forward_s)
        except KVCacheError as error:
            problem = error
        try:
            is_everybody_well = self._runner.communicator.all_agree(problem is None)
            if problem is not None:
                raise problem
            if not is_everybody_well:
                raise ClusterError(f"another rank could not begin forward {work.seq}")
            return self._runner.compute(work)
        finally:
            if problem is None:
                self._runner.end(work)
                self.kvcache.wake()

    def _meet(self, host: str, port: int, generation: int) -> Communicator:
        place = self._place
        if place.tensor_size * place.num_stages == 1:
            return SingleRank()
        settings = self.kvcache.worker.settings
        timeout_s = PATIENCE * self._forward_s
        return RankGroup(
            join_store(host, port, timeout_s),
            settings.rank,
            place,
            generation=generation,
            device=settings.device,
            timeout_s=timeout_s,
        )


class RayExecutor:
    """A cluster whose workers are `EngineRank`s. See `Executor`."""

    def __init__(self, config: EngineConfig) -> None:
        """Launch the cluster and load the weights. Raises what `KVCacheCluster.launch` raises."""
        self._config = config
        settings = config.cluster_config()
        self._timeout_s = settings.deadlines.startup_s
        self._collect_s = 2 * PATIENCE * settings.deadlines.forward_s
        self._generation = 0
        self._calls: deque[list[Any]] = deque()
        self._workers: tuple[Any, ...] = ()  # those with weights, in rank order
        self._needs_client = False
        # Kept open as long as ranks may connect.
        self._store, self._port = open_store(LOOPBACK)
        self.cluster = KVCacheCluster.launch(settings, worker_class=EngineRank)
        try:
            self._client = self.cluster.client()
            sizes = self._meet(self.cluster.workers)
        except BaseException:
            self.cluster.stop()
            raise
        self._boundary_tokens = max((s for s in sizes if s is not None), default=None)

    @property
    def client(self) -> KVCacheClient:
        """See `Executor`."""
        return self._client

    @property
    def boundary_tokens(self) -> int | None:
        """See `Executor`."""
        return self._boundary_tokens

    def submit(self, work: StepWork) -> None:
        """Send the work to every rank; it begins when the one before it has ended."""
        self._calls.append([worker.execute.remote(work) for worker in self._workers])

    def collect(self) -> StepOutput:
        """See `Executor`."""
        if not self._calls:
            raise RequestError("there is no work to collect: submit some first")
        outputs: list[StepOutput | None] = self._answers(self._calls.popleft(), self._collect_s)
        return next(output for output in outputs if output is not None)

    def reset(self) -> None:
        """See `Executor`. Replaced ranks load their weights. Raises WorkerLostError while
        a rank is lost."""
        while self._calls:
            for call in self._calls.popleft():
                with contextlib.suppress(RayError, KVCacheError):
                    ray.get(call, timeout=self._collect_s)
        workers = self.cluster.workers
        # Find a lost rank here, before the others wait for it.
        self._answers([worker.kvcache_statistics.remote() for worker in workers], self._timeout_s)
        if self._config.num_ranks > 1 or workers != self._workers:
            self._generation += 1
            self._meet(workers)

    def attach(self) -> None:
        """See `Executor`."""
        if self._needs_client or self._client.is_attached:
            self._needs_client = True  # also if the next lines raise
            self._client.close()
            self._client = self.cluster.client()
            self._needs_client = False
        else:
            self._client.attach()

    def shutdown(self) -> None:
        """See `Executor`."""
        self._client.close()
        self.cluster.stop()

    def _meet(self, workers: tuple[Any, ...]) -> list[int | None]:
        """Connect all ranks; new ones load their weights. Return the boundaries of those."""
        address = (LOOPBACK, self._port, self._generation)
        calls = [
            worker.connect.remote(*address)
            if worker in self._workers
            else worker.load.remote(self._config, *address)
            for worker in workers
        ]
        answers: list[int | None] = self._answers(calls, self._timeout_s)
        self._workers = workers
        return answers

    def _answers(self, calls: list[Any], timeout_s: float) -> list[Any]:
        """Return the answers of all ranks; raise the most informative error once all have ended."""
        answers, errors = [], list[Exception]()
        for call in calls:
            try:
                answers.append(ray.get(call, timeout=timeout_s))
            except RayTaskError as error:
                errors.append(error.cause if isinstance(error.cause, Exception) else error)
            except RayActorError as error:
                errors.append(WorkerLostError(f"a rank of the engine is gone: {error}"))
            except GetTimeoutError:
                errors.append(
                    DeadlineError(
                        f"a rank of the engine gave no answer in {timeout_s:g} s: look at the "
                        "cluster's status, or raise deadlines.forward_s"
                    )
                )
            except KVCacheError as error:
                errors.append(error)
        if errors:
            # Another rank's ClusterError says less than the cause.
            errors.sort(key=lambda error: type(error) is ClusterError)
            raise errors[0]
        return answers
