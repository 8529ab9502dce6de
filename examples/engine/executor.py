"""Runs the ranks, in this process or as Ray actors, behind one protocol.

    engine ──submit(work)──▶ executor ──▶ every rank: begin, compute, end
           ◀─collect()─────            ◀── tokens chosen by the first rank of the last stage

This module has the protocol and the executor without Ray: a whole cluster in this process. The
coordinator is served while the engine waits; several ranks have a thread each.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from actors import KVCacheClient
from actors.local import LocalCluster
from examples.engine.checkpoint import weight_source
from examples.engine.config import EngineConfig
from examples.engine.parallel import Communicator, RankGroup, SingleRank, local_store
from examples.engine.runner import RankRunner
from examples.engine.weights import RankPlace
from examples.engine.work import StepOutput, StepWork
from kvcache.base.errors import RequestError


class Executor(Protocol):
    """Runs forwards in order. Work is submitted in order of steps and collected in that order."""

    @property
    def client(self) -> KVCacheClient:
        """The engine's connection to the coordinator."""

    @property
    def boundary_tokens(self) -> int | None:
        """See `RankRunner.boundary_tokens`."""

    def submit(self, work: StepWork) -> None:
        """Make all ranks run a forward, now or when it is collected."""

    def collect(self) -> StepOutput:
        """Return the output of the oldest uncollected forward.

        Raises a rank's error, once no rank runs the forward any more.
        """

    def reset(self) -> None:
        """Drop all submitted work, once no rank runs it; connect the ranks again."""

    def attach(self) -> None:
        """Attach to the coordinator. Raises as a client does."""

    def shutdown(self) -> None:
        """Release everything. Repeatable."""


class LocalExecutor:
    """Everything in this process."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the cluster and load the weights. Raises what `LocalCluster` raises."""
        self.cluster = LocalCluster(config.cluster_config())
        self._config = config
        self._forward_s = self.cluster.config.deadlines.forward_s
        self._generation = 0
        self._queue: deque[StepWork] = deque()
        num_ranks = config.num_ranks
        self._threads = ThreadPoolExecutor(num_ranks) if num_ranks > 1 else None
        try:
            self._client = self.cluster.client()
            communicators = self._connect()
            source = weight_source(config.checkpoint, config.seed)
            self._runners = [
                RankRunner(
                    config.model,
                    source,
                    self.cluster.workers[rank].worker,
                    self._place(rank),
                    communicator=communicators[rank],
                    adapters=config.adapters,
                )
                for rank in range(num_ranks)
            ]
        except BaseException:
            self.shutdown()
            raise

    @property
    def client(self) -> KVCacheClient:
        """See `Executor`."""
        return self._client

    @property
    def boundary_tokens(self) -> int | None:
        """See `Executor`."""
        sizes = [r.boundary_tokens for r in self._runners if r.boundary_tokens is not None]
        return max(sizes, default=None)

    def submit(self, work: StepWork) -> None:
        """Keep the work: it runs when it is collected."""
        self._queue.append(work)

    def collect(self) -> StepOutput:
        """Run the oldest work on all ranks."""
        if not self._queue:
            raise RequestError("there is no work to collect: submit some first")
        work = self._queue.popleft()
        begun: list[RankRunner] = []
        try:
            for runner in self._runners:
                runner.begin(work, self._forward_s)
                begun.append(runner)
            outputs = self._compute(work)
        finally:
            for runner in begun:
                runner.end(work)
        return next(output for output in outputs if output is not None)

    def reset(self) -> None:
        """See `Executor`."""
        self._queue.clear()
        self._generation += 1
        communicators = self._connect()
        for runner, communicator in zip(self._runners, communicators, strict=True):
            runner.communicator = communicator

    def attach(self) -> None:
        """See `Executor`."""
        if self._client.is_attached:
            self._client.close()
            self._client = self.cluster.client()
        else:
            self._client.attach()

    def shutdown(self) -> None:
        """See `Executor`."""
        if self._threads is not None:
            self._threads.shutdown()
        self.cluster.close()

    def _place(self, rank: int) -> RankPlace:
        config = self._config
        return RankPlace.of(rank, config.tensor_parallel_size, config.pipeline_parallel_size)

    def _connect(self) -> list[Communicator]:
        if self._threads is None:
            return [SingleRank()]
        store = local_store()
        meeting = [
            self._threads.submit(
                RankGroup,
                store,
                rank,
                self._place(rank),
                generation=self._generation,
                timeout_s=self._forward_s,
            )
            for rank in range(self._config.num_ranks)
        ]
        return [future.result() for future in meeting]

    def _compute(self, work: StepWork) -> list[StepOutput | None]:
        if self._threads is None:
            return [self._runners[0].compute(work)]
        computing = [self._threads.submit(runner.compute, work) for runner in self._runners]
        errors = [future.exception() for future in computing]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in computing]
