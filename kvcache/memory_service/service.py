"""The memory service of a node: holds the memory of workers that come and go.

A plain class with its own thread, for a process that lives as long as the cluster. It holds
descriptors and never maps the memory: the memory exists until the last process that has it ends. It
serves processes of the same user, one question per connection. The kept memory is limited, and so
are connections without a question. It never reads the memory.
"""

from __future__ import annotations

import os
import selectors
import socket
import stat
import threading
import time
from dataclasses import dataclass
from typing import Any

from kvcache.base.errors import (
    AlreadyRunningError,
    ConfigurationError,
    KVCacheError,
    MalformedMessageError,
)
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import LoopStatistics, ServingLoop
from kvcache.memory_service.protocol import (
    MAX_NAME_BYTES,
    MAX_PACKET_BYTES,
    VERBS,
    is_trusted,
    lock_owner,
    make_socket,
    memory_number,
    process_text,
    receive,
    send,
    socket_name,
)

logger = get_logger(__name__)

BACKLOG = 1024
"""Connections that the system queues until they are accepted."""

MAX_SILENT = 256
"""Limit of connections without a question. The oldest is closed for a new one."""

ACCEPTED_AT_ONCE = 64

WAIT_S = 0.2
"""How long the thread waits for a connection before it checks whether to end."""


@dataclass(frozen=True)
class MemoryServiceStatistics:
    """The kept memory by name, and counts of questions.

    `num_refused`: questions that could not be answered, and connections without a question in time.
    `loop`: the answering thread.
    """

    num_segments: int
    num_bytes: int
    num_answered: int
    num_refused: int
    names: tuple[str, ...]
    loop: LoopStatistics


@dataclass(frozen=True)
class _Kept:
    descriptor: int
    num_bytes: int
    number: int


class HostMemoryService:
    """Keeps at most `max_segments` descriptors of at most `max_bytes` together, by name."""

    def __init__(
        self, address: str, *, max_segments: int, max_bytes: int, timeout_s: float = 5.0
    ) -> None:
        """Bind to `address` (`unix:@name`); `serve` answers. A connection has `timeout_s` to ask.

        Raises AlreadyRunningError if the address is in use, ConfigurationError if it is invalid.
        """
        for name, value in (("max_segments", max_segments), ("max_bytes", max_bytes)):
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{name} is {value!r}: set it to an integer of at least 1")
        self._max_segments = max_segments
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._num_answered = self._num_refused = 0
        self._silent: dict[socket.socket, float] = {}  # deadline of the question; the oldest first
        self._accept_again_s = 0.0
        self._loop = ServingLoop("kvcache-memory-service", self._turn)
        self._listener = make_socket(0.0)
        try:
            self._listener.bind(socket_name(address))
            self._listener.listen(BACKLOG)
        except OSError as error:
            self._listener.close()
            raise AlreadyRunningError(
                f"no memory service can listen at {address} ({error.strerror}): end the one that "
                "is there, or use another name"
            ) from error
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Start the answering thread. Call it once."""
        self._loop.start()

    def ensure_serving(self) -> None:
        """Start the thread again if it has ended by an error."""
        self._loop.ensure_running()

    def statistics(self) -> MemoryServiceStatistics:
        with self._lock:
            return MemoryServiceStatistics(
                len(self._kept),
                self._num_bytes(),
                self._num_answered,
                self._num_refused,
                tuple(sorted(self._kept)),
                self._loop.statistics(),
            )

    def is_used(self) -> bool:
        """Say whether a living process uses any of the memory."""
        with self._lock:
            return any(lock_owner(kept.descriptor) for kept in self._kept.values())

    def close(self) -> None:
        """Stop answering, and close everything. Repeatable."""
        self._loop.stop()
        self._loop.join(self._timeout_s + 2 * WAIT_S)
        for connected in self._silent:
            connected.close()
        self._silent.clear()
        self._selector.close()
        self._listener.close()
        with self._lock:
            for kept in self._kept.values():
                os.close(kept.descriptor)
            self._kept.clear()

    # --- the thread

    def _turn(self) -> None:
        """Wait for connections and questions, and serve those that have arrived."""
        now_s = time.monotonic()
        wait_s = WAIT_S
        if self._silent:
            wait_s = min(wait_s, max(0.0, next(iter(self._silent.values())) - now_s))
        if self._accept_again_s and now_s >= self._accept_again_s:
            self._accept_again_s = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        ready = [key.fileobj for key, _ in self._selector.select(wait_s)]
        for connected in ready:
            if isinstance(connected, socket.socket) and connected is not self._listener:
                self._take(connected)
        if self._listener in ready:
            self._accept()
        self._cut_off_late(time.monotonic())

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connected, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.error("the memory service cannot take a connection: %s", error)
                self._selector.unregister(self._listener)
                self._accept_again_s = time.monotonic() + WAIT_S
                return
            connected.setblocking(False)
            self._selector.register(connected, selectors.EVENT_READ)
            self._silent[connected] = time.monotonic() + self._timeout_s
            if len(self._silent) > MAX_SILENT:
                self._cut_off(next(iter(self._silent)), "others came, and it asked nothing")
            self._take(connected)  # most have asked already

    def _cut_off_late(self, now_s: float) -> None:
        while self._silent:
            connected, until_s = next(iter(self._silent.items()))
            if now_s < until_s:
                return
            self._cut_off(connected, f"it asked nothing for {self._timeout_s:g} s")

    def _cut_off(self, connected: socket.socket, reason: str) -> None:
        self._note_refused(reason)
        self._forget(connected)

    def _take(self, connected: socket.socket) -> None:
        """If a connection's question has arrived, answer it and close the connection."""
        try:
            self._answer(connected)
        except BlockingIOError:
            return
        except (KVCacheError, OSError) as error:
            self._refuse(connected, str(error))
        except Exception as error:
            self._refuse(connected, self._loop.faults.note("a question", error))
        self._forget(connected)

    def _answer(self, connected: socket.socket) -> None:
        """Raises BlockingIOError if there is no question yet."""
        if not is_trusted(connected):
            raise MalformedMessageError("it comes from another user")
        values, descriptor = receive(connected)
        listed: list[Any] = []
        try:
            with self._lock:
                found = self._obey(values, descriptor)
                descriptor = None if values[0] == "put" else descriptor
                if values[0] == "list":
                    listed.append(self._listed(values[1]))
                self._num_answered += 1
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._send(connected, [True, "", *listed], found)

    def _refuse(self, connected: socket.socket, reason: str) -> None:
        self._note_refused(reason)
        self._send(connected, [False, reason[:MAX_NAME_BYTES]])

    def _send(
        self, connected: socket.socket, values: list[Any], descriptor: int | None = None
    ) -> None:
        """Send an answer; the other end may have gone, or may not read."""
        try:
            send(connected, values, descriptor)
        except OSError:
            return
        except Exception as error:
            self._loop.faults.note("an answer", error)

    def _forget(self, connected: socket.socket) -> None:
        if self._silent.pop(connected, None) is not None:
            self._selector.unregister(connected)
            connected.close()

    def _note_refused(self, reason: str) -> None:
        with self._lock:
            self._num_refused += 1
        logger.warning("the memory service refuses a question: %s", reason)

    def _obey(self, values: list[Any], descriptor: int | None) -> int | None:
        """Execute a question; return the descriptor to hand over. Raises MalformedMessageError,
        without effect. Takes ownership of the descriptor if it is kept."""
        is_text = len(values) == 2 and type(values[0]) is str and type(values[1]) is str
        if not is_text or values[0] not in VERBS:
            raise MalformedMessageError("it is not a question of the memory service's protocol")
        verb, name = values
        if len(name.encode()) > MAX_NAME_BYTES or (descriptor is None) != (verb != "put"):
            raise MalformedMessageError(f"{verb} of {name[:50]!r} is invalid")
        if verb == "list":
            return None
        old = self._kept.get(name)
        if verb == "attach":
            return None if old is None else old.descriptor
        if descriptor is not None:
            self._kept[name] = self._admitted(name, descriptor, old)
        else:
            self._kept.pop(name, None)
        if old is not None:
            os.close(old.descriptor)
        return None

    def _listed(self, prefix: str) -> list[tuple[str, int]]:
        """Return the names that begin with `prefix`, with the numbers of their memory, as many as
        fit into a packet."""
        names = sorted(name for name in self._kept if name.startswith(prefix))
        most = MAX_PACKET_BYTES // 2 // max(1, *(len(name.encode()) + 16 for name in names), 1)
        return [(name, self._kept[name].number) for name in names[:most]]

    def _admitted(self, name: str, descriptor: int, old: _Kept | None) -> _Kept:
        """Return the entry to keep; raises MalformedMessageError if it must not be kept."""
        status = os.fstat(descriptor)
        user = 0 if old is None or old.number == status.st_ino else lock_owner(old.descriptor)
        if user:
            raise MalformedMessageError(
                f"{process_text(user)} uses other memory under {name!r}: end it, or drop that first"
            )
        num_bytes = self._num_bytes() - (0 if old is None else old.num_bytes) + status.st_size
        num_segments = len(self._kept) + (old is None)
        if not stat.S_ISREG(status.st_mode):
            raise MalformedMessageError(f"the memory put under {name!r} is not shared memory")
        if num_segments > self._max_segments or num_bytes > self._max_bytes:
            raise MalformedMessageError(
                f"{name!r} would make it {num_segments} segments of {num_bytes} bytes, at most "
                f"{self._max_segments} of {self._max_bytes} are kept"
            )
        return _Kept(descriptor, status.st_size, memory_number(descriptor))

    def _num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self._kept.values())
