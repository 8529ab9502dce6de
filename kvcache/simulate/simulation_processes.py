"""Runs many simulations on all cores: one process per core, results in order.

    this process ──task──▶ simulating process ──progress, result──▶ this process
                   pipe                         pipe

A simulation depends only on its task, so the number of processes does not change results. When the
caller's wait ends, also by Ctrl-C, the processes end too; a process whose caller has died finds its
pipe closed and ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TypeAlias

from kvcache.base.clock import Clock, SystemClock
from kvcache.base.errors import ConfigurationError, ExhaustedError, InvariantError, KVCacheError
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.simulated_cache import SimulatedCache
from kvcache.simulate.simulation import DEFAULT_NUM_PARTS, SimulationResult, simulate

_END_S = 5.0


@dataclass(frozen=True)
class SimulationTask:
    """A trace, by its index, a cache, and the number of parts for which hits are counted."""

    trace_index: int
    cache: SimulatedCache
    num_parts: int = DEFAULT_NUM_PARTS


OnProgress: TypeAlias = "Callable[[int, int], None]"
"""Called with the index of a task and the number of its played requests."""


def run_simulations(
    traces: Sequence[BlockTrace],
    tasks: Sequence[SimulationTask],
    num_processes: int | None = None,
    on_progress: OnProgress = lambda task_index, num_requests: None,
) -> list[SimulationResult]:
    """Return the result of every task, in order.

    `num_processes` None: one per core, at most one per task; a single task, or a single process,
    runs here. Raises ConfigurationError if a request does not fit, before anything starts.
    """
    if num_processes is not None and num_processes < 1:
        raise ConfigurationError(f"{num_processes} processes: give at least 1")
    for task in tasks:
        task.cache.require_room(traces[task.trace_index])
    most = num_cores() if num_processes is None else num_processes
    num_used = min(most, len(tasks))
    if num_used <= 1:
        return [
            _run_one(traces, task, index, on_progress, SystemClock())
            for index, task in enumerate(tasks)
        ]
    with _processes(traces, num_used) as connections:
        return _Dispatch(tasks, on_progress).run(connections)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _run_one(
    traces: Sequence[BlockTrace],
    task: SimulationTask,
    index: int,
    on_progress: OnProgress,
    clock: Clock,
) -> SimulationResult:
    trace = traces[task.trace_index]
    return simulate(
        trace, task.cache, clock, lambda played: on_progress(index, played), task.num_parts
    )


class _Dispatch:
    """Gives tasks to processes, one at a time, and collects the results."""

    def __init__(self, tasks: Sequence[SimulationTask], on_progress: OnProgress) -> None:
        self._tasks = tasks
        self._on_progress = on_progress
        self._num_given = 0
        self._results: dict[int, SimulationResult] = {}

    def run(self, connections: list[Connection]) -> list[SimulationResult]:
        """Return all results in order.

        Raises the errors of simulations, ExhaustedError if a process was killed from outside.
        """
        for connection in connections:
            self._give(connection)
        while len(self._results) < len(self._tasks):
            for ready in wait(connections):
                assert isinstance(ready, Connection)
                self._hear(ready)
        return [self._results[index] for index in range(len(self._tasks))]

    def _give(self, connection: Connection) -> None:
        if self._num_given < len(self._tasks):
            with _alive():
                connection.send((self._num_given, self._tasks[self._num_given]))
            self._num_given += 1

    def _hear(self, connection: Connection) -> None:
        with _alive():
            index, told = connection.recv()
        if isinstance(told, int):
            self._on_progress(index, told)
        elif isinstance(told, SimulationResult):
            self._results[index] = told
            self._give(connection)
        elif isinstance(told, KVCacheError):
            raise told
        else:
            raise InvariantError(f"a simulation failed:\n{told}")


@contextmanager
def _alive() -> Iterator[None]:
    """Exchange messages with a process; raises ExhaustedError if it has died."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise ExhaustedError(
            "a simulating process has died: the machine may be short of memory, so try fewer "
            "processes"
        ) from error


@contextmanager
def _processes(traces: Sequence[BlockTrace], count: int) -> Iterator[list[Connection]]:
    """Processes that wait for tasks, and end with the `with` block."""
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            connections.append(ours)
            process = context.Process(target=_serve, args=(theirs, list(traces)), daemon=True)
            with _deaf_to_interrupts():
                process.start()
            processes.append(process)
            theirs.close()
        yield connections
    finally:
        for process in processes:
            process.terminate()
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(_END_S)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Protect processes started here from Ctrl-C: this process handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, traces: list[BlockTrace]) -> None:
    """Run tasks until there are no more: the main function of a process."""
    clock = SystemClock()
    with suppress(EOFError, ConnectionError):
        while True:
            index, task = connection.recv()
            try:
                result = _run_one(traces, task, index, _sender(connection), clock)
            except ConnectionError:
                return
            except KVCacheError as error:
                connection.send((index, error))
            except Exception:
                connection.send((index, traceback.format_exc()))
            else:
                connection.send((index, result))


def _sender(connection: Connection) -> OnProgress:
    def send(index: int, num_requests: int) -> None:
        connection.send((index, num_requests))

    return send
