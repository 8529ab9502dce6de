"""A source's side of the index: what it must say next. A state machine, without a socket.

One message is under way at a time. It is repeated until the index has taken it; if the index does
not know the source, everything is said again. So the index is exact soon after it, or the source,
was restarted. Between changes an empty message says that the source lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvcache.sharing.messages import MAX_KEYS, Holding, Taken

REPEAT_S = 0.5
HEARTBEAT_S = 1.0


class IndexUpdates:
    """The messages about one source's blocks. `held` is the live collection of its keys."""

    def __init__(
        self,
        source: bytes,
        memory: bytes,
        endpoint: str,
        held: Collection[bytes],
        stream: tuple[str, str, str] = ("", "", ""),
    ) -> None:
        """Have everything that is held said first. `stream`: topic and endpoints of its events."""
        self._source, self._memory, self._endpoint = source, memory, endpoint
        self._stream = stream
        self._held = held
        self._seq = 0
        self._unsaid: dict[bytes, None] = {}
        self._open: Holding | None = None
        self._said_s = 0.0
        self._is_first = True

    @property
    def is_known(self) -> bool:
        """Whether the index has taken all that has changed."""
        return self._open is None and not self._unsaid and not self._is_first

    def changed(self, keys: Iterable[bytes]) -> None:
        """Have it said whether these keys are held now."""
        if not self._is_first:
            self._unsaid.update(dict.fromkeys(keys))

    def next(self, now_s: float) -> Holding | None:
        """Return what to send now, if anything."""
        if self._open is not None:
            if now_s < self._said_s + REPEAT_S:
                return None
        elif self._is_first or self._unsaid or now_s >= self._said_s + HEARTBEAT_S:
            self._open = self._new()
        if self._open is not None:
            self._said_s = now_s
        return self._open

    def taken(self, answer: Taken) -> None:
        """Take the index's answer."""
        if self._open is None or (answer.source, answer.seq) != (self._source, self._open.seq):
            return
        self._open = None
        if not answer.is_known:
            self._is_first = True

    def _new(self) -> Holding:
        self._seq += 1
        is_first, self._is_first = self._is_first, False
        if is_first:
            self._unsaid = dict.fromkeys(self._held)
        part = list(self._unsaid)[:MAX_KEYS] if len(self._unsaid) > MAX_KEYS else self._unsaid
        added = b"".join([key for key in part if key in self._held])
        removed = b"".join([key for key in part if key not in self._held])
        if part is self._unsaid:
            self._unsaid = {}
        else:
            for key in part:
                del self._unsaid[key]
        return Holding(
            self._source,
            self._memory,
            self._endpoint,
            self._seq,
            is_first,
            added,
            removed,
            *self._stream,
        )
