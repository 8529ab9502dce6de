"""Ends or stops its own process at a message that was chosen before: real signals, exact places.

Every payload that a party takes or sends is counted, the sent ones before and after; what goes to
two ranks at once is sent to one after the other, so that it may reach one of them only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from actors.transport import Inbound
from kvcache.messages import Address


class Trap:
    """Springs once, when `count` things have happened. `count` 0: never."""

    def __init__(self, count: int, signal_number: int) -> None:
        self._left = count
        self._signal = signal_number

    @classmethod
    def of(cls, spec: dict[str, Any] | None) -> Trap:
        """Return the trap that was asked for."""
        return cls(0, 0) if spec is None else cls(spec["count"], signal.Signals[spec["signal"]])

    def step_on(self) -> None:
        """Something happens."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._signal)


class TrappedPeer:
    """A `PeerTransport` with a trap."""

    def __init__(self, inner: Any, trap: Trap) -> None:
        self._inner = inner
        self._trap = trap

    def send(self, payload: bytes) -> None:
        """Send, unless the trap springs before."""
        self._trap.step_on()
        self._inner.send(payload)
        self._trap.step_on()

    def receive(self, timeout_s: float) -> list[bytes]:
        """Receive."""
        return self._count(self._inner.receive(timeout_s))

    def receive_or_wake(self, timeout_s: float) -> list[bytes]:
        """Receive."""
        return self._count(self._inner.receive_or_wake(timeout_s))

    def _count(self, payloads: list[bytes]) -> list[bytes]:
        for _ in payloads:
            self._trap.step_on()
        return payloads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TrappedServer:
    """A `ServerTransport` with a trap."""

    def __init__(self, inner: Any, trap: Trap) -> None:
        self._inner = inner
        self._trap = trap

    def send(self, addresses: Sequence[Address], *payloads: bytes) -> None:
        """Send to one after the other."""
        for address in addresses:
            self._trap.step_on()
            self._inner.send((address,), *payloads)
            self._trap.step_on()

    def receive(self, timeout_s: float) -> list[Inbound]:
        """Receive."""
        arrived: list[Inbound] = self._inner.receive(timeout_s)
        for _ in arrived:
            self._trap.step_on()
        return arrived

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
