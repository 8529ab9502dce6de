"""A source's side of the index: what it must say next. A state machine, without a socket.

One message is under way at a time. It is repeated until the index has taken it; if the index does
not know the source, everything is said again. So the index is exact soon after it, or the source,
was restarted. Between changes an empty message says that the source lives. The index answers which
blocks are copies of what other sources hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvcache.sharing.messages import (
    KEY_BYTES,
    MAX_KEYS,
    MAX_ORIGINALS,
    Holding,
    Taken,
    split,
    unpack_bits,
)

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
        *,
        last_seq: int = 0,
    ) -> None:
        """Have everything that is held said first. `stream`: topic and endpoints of its events. A
        `last_seq` above that of the source's last process has the index forget what that held."""
        self._source, self._memory, self._endpoint = source, memory, endpoint
        self._stream = stream
        self._held = held
        self._seq = last_seq
        self._unsaid: dict[bytes, None] = {}
        self._open: Holding | None = None
        self._answer = Taken(source, last_seq, True)
        self._said_s = 0.0
        self._is_first = True
        self._is_refused = self._has_more = False
        self.beliefs: dict[bytes, bool] = {}
        """Which held keys the index says are copies, and which are not: what it said last, and the
        caller has not taken out."""

    @property
    def is_known(self) -> bool:
        """Whether the index has taken all that has changed."""
        return self._open is None and not self._unsaid and not self._is_first

    def changed(self, keys: Iterable[bytes]) -> None:
        """Have it said whether these keys are held now."""
        keys = list(keys)
        if not self._is_first:
            self._unsaid.update(dict.fromkeys(keys))
        for key in keys if self.beliefs else ():
            if key not in self._held:
                self.beliefs.pop(key, None)

    def next(self, now_s: float) -> Holding | None:
        """Return what to send now, if anything."""
        if (self._open is not None or self._is_refused) and now_s < self._said_s + REPEAT_S:
            return None
        if self._open is None:
            is_due = self._has_more or now_s >= self._said_s + HEARTBEAT_S
            if self._is_first or self._unsaid or is_due:
                self._open = self._new()
        if self._open is not None:
            self._said_s = now_s
        return self._open

    def taken(self, answer: Taken) -> None:
        """Take the index's answer."""
        if (answer.source, answer.seq) == (self._source, self._answer.seq):
            # The message came twice: if the answers differ, to an index without its past.
            self._is_first = self._is_first or answer != self._answer
        if self._open is None or (answer.source, answer.seq) != (self._source, self._open.seq):
            return
        self._answer = answer
        opened, self._open = self._open, None
        self._is_refused = opened.is_first and not answer.is_known
        if not answer.is_known:
            self._is_first = True
            return
        self._has_more = len(answer.originals) == MAX_ORIGINALS * KEY_BYTES
        keys = split(opened.added)
        told = dict(zip(keys, unpack_bits(answer.copies, len(keys)), strict=True))
        told.update(dict.fromkeys(split(answer.originals), False))
        for key, is_copy in told.items():
            if key in self._held:
                self.beliefs[key] = is_copy

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
