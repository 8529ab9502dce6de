"""Kills or stops its own process at a chosen message, with a real signal.

Each received payload counts once, each sent one twice, before and after. A payload for two ranks is
sent to one after the other, so that it may reach only one of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from actors.transport import Inbound
from kvcache.protocol.messages import Address


class FaultTrigger:
    """Sends the signal once, at the `count`th event. `count` 0: never."""

    def __init__(self, count: int, signal_number: int) -> None:
        self._left = count
        self._signal = signal_number

    @classmethod
    def of(cls, spec: dict[str, Any] | None) -> FaultTrigger:
        """Return the requested trigger."""
        return cls(0, 0) if spec is None else cls(spec["count"], signal.Signals[spec["signal"]])

    def count_event(self) -> None:
        """Count an event; send the signal if it is the chosen one."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._signal)


class FaultyPeer:
    """A `PeerTransport` with a trigger."""

    def __init__(self, inner: Any, trigger: FaultTrigger) -> None:
        self._inner = inner
        self._trigger = trigger

    def send(self, payload: bytes) -> None:
        """Send, unless the trigger fires before."""
        self._trigger.count_event()
        self._inner.send(payload)
        self._trigger.count_event()

    def receive(self, timeout_s: float) -> list[bytes]:
        """Receive."""
        return self._count(self._inner.receive(timeout_s))

    def receive_or_wake(self, timeout_s: float) -> list[bytes]:
        """Receive."""
        return self._count(self._inner.receive_or_wake(timeout_s))

    def _count(self, payloads: list[bytes]) -> list[bytes]:
        for _ in payloads:
            self._trigger.count_event()
        return payloads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FaultyServer:
    """A `ServerTransport` with a trigger."""

    def __init__(self, inner: Any, trigger: FaultTrigger) -> None:
        self._inner = inner
        self._trigger = trigger

    def send(self, addresses: Sequence[Address], *payloads: bytes) -> None:
        """Send to one after the other."""
        for address in addresses:
            self._trigger.count_event()
            self._inner.send((address,), *payloads)
            self._trigger.count_event()

    def receive(self, timeout_s: float) -> list[Inbound]:
        """Receive."""
        arrived: list[Inbound] = self._inner.receive(timeout_s)
        for _ in arrived:
            self._trigger.count_event()
        return arrived

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
