"""Cache events on their way out of a core: passed on, and kept where somebody wants to take them.

Numbers nothing; what is kept waits until it is taken. Refuses to let a sink's error into the core,
which tells of its blocks while it changes them.
"""

from __future__ import annotations

from kvcache.base.logs import CallbackErrors, get_logger
from kvcache.core import CacheEvent, EventSink

logger = get_logger(__name__)


class EventBuffer:
    """An `EventSink` that passes events on and can keep them."""

    def __init__(self, sink: EventSink | None, *, keeps_events: bool) -> None:
        """Pass events on to `sink`, if there is one, and keep them until taken if told so."""
        self._sink = sink
        self._kept: list[CacheEvent] | None = [] if keeps_events else None
        self._errors = CallbackErrors(logger, "the event sink")

    def emit(self, event: CacheEvent) -> None:
        """Take one event. A sink that raises has missed it, and nothing else happens."""
        if self._kept is not None:
            self._kept.append(event)
        if self._sink is not None:
            try:
                self._sink.emit(event)
            except Exception:
                self._errors.note(
                    f"it has missed {type(event).__name__}: mend it, and reset the cache or make "
                    "a new manager to begin again"
                )

    def take(self) -> list[CacheEvent]:
        """Return what was kept since the last time, and keep it no longer."""
        taken = self._kept or []
        if self._kept is not None:
            self._kept = []
        return taken
