"""Cache events on their way out of a core: passed on, and kept where somebody wants to take them.

Refuses nothing and numbers nothing; what is kept waits until it is taken.
"""

from __future__ import annotations

from kvcache.core import CacheEvent, EventSink


class EventBuffer:
    """An `EventSink` that passes events on and can keep them."""

    def __init__(self, sink: EventSink | None, *, keeps_events: bool) -> None:
        """Pass events on to `sink`, if there is one, and keep them until taken if told so."""
        self._sink = sink
        self._kept: list[CacheEvent] | None = [] if keeps_events else None

    def emit(self, event: CacheEvent) -> None:
        """Take one event."""
        if self._sink is not None:
            self._sink.emit(event)
        if self._kept is not None:
            self._kept.append(event)

    def take(self) -> list[CacheEvent]:
        """Return what was kept since the last time, and keep it no longer."""
        taken = self._kept or []
        if self._kept is not None:
            self._kept = []
        return taken
