"""A coordinator's link to its publisher: a process and a pair of sockets. Never blocks a step.

`publisher_process.py` is at the other end. Data that the process has not taken yet is kept up to a
limit. Beyond it, and if the process ends, all of it is dropped, and the user of the link must send
a full snapshot. Only `open` and `close` wait.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from typing import Any, Final

from kvcache.base.clock import Clock
from kvcache.base.errors import ClusterError, ConfigurationError, MalformedMessageError
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import describe_error
from kvcache.events.feed_frames import FeedReader, pack_frame
from kvcache.events.publisher import PublisherSettings
from kvcache.events.publisher_process import SocketSettings
from kvcache.events.translation import GroupKind

logger = get_logger(__name__)

_READ_BYTES: Final = 1 << 16
_BUFFER_BYTES: Final = 4 << 20
_CLOSE_S: Final = 2.0
_RESTART_S: Final = 1.0


class ProcessLink:
    """A publisher in a process of its own, restarted when it ends. One user, one thread."""

    def __init__(
        self,
        settings: PublisherSettings,
        kinds: Sequence[GroupKind],
        sockets: SocketSettings,
        clock: Clock,
        *,
        max_waiting_bytes: int = 256 << 20,
    ) -> None:
        """Start nothing yet. `max_waiting_bytes`: limit of frames that the process has not
        taken."""
        self._settings = asdict(settings)
        self._kinds = [astuple(kind) for kind in kinds]
        self._sockets = sockets
        self._bound: SocketSettings | None = None
        self._clock = clock
        self._max_waiting_bytes = max_waiting_bytes
        self._limit_bytes = max_waiting_bytes
        """A state must get through however large it is: it does not count."""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._reader = FeedReader()
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._is_ready = False
        self._is_told = False
        self._restart_at_s = 0.0
        self._statistics: dict[str, Any] = {}
        self._last_seq = -1
        self._places: tuple[str, str] = ("", "")
        self._num_overflows = 0
        self._num_restarts = 0
        self._problem = ""

    @property
    def endpoints(self) -> tuple[str, str]:
        """The bound addresses: the live stream, and the socket for requests."""
        return self._places

    @property
    def needs_state(self) -> bool:
        """Whether a publisher is there that needs the whole state first."""
        keeps_up = 2 * self._waiting_bytes < self._max_waiting_bytes
        return self._is_ready and not self._is_told and keeps_up

    @property
    def last_seq(self) -> int:
        """The highest number that a publisher of this link has reported."""
        return self._last_seq

    def open(self, timeout_s: float) -> None:
        """Start the process and return when its sockets are bound.

        Raises:
            ConfigurationError: they cannot be bound, and why.
            ClusterError: the process ends, or is silent for `timeout_s`.
        """
        self._start()
        give_up_s = self._clock.now() + timeout_s
        with selectors.DefaultSelector() as selector:
            if self._socket is not None:
                selector.register(self._socket, selectors.EVENT_READ)
            while self._socket is not None and not self._is_ready:
                if self._clock.now() > give_up_s:
                    self.close()
                    raise ClusterError(
                        f"the event publisher said nothing within {timeout_s:g} s: look at the log"
                    )
                selector.select(0.1)
                self._receive()
        if not self._is_ready:
            problem = self._problem
            self.close()
            raise ConfigurationError(
                f"events cannot be published: {problem}: set events.endpoint and "
                "events.replay_endpoint to addresses that are free, or events.enabled to false"
            )

    def send(self, frame: bytes, *, is_state: bool = False) -> None:
        """Send a frame, or drop it: without a publisher, and before it has the state."""
        if not self._is_ready or not (self._is_told or is_state):
            return
        if is_state:
            self._limit_bytes = self._max_waiting_bytes + self._waiting_bytes + len(frame)
        if self._waiting_bytes + len(frame) > self._limit_bytes:
            logger.warning(
                "the event publisher does not keep up: %d bytes are dropped, a full snapshot "
                "follows",
                self._waiting_bytes,
            )
            self._num_overflows += 1
            self._is_told = False
            self._drop_whole_frames()
            return
        self._is_told = True
        self._waiting.append(memoryview(frame))
        self._waiting_bytes += len(frame)
        self._push()

    def forget_state(self) -> None:
        """Send nothing before the next state; the publisher keeps its own until then."""
        self._is_told = False
        self._drop_whole_frames()

    def poll(self) -> None:
        """Send frames that wait; read the process's messages; restart it if it has ended."""
        if self._socket is None:
            if self._clock.now() >= self._restart_at_s:
                self._num_restarts += 1
                self._start()
            return
        self._receive()
        self._push()

    def statistics(self) -> dict[str, Any]:
        """Return the publisher's last statistics, and counts of frames."""
        return {
            **self._statistics,
            "is_alive": self._is_ready,
            "process_id": 0 if self._process is None else self._process.pid,
            "endpoint": self._places[0],
            "replay_endpoint": self._places[1],
            "waiting_bytes": self._waiting_bytes,
            "num_overflows": self._num_overflows,
            "num_publisher_restarts": self._num_restarts,
            "problem": self._problem,
        }

    def close(self) -> None:
        """End the process, which first tries to send its batches. May be called again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._is_ready = self._is_told = False
        self._waiting.clear()
        self._waiting_bytes = 0
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> None:
        """Start the process. If that fails, it is tried again later."""
        try:
            self._socket = self._launch()
        except OSError as error:
            self._problem = f"the event publisher cannot be started: {error}"
            logger.error("%s: it is tried again in %g s", self._problem, _RESTART_S)
            self._restart_at_s = self._clock.now() + _RESTART_S
            return
        self._reader = FeedReader()
        self._is_ready = self._is_told = False
        # Followers look for the next publisher at the same address.
        sockets = asdict(self._bound or self._sockets)
        opening = pack_frame("open", self._settings, self._kinds, sockets)
        self._waiting.append(memoryview(opening))
        self._waiting_bytes = len(opening)
        self._push()

    def _launch(self) -> socket.socket:
        """Start the process and return our socket. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                ours.setblocking(False)
                theirs.set_inheritable(True)
                end = theirs.fileno()
                command = [sys.executable, "-m", "kvcache.events.publisher_process", str(end)]
                self._process = subprocess.Popen(command, pass_fds=(end,))
            except OSError:
                ours.close()
                raise
        return ours

    def _push(self) -> None:
        """Send as much as the socket takes."""
        while self._waiting and self._socket is not None:
            try:
                sent = self._socket.send(self._waiting[0])
            except BlockingIOError:
                return
            except OSError as error:
                self._on_end(f"the event publisher has ended: {error}")
                return
            self._waiting_bytes -= sent
            if sent == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][sent:]

    def _receive(self) -> None:
        """Read the process's messages."""
        if self._socket is None:
            return
        try:
            data = self._socket.recv(_READ_BYTES)
            frames = self._reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, MalformedMessageError) as error:
            self._on_end(f"the event publisher has ended: {error}")
            return
        try:
            self._obey(frames)
        except Exception as error:
            self._on_end(f"the event publisher cannot be understood: {describe_error(error)}")
            return
        if not data:
            self._on_end(self._problem or "the event publisher has ended")

    def _obey(self, frames: Sequence[Sequence[Any]]) -> None:
        """Take one message of the process."""
        for kind, *values in frames:
            if kind == "ready":
                self._places = (str(values[0]), str(values[1]))
                self._is_ready, self._problem = True, ""
                logger.info(
                    "the event publisher is ready, process %d: live at %s, replay at %s",
                    0 if self._process is None else self._process.pid,
                    *self._places,
                )
                live, replay = self._places
                self._bound = replace(self._sockets, endpoint=live, replay_endpoint=replay)
            elif kind == "failed":
                self._problem = str(values[0])
                self._bound = None
                logger.error("the event publisher cannot bind its sockets: %s", self._problem)
            elif kind == "statistics":
                self._statistics = dict(values[0])
                self._last_seq = max(self._last_seq, int(self._statistics["last_seq"]))

    def _on_end(self, problem: str) -> None:
        """Drop the process, which is dead or useless: another one follows."""
        logger.warning("%s; it is started again", problem)
        self._problem = problem
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
        self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._is_ready = self._is_told = False
        self._statistics = {}
        self._waiting.clear()
        self._waiting_bytes = 0
        self._restart_at_s = self._clock.now() + _RESTART_S

    def _drop_whole_frames(self) -> None:
        """Drop frames that are not partly sent: half a frame would break the stream."""
        begun = self._waiting[0] if self._waiting else None
        self._waiting.clear()
        self._waiting_bytes = 0
        if begun is not None:
            self._waiting.append(begun)
            self._waiting_bytes = len(begun)
