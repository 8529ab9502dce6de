"""The keeper of a node: holds the memory of workers that come and go.

A plain class with a thread of its own; whoever wants it to live as long as a cluster runs it in a
process that does. It holds descriptors and never maps them, so that the memory is as safe as this
process is alive, and gone when nobody has it any more. Workers of the same user are served, one
question at a time; what is kept is bounded. Refuses to know what the memory holds.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from dataclasses import dataclass
from typing import Any

from kvcache.errors import AlreadyRunningError, KVCacheError, MalformedMessageError
from kvcache.keeper.protocol import (
    MAX_NAME_BYTES,
    VERBS,
    is_trusted,
    make_socket,
    receive,
    send,
    socket_name,
)
from kvcache.specs import require_count

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Connections that wait to be served."""

ACCEPT_S = 0.2
"""How long the thread waits for a connection before it looks whether it shall end."""


@dataclass(frozen=True)
class KeeperStatistics:
    """What is kept, and how many questions were answered and refused so far."""

    num_segments: int
    num_bytes: int
    num_answered: int
    num_refused: int


@dataclass(frozen=True)
class _Kept:
    descriptor: int
    num_bytes: int


class MemoryKeeper:
    """Keeps at most `max_segments` descriptors of `max_bytes` together, by name."""

    def __init__(
        self, address: str, *, max_segments: int, max_bytes: int, timeout_s: float = 5.0
    ) -> None:
        """Bind to `address` (`unix:@name`); `serve` answers.

        Raises AlreadyRunningError if somebody listens there, ConfigurationError.
        """
        require_count("max_segments", max_segments)
        require_count("max_bytes", max_bytes)
        self._max_segments = max_segments
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._num_answered = self._num_refused = 0
        self._thread: threading.Thread | None = None
        self._socket = make_socket(ACCEPT_S)
        try:
            self._socket.bind(socket_name(address))
            self._socket.listen(MAX_WAITING)
        except OSError as error:
            self._socket.close()
            raise AlreadyRunningError(
                f"no keeper can listen at {address} ({error.strerror}): end the one that is there, "
                "or use another name"
            ) from error

    def serve(self) -> None:
        """Start the thread that answers. May be called once."""
        self._thread = threading.Thread(target=self._run, name="kvcache-keeper", daemon=True)
        self._thread.start()

    def statistics(self) -> KeeperStatistics:
        """Return the figures, frozen."""
        with self._lock:
            return KeeperStatistics(
                len(self._kept), self._num_bytes(), self._num_answered, self._num_refused
            )

    def close(self) -> None:
        """Answer nothing more, and let go of everything. May be called again."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join(self._timeout_s + 2 * ACCEPT_S)
        self._socket.close()
        with self._lock:
            for kept in self._kept.values():
                os.close(kept.descriptor)
            self._kept.clear()

    # --- the thread

    def _run(self) -> None:
        while not self._is_closing.is_set():
            try:
                connected, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._is_closing.wait(ACCEPT_S):
                    return
                logger.error("the keeper cannot take a connection: %s", error)
                continue
            with connected:
                connected.settimeout(self._timeout_s)
                self._serve(connected)

    def _serve(self, connected: socket.socket) -> None:
        """Answer one question; nothing that the other end does may end the thread."""
        descriptor: int | None = None
        try:
            if not is_trusted(connected):
                raise MalformedMessageError("it comes from another user")
            values, descriptor = receive(connected)
            with self._lock:
                found = self._obey(values, descriptor)
                descriptor = None if values[0] == "put" else descriptor
                self._num_answered += 1
            send(connected, [True, ""], found)
        except (KVCacheError, OSError) as error:
            with self._lock:
                self._num_refused += 1
            logger.warning("the keeper refuses a question: %s", error)
            self._refuse(connected, str(error))
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @staticmethod
    def _refuse(connected: socket.socket, reason: str) -> None:
        try:
            send(connected, [False, reason[:MAX_NAME_BYTES]])
        except OSError:
            return

    def _obey(self, values: list[Any], descriptor: int | None) -> int | None:
        """Do what is asked; return the descriptor to hand over. Raises MalformedMessageError,
        nothing changed. Takes the descriptor over if it is kept."""
        if len(values) != 2 or values[0] not in VERBS or type(values[1]) is not str:
            raise MalformedMessageError("it is no question that a keeper knows")
        verb, name = values
        if len(name.encode()) > MAX_NAME_BYTES or (descriptor is None) != (verb != "put"):
            raise MalformedMessageError(f"{verb} of {name[:50]!r} cannot be meant so")
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

    def _admitted(self, name: str, descriptor: int, old: _Kept | None) -> _Kept:
        """Return what will be kept; raises MalformedMessageError when it must not be."""
        status = os.fstat(descriptor)
        num_bytes = self._num_bytes() - (0 if old is None else old.num_bytes) + status.st_size
        num_segments = len(self._kept) + (old is None)
        if not stat.S_ISREG(status.st_mode):
            raise MalformedMessageError(f"what is put under {name!r} is no memory")
        if num_segments > self._max_segments or num_bytes > self._max_bytes:
            raise MalformedMessageError(
                f"{name!r} would make it {num_segments} segments of {num_bytes} bytes, at most "
                f"{self._max_segments} of {self._max_bytes} are kept"
            )
        return _Kept(descriptor, status.st_size)

    def _num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self._kept.values())
