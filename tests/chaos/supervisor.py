"""Manages the processes of one schedule: starts them, notices their deaths, replaces them.

Does the part of Ray and the worker supervisor: reports losses, replaces workers and coordinators,
tells workers and clients where the coordinator listens. And it applies faults. A thread of its own;
everything except signals goes through its queue.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import select
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.chaos.control import Control
from tests.chaos.fork_server import ForkServer
from tests.chaos.roles import ENDPOINT_FILE
from tests.chaos.schedule import TENSOR_PARALLEL, Schedule, Strike

WAIT_S = 0.05
CLOSE_S = 10.0
ANSWER_S = 10.0
STOPPED_PAUSE_S = 0.3
"""How long a process that has stopped itself stays stopped."""


@dataclass(eq=False)
class ForkedProcess:
    """One process. `role` is the name for which it was started, as in schedules."""

    number: int
    role: str
    generation: int
    control: Control
    process_id: int = 0
    descriptor: int = -1
    address: str = ""  # of a coordinator that serves
    incarnation: str = ""  # of a running worker
    pause_s: float = STOPPED_PAUSE_S  # how long it stays stopped
    is_dead: bool = False
    report: dict[str, Any] | None = None
    outcome: str = ""  # of an engine's game

    @property
    def rank(self) -> int:
        """Of a worker."""
        return int(self.role.removeprefix("worker-"))


class ChaosSupervisor:
    """All processes of one schedule. `problems` are errors of the schedule."""

    def __init__(self, fork_server: ForkServer, schedule: Schedule, directory: Path) -> None:
        """Start no process yet."""
        self.problems: list[str] = []
        self.deeds: Counter[str] = Counter()
        self._control = fork_server.control
        self._schedule = schedule
        self._directory = directory
        self._rng = random.Random(schedule.seed * 31 + 5)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count(1000 * schedule.seed)
        self._processes: dict[int, ForkedProcess] = {}
        self._serving: dict[str, ForkedProcess] = {}
        self._generations: Counter[str] = Counter()
        self._orders: deque[Callable[[], None]] = deque()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        self._is_closing = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="chaos-supervisor", daemon=True)
        self._thread.start()

    # --- for the schedule

    def start(self) -> None:
        """Start workers and coordinator, and the second engine; return when they serve."""
        self._order(self._start_all)
        self._await(lambda: bool(self._endpoint() or self.problems), ANSWER_S, "begin to serve")

    def strike(self, strike: Strike) -> None:
        """Apply a scheduled fault now, to the process that has the role."""
        with self._lock:
            victim = self._serving.get(strike.victim)
            if victim is None or victim.descriptor < 0:
                return
            if strike.deed == "kill":
                self._signal(victim, signal.SIGKILL)
                return
            victim.pause_s = strike.pause_s
            self._signal(victim, signal.SIGSTOP)
            if strike.deed == "usurp":
                self.deeds["usurped"] += 1
                self._order(lambda: self._start("coordinator"))

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of coordinator and workers, by role."""
        number = next(self._numbers)
        with self._lock:
            asked = {r: p for r, p in self._serving.items() if r != "engine"}
            for process in asked.values():
                process.report = None
        self._order(lambda: self._ask(asked, number))
        self._await(
            lambda: all(p.report is not None or p.is_dead for p in asked.values()),
            ANSWER_S,
            "say how they do",
        )
        return {role: p.report or {"broken": "it is dead"} for role, p in asked.items()}

    def is_settled(self) -> bool:
        """Whether every role has a living process, and no event is pending."""
        with self._lock:
            wanted = {"coordinator", *(f"worker-{rank}" for rank in range(TENSOR_PARALLEL))}
            has_all = all(
                role in self._serving and self._is_there(self._serving[role]) for role in wanted
            )
            return has_all and not self._due and not self._orders

    def await_engine(self, limit_s: float) -> str:
        """Wait for the end of the second engine; return its outcome, empty if it was killed."""
        with self._lock:
            engines = [p for p in self._processes.values() if p.role == "engine"]
        self._await(lambda: all(p.is_dead for p in engines), limit_s, "end the second game")
        return "".join(p.outcome for p in engines)

    def close(self) -> None:
        """End all processes. One that must be killed, or survives, is a problem."""
        self._order(self._begin_to_close)
        if not self._have_all_died(CLOSE_S):
            self.problems.append(f"not every process ended when told to: {self.describe()}")
            for process in self._living():
                self._signal(process, signal.SIGKILL)
            if not self._have_all_died(CLOSE_S):
                self.problems.append(f"not every process died: {self.describe()}")
        self._is_over = True
        self._order(lambda: None)
        self._thread.join(CLOSE_S)
        for process in self._processes.values():
            process.control.close()
            if process.descriptor >= 0:
                os.close(process.descriptor)
        for end in (self._wake, self._woken):
            os.close(end)

    def describe(self) -> str:
        """Return a description of all processes, for a failure's message."""
        with self._lock:
            processes = [
                f"{p.role}.{p.generation} {p.process_id}"
                f" {'dead' if p.is_dead else _state_of(p.process_id)}"
                for p in self._processes.values()
            ]
        return "; ".join(processes)

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._is_over:
                controls = [p.control for p in self._living() if not p.control.is_over]
                select.select([self._wake, self._control, *controls], [], [], self._idle_s())
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                with self._lock:
                    self._turn()
                    self._changed.notify_all()
        except BaseException as error:
            self.problems.append(f"the supervisor itself: {error!r}")
            raise

    def _turn(self) -> None:
        while self._orders:
            self._orders.popleft()()
        # Messages of a process come before its end.
        for process in list(self._processes.values()):
            if not process.control.is_over:
                for message in process.control.receive():
                    self._on_said(process, message)
        for message in self._control.receive():
            self._on_fork_server(message)
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            heapq.heappop(self._due)[2]()

    def _idle_s(self) -> float:
        return max(0.0, min(WAIT_S, self._due[0][0] - time.monotonic())) if self._due else WAIT_S

    def _order(self, action: Callable[[], None]) -> None:
        self._orders.append(action)
        with suppress(OSError):
            os.write(self._woken, b".")

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._numbers), action))

    def _have_all_died(self, limit_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._living(), limit_s)

    def _await(self, is_done: Callable[[], bool], limit_s: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(is_done, limit_s):
                raise AssertionError(f"they did not {what} within {limit_s} s: {self.describe()}")

    # --- starts

    def _start_all(self) -> None:
        for rank in range(TENSOR_PARALLEL):
            self._start(f"worker-{rank}")
        self._start("coordinator")
        if self._schedule.other_game is not None:
            self._start("engine")

    def _start(self, role: str) -> None:
        """Start a process for the role."""
        if self._is_closing:
            return
        control, theirs = Control.pair()
        process = ForkedProcess(next(self._numbers), role, self._generations[role], control)
        self._generations[role] += 1
        self._processes[process.number] = process
        self._serving[role] = process
        request = self._request(process)
        fault = self._schedule.fault_for(role, process.generation)
        if fault is not None:
            request["fault"] = {"count": fault.count, "signal": fault.signal}
        self._control.send(request, theirs.fileno())
        theirs.close()

    def _request(self, process: ForkedProcess) -> dict[str, Any]:
        """Return the arguments for the fork server and the new process."""
        game = self._schedule.other_game
        request = {
            "id": process.number,
            "kind": process.role.split("-", maxsplit=1)[0],
            "config": self._schedule.config.model_dump_json(),
            "directory": str(self._directory),
            "dealt": None if game is None else asdict(game),
        }
        if process.role == "coordinator":
            self._directory.joinpath(ENDPOINT_FILE).unlink(missing_ok=True)
            request["incarnations"] = {w.rank: w.incarnation for w in self._workers_there()}
        elif process.role.startswith("worker"):
            request["rank"] = process.rank
        return request

    def _workers_there(self) -> list[ForkedProcess]:
        return [p for r, p in self._serving.items() if r.startswith("worker") and self._is_there(p)]

    @staticmethod
    def _is_there(process: ForkedProcess) -> bool:
        return not process.is_dead and bool(process.address or process.incarnation)

    # --- messages

    def _on_fork_server(self, message: dict[str, Any]) -> None:
        if "born" in message:
            if message["born"] not in self._processes:
                return
            process = self._processes[message["born"]]
            process.process_id = message["pid"]
            with suppress(ProcessLookupError):
                process.descriptor = os.pidfd_open(process.process_id)
            return
        process_id = message.get("ended", message.get("stopped"))
        process = next((p for p in self._living() if p.process_id == process_id), None)
        if process is None:
            return  # of an earlier schedule, which has failed
        if "stopped" in message:
            self.deeds["stopped"] += 1
            self._later(process.pause_s, lambda: self._go_on(process))
            return
        process.is_dead = True
        self._on_end(process, message["code"])

    def _on_end(self, process: ForkedProcess, code: int) -> None:
        if code == -signal.SIGKILL:
            self.deeds[f"killed {process.role.split('-')[0]}"] += 1
        if self._is_closing or process.role == "engine":
            if code not in (0, -signal.SIGKILL):
                self.problems.append(f"{process.role} {process.process_id} ended with {code}")
            return
        if code != -signal.SIGKILL:
            self.problems.append(f"{process.role} {process.process_id} ended with {code}")
            self._is_closing = True  # a process that fails by itself would fail again
        if self._serving.get(process.role) is not process:
            return
        if process.role != "coordinator" and process.incarnation:
            self._later(self._delay_s(), lambda: self._say_lost(process))
        self._later(self._delay_s(), lambda: self._start_again(process))

    def _delay_s(self) -> float:
        return self._rng.choice((0.0, 0.01, 0.05, 0.2))

    def _start_again(self, process: ForkedProcess) -> None:
        if self._serving.get(process.role) is process:
            self._start(process.role)

    def _say_lost(self, process: ForkedProcess) -> None:
        coordinator = self._serving.get("coordinator")
        if coordinator is not None:
            lost = {"do": "lost", "rank": process.rank, "incarnation": process.incarnation}
            coordinator.control.send(lost)

    def _on_said(self, process: ForkedProcess, message: dict[str, Any]) -> None:
        if "failed" in message:
            self.problems.append(message["failed"])
        elif "report" in message:
            process.report = message
        elif "done" in message:
            process.outcome = message["done"]
        elif process.role == "coordinator":
            process.address = message["ready"]
            if self._serving["coordinator"] is process:
                self._publish(process.address)
        elif process.role.startswith("worker"):
            process.incarnation = message["ready"]
            if address := self._endpoint():
                process.control.send({"do": "attach", "address": address})

    def _publish(self, address: str) -> None:
        """Tell all processes where the coordinator listens now."""
        temporary = self._directory / f"{ENDPOINT_FILE}.new"
        temporary.write_text(address)
        temporary.replace(self._directory / ENDPOINT_FILE)
        for worker in self._workers_there():
            worker.control.send({"do": "attach", "address": address})

    def _endpoint(self) -> str:
        coordinator = self._serving.get("coordinator")
        return "" if coordinator is None else coordinator.address

    def _ask(self, processes: dict[str, ForkedProcess], number: int) -> None:
        for process in processes.values():
            process.control.send({"do": "report", "report": number})

    # --- signals and ends

    def _signal(self, process: ForkedProcess, number: int) -> None:
        if process.descriptor >= 0 and not process.is_dead:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process.descriptor, number)

    def _go_on(self, process: ForkedProcess) -> None:
        self._signal(process, signal.SIGCONT)

    def _begin_to_close(self) -> None:
        self._is_closing = True
        self._due.clear()
        for process in self._living():
            if process.role == "engine":  # it has failed, or another process has
                self._signal(process, signal.SIGKILL)
                continue
            self._go_on(process)
            process.control.send({"do": "close"})

    def _living(self) -> list[ForkedProcess]:
        with self._lock:
            return [p for p in self._processes.values() if not p.is_dead]


def _state_of(process_id: int) -> str:
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return "gone"
    return f"in state {status.rpartition(')')[2].split()[0]}"
