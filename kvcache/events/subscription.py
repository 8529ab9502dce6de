"""Follows one publisher exactly: gaps, requests, and the state.

A state machine between a subscriber's sockets and its user, with time passed in. It takes frames
and returns updates, and says when to send a request. Between a gap and its answer it returns
nothing.

    live    95 96 97 ── 99 100        98 is missing: ask from 98 on, keep 99 and 100
    answer  98 99 100 end             or one batch with the whole state, under the newest number

A batch that begins with a clear has the whole state, and can be used at any time. A publisher that
restarts begins with one, under a higher number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvcache.base.arguments import (
    as_bool,
    as_int,
    as_number,
    as_text,
    as_tuple,
    check_fields,
    check_kind,
)
from kvcache.base.errors import ConfigurationError, MalformedMessageError
from kvcache.events.decoding import MAX_PAYLOAD_BYTES, decode_batch
from kvcache.events.mirror import CacheMirror
from kvcache.events.publisher import END_MARK, MAX_SEQUENCE, SEQUENCE
from kvcache.events.wire_events import EventBatch

ASK_FOR_ALL: Final = 0
"""The number to request when nothing is known: no publisher ever keeps it for long."""


@dataclass(frozen=True)
class SubscriptionSettings:
    """`reply_s`: how long an answer may take before the request is repeated. Batches after a gap
    are kept up to `max_kept_batches`; later ones are requested once more. A publisher that is
    silent for `silence_s` is asked whether anything was missed. `is_shared`: the addresses are
    those of a `StreamProxy`, and the topic is the whole topic of one of its publishers.

    Raises ConfigurationError for invalid limits.
    """

    reply_s: float = 2.0
    silence_s: float = 15.0
    max_kept_batches: int = 10_000
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    is_shared: bool = False

    def __post_init__(self) -> None:
        check_fields(self, as_number, "reply_s", "silence_s", above=0)
        check_fields(self, as_int, "max_kept_batches", "max_payload_bytes", at_least=1)
        check_fields(self, as_bool, "is_shared")


@dataclass(frozen=True, eq=False)
class Update:
    """A batch in order. `is_restatement`: it replaces the whole earlier state."""

    seq: int
    batch: EventBatch
    is_restatement: bool


@dataclass(frozen=True)
class SubscriptionStatistics:
    """Statistics of a subscription. `last_seq` is -1 and `is_exact` False before anything is known;
    `checksum` is that of the state at `last_seq`."""

    last_seq: int
    is_exact: bool
    checksum: int
    num_blocks: dict[str, int]
    num_batches: int
    num_gaps: int
    num_missed_batches: int
    num_requests: int
    num_restatements: int
    num_restarts: int
    num_duplicates: int
    num_malformed: int
    last_problem: str


class Subscription:
    """A subscriber's state of one publisher. One user, one thread."""

    def __init__(self, settings: SubscriptionSettings | None = None, now_s: float = 0.0) -> None:
        """Start without state, and request it at once."""
        self._settings = SubscriptionSettings() if settings is None else settings
        check_kind("settings", self._settings, SubscriptionSettings, ConfigurationError)
        now_s = as_number("now_s", now_s)
        self.mirror = CacheMirror()
        """The state at `last_seq`."""
        self.last_seq: int | None = None
        """Everything up to this number is in `mirror`; None before anything is known."""
        self._kept: dict[int, bytes] = {}
        self._last_live_seq: int | None = None
        self._newest_seq = -1
        self._heard_s = now_s
        self._ask_at_s: float | None = now_s
        self._num_batches = 0
        self._num_gaps = 0
        self._num_missed = 0
        self._num_requests = 0
        self._num_restatements = 0
        self._num_restarts = 0
        self._num_duplicates = 0
        self._num_malformed = 0
        self._problem = ""

    @property
    def is_exact(self) -> bool:
        """Whether nothing is known to be missing."""
        return self.last_seq is not None and self.last_seq >= self._newest_seq

    def on_live(self, frames: Sequence[bytes], now_s: float) -> list[Update]:
        """Take a message of the live stream, `[topic, number, payload]`."""
        frames = as_tuple("frames", frames, kind=bytes)
        self._heard_s = now_s = as_number("now_s", now_s)
        if len(frames) != 3 or len(frames[1]) != SEQUENCE.size:
            self._on_malformed(f"a live message of {len(frames)} frames")
            return []
        (seq,) = SEQUENCE.unpack(frames[1])
        if seq > MAX_SEQUENCE:
            self._on_malformed(f"a live message of number {seq}")
            return []
        if self._last_live_seq is not None and seq <= self._last_live_seq:
            # The stream itself never goes back: this is another publisher, which does not know the
            # earlier numbers.
            self._num_restarts += 1
            self._forget()
        self._last_live_seq = seq
        return self._take(seq, frames[2], now_s)

    def on_reply(self, frames: Sequence[bytes], now_s: float) -> list[Update]:
        """Take a message of an answer, `["", topic, number, payload]`, or its end mark."""
        frames = as_tuple("frames", frames, kind=bytes)
        self._heard_s = now_s = as_number("now_s", now_s)
        if len(frames) != 4 or len(frames[2]) != SEQUENCE.size:
            self._on_malformed(f"an answer of {len(frames)} frames")
            return []
        if frames[2] == END_MARK:
            # If the answer did not help, ask again, but not at once.
            self._ask_at_s = None if self.is_exact else now_s + self._settings.reply_s
            return []
        (seq,) = SEQUENCE.unpack(frames[2])
        if seq > MAX_SEQUENCE:
            self._on_malformed(f"an answer of number {seq}")
            return []
        return self._take(seq, frames[3], now_s)

    def start_over(self, problem: str, now_s: float) -> None:
        """Forget everything and request it again, because of `problem` with a message."""
        problem, now_s = as_text("problem", problem, may_be_empty=True), as_number("now_s", now_s)
        self._on_malformed(problem)
        self._forget()
        self._last_live_seq = None
        self._ask(now_s)

    def request(self, now_s: float) -> bytes | None:
        """Return the request to send now, as the number's frame; None if there is none.

        Repeats it until an answer has closed the gap, and after long silence.
        """
        now_s = as_number("now_s", now_s)
        if now_s - self._heard_s >= self._settings.silence_s and self._ask_at_s is None:
            self._ask_at_s = now_s
        if self._ask_at_s is None or now_s < self._ask_at_s:
            return None
        self._ask_at_s = now_s + self._settings.reply_s
        self._num_requests += 1
        return SEQUENCE.pack(ASK_FOR_ALL if self.last_seq is None else self.last_seq + 1)

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(
            -1 if self.last_seq is None else self.last_seq,
            self.is_exact,
            self.mirror.checksum,
            self.mirror.num_blocks(),
            self._num_batches,
            self._num_gaps,
            self._num_missed,
            self._num_requests,
            self._num_restatements,
            self._num_restarts,
            self._num_duplicates,
            self._num_malformed,
            self._problem,
        )

    def _take(self, seq: int, payload: bytes, now_s: float) -> list[Update]:
        """Take a batch from stream or answer; return the updates that are now in order."""
        self._newest_seq = max(self._newest_seq, seq)
        if self.last_seq is not None and seq <= self.last_seq:
            self._num_duplicates += 1
            return []
        is_next = self.last_seq is not None and seq == self.last_seq + 1
        try:
            batch = decode_batch(payload, self._settings.max_payload_bytes)
        except MalformedMessageError as error:
            self._on_malformed(str(error))
            self._ask(now_s)
            return []
        if not is_next and not batch.is_restatement:
            self._keep(seq, payload, now_s)
            return []
        found = [self._apply(seq, batch)]
        self._kept = {number: kept for number, kept in self._kept.items() if number > seq}
        while self.last_seq is not None and self.last_seq + 1 in self._kept:
            following = self.last_seq + 1
            kept = decode_batch(self._kept.pop(following), self._settings.max_payload_bytes)
            found.append(self._apply(following, kept))
        if self.is_exact:
            self._ask_at_s = None
        else:
            self._ask(now_s)
        return found

    def _apply(self, seq: int, batch: EventBatch) -> Update:
        self.mirror.apply(batch.events)
        self.last_seq = seq
        self._num_batches += 1
        self._num_restatements += batch.is_restatement
        return Update(seq, batch, batch.is_restatement)

    def _keep(self, seq: int, payload: bytes, now_s: float) -> None:
        """Keep a batch after a gap until that is closed."""
        if not self._kept and self.last_seq is not None:
            self._num_gaps += 1
            self._num_missed += seq - self.last_seq - 1
        if len(self._kept) >= self._settings.max_kept_batches:
            self._kept.clear()
        self._kept[seq] = payload
        self._ask(now_s)

    def _ask(self, now_s: float) -> None:
        if self._ask_at_s is None:
            self._ask_at_s = now_s

    def _forget(self) -> None:
        self.last_seq = None
        self._newest_seq = -1
        self._kept.clear()
        self.mirror = CacheMirror()

    def _on_malformed(self, problem: str) -> None:
        self._num_malformed += 1
        self._problem = problem
