"""The publisher of one cache: numbers, payloads, the last batches, and the state.

A state machine between the coordinator's feed and the sockets: it takes events and requests, and
returns the frames to send. An invalid request is counted; a client that asks for a batch that is
gone gets the whole state instead.

    events ──▶ translate ──▶ state ──▶ encode ──▶ [topic, number, payload] ──▶ all subscribers
                               └──▶ snapshot ──▶ late subscribers, or those that missed too much
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from struct import Struct
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
from kvcache.base.errors import ConfigurationError
from kvcache.config.events import EventsConfig
from kvcache.core import CacheEvent
from kvcache.events.codec import Encoding, EventCodec, require_encoding
from kvcache.events.published_state import PublishedState
from kvcache.events.translation import (
    EventTranslator,
    GroupKind,
    PublishedGroups,
    drop_void_removals,
    join_removals,
    require_published_groups,
)
from kvcache.events.wire_events import MAX_RANK, StoredEvent, WireEvent


class BatchHistory:
    """Payloads of consecutive numbers, always including the newest."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        """Keep at most `max_batches` payloads of `max_bytes` together, and always the newest."""
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self._next_seq = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def oldest_seq(self) -> int:
        """The lowest number that is kept; the next one to come if there is none."""
        return self._next_seq - len(self._payloads)

    def append(self, seq: int, payload: bytes) -> None:
        """Add a payload; one that does not follow the last begins a new history."""
        if seq != self._next_seq:
            self._payloads.clear()
            self.num_bytes = 0
        self._payloads.append(payload)
        self.num_bytes += len(payload)
        self._next_seq = seq + 1
        while len(self) > 1 and (len(self) > self._max_batches or self.num_bytes > self._max_bytes):
            self.num_bytes -= len(self._payloads.popleft())

    def since(self, seq: int) -> list[tuple[int, bytes]] | None:
        """Return all payloads from number `seq` on, None if one of them is gone."""
        first = self.oldest_seq
        if not first <= seq <= self._next_seq:
            return None
        return list(enumerate(islice(self._payloads, seq - first, None), start=seq))


SEQUENCE: Final = Struct(">Q")
END_MARK: Final = b"\xff" * SEQUENCE.size
"""The number that ends the answer to a request."""

MAX_SEQUENCE: Final = 2**63 - 1

Frames = list[bytes]


@dataclass(frozen=True)
class PublisherSettings:
    """What a publisher sends, and how much of it is kept.

    `heartbeat_s`: an empty batch follows this much silence. `history_batches` and `history_bytes`
    bound the batches that can be requested again. `one_block_per_event` is for consumers that use
    the parent of an event for all its blocks.

    Raises ConfigurationError for invalid limits.
    """

    topic: str
    data_parallel_rank: int = 0
    encoding: Encoding = "map"
    publish_groups: PublishedGroups = "usable"
    one_block_per_event: bool = False
    heartbeat_s: float = 5.0
    history_batches: int = 10_000
    history_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        check_fields(self, as_text, "topic", may_be_empty=True)
        check_fields(self, as_int, "data_parallel_rank", at_most=MAX_RANK)
        require_encoding(self.encoding)
        require_published_groups(self.publish_groups)
        check_fields(self, as_bool, "one_block_per_event")
        check_fields(self, as_number, "heartbeat_s", above=0)
        check_fields(self, as_int, "history_batches", "history_bytes", at_least=1)

    @classmethod
    def of(cls, events: EventsConfig, topic: str) -> PublisherSettings:
        """Return the settings of a configuration's section; `topic` is used if it has none."""
        return cls(
            topic=events.topic or topic,
            data_parallel_rank=events.data_parallel_rank,
            encoding=events.encoding,
            publish_groups=events.publish_groups,
            one_block_per_event=events.publish_one_block_per_event,
            heartbeat_s=events.heartbeat_s,
            history_batches=events.history_batches,
            history_bytes=events.history_bytes,
        )


@dataclass(frozen=True)
class PublisherStatistics:
    """Statistics of a publisher. `last_seq` is the newest number, -1 before the first; `checksum`
    that of the state, `num_blocks` the number of blocks in each medium, and `num_orphans` that of
    blocks which wait for their parent and are not in the state."""

    last_seq: int = -1
    checksum: int = 0
    num_blocks: dict[str, int] = field(default_factory=dict)
    num_orphans: dict[str, int] = field(default_factory=dict)
    num_batches: int = 0
    num_events: int = 0
    num_heartbeats: int = 0
    num_replays: int = 0
    num_snapshots: int = 0
    num_malformed_requests: int = 0
    num_unknown_removals: int = 0
    history_batches: int = 0
    history_bytes: int = 0


class EventPublisher:
    """Publishes one cache. Numbers are contiguous, except where an epoch begins."""

    def __init__(self, settings: PublisherSettings, kinds: Sequence[GroupKind]) -> None:
        """Publish the events of groups of these `kinds`, by index; `begin` sets the first number.

        Raises:
            ConfigurationError: invalid settings or kinds.
        """
        check_kind("settings", settings, PublisherSettings, ConfigurationError)
        kinds = as_tuple("kinds", kinds, ConfigurationError, GroupKind)
        self.settings = settings
        self._translator = EventTranslator(kinds, publish_groups=settings.publish_groups)
        self._codec = EventCodec(
            (), data_parallel_rank=settings.data_parallel_rank, encoding=settings.encoding
        )
        self._topic = settings.topic.encode()
        self._state = PublishedState()
        self._history = BatchHistory(settings.history_batches, settings.history_bytes)
        self._next_seq = 0
        self._snapshot: tuple[int, bytes] | None = None
        self._num_batches = 0
        self._num_events = 0
        self._num_heartbeats = 0
        self._num_replays = 0
        self._num_snapshots = 0
        self._num_malformed = 0

    @property
    def last_seq(self) -> int:
        """The newest published number, one less than the first before any."""
        return self._next_seq - 1

    def begin(self, first_seq: int, time_s: float, state: Sequence[CacheEvent]) -> Frames:
        """Begin an epoch: numbers continue at `first_seq`, or at the next one if that is higher.

        `state` is the whole state; the batch clears everything before it.

        Raises:
            InvalidInputError, ConfigurationError: as `publish`; nothing is published.
        """
        first_seq = as_int("first_seq", first_seq, at_most=2**64 - 1)
        time_s = as_number("time_s", time_s)
        events = [e for e in self._translator.translate(state) if isinstance(e, StoredEvent)]
        self._next_seq = _require_number(max(self._next_seq, first_seq))
        self._state = PublishedState()
        self._state.apply(events)
        return self._send(time_s, self._state.mirror.state())

    def publish(self, time_s: float, events: Sequence[CacheEvent]) -> Frames:
        """Publish events of `time_s` (seconds since 1970); return the frames.

        Empty if routers get none of the events. Removals of one step are merged. A block whose
        parent is in no medium is published when the parent is.

        Raises:
            InvalidInputError: an event of an unknown group or medium, or whose tokens do not fill
                its blocks; nothing is published.
            ConfigurationError: there is no number left; nothing is published.
        """
        time_s = as_number("time_s", time_s)
        translated = drop_void_removals(self._translator.translate(events))
        if translated:
            _require_number(self._next_seq)
        told = join_removals(self._state.apply(translated))
        return self._send(time_s, told) if told else []

    def heartbeat(self, time_s: float) -> Frames:
        """Publish a batch without events."""
        time_s = as_number("time_s", time_s)
        self._num_heartbeats += 1
        return self._send(time_s, ())

    def answer(self, request: Sequence[bytes], time_s: float) -> list[Frames]:
        """Return the messages that answer a request: `[id, "", number]` or `[id, number]`.

        The batches from that number on, or one batch with the whole state, and an end mark. An
        invalid request is counted and not answered.
        """
        request, time_s = as_tuple("request", request, kind=bytes), as_number("time_s", time_s)
        is_request = len(request) == 2 or (len(request) == 3 and not request[1])
        if not is_request or len(request[-1]) != SEQUENCE.size:
            self._num_malformed += 1
            return []
        client = bytes(request[0])
        (seq,) = SEQUENCE.unpack(request[-1])
        held = self._history.since(seq)
        if held is None and self._num_batches:
            self._num_snapshots += 1
            held = [self._state_at(time_s)]
        else:
            self._num_replays += 1
        found = [[client, b"", self._topic, SEQUENCE.pack(s), p] for s, p in held or ()]
        return [*found, [client, b"", b"", END_MARK, b""]]

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics(
            self.last_seq if self._num_batches else -1,
            self._state.mirror.checksum,
            self._state.mirror.num_blocks(),
            self._state.orphans.num_blocks(),
            self._num_batches,
            self._num_events,
            self._num_heartbeats,
            self._num_replays,
            self._num_snapshots,
            self._num_malformed,
            self._state.mirror.num_unknown_removals,
            len(self._history),
            self._history.num_bytes,
        )

    def _send(self, time_s: float, events: Sequence[WireEvent]) -> Frames:
        payload = self._encode(time_s, events)
        seq = _require_number(self._next_seq)
        self._history.append(seq, payload)
        self._next_seq += 1
        self._num_batches += 1
        self._num_events += len(events)
        return [self._topic, SEQUENCE.pack(seq), payload]

    def _state_at(self, time_s: float) -> tuple[int, bytes]:
        """Return a batch with the whole state, under the newest number."""
        if self._snapshot is None or self._snapshot[0] != self.last_seq:
            self._snapshot = self.last_seq, self._encode(time_s, self._state.mirror.state())
        return self._snapshot

    def _encode(self, time_s: float, events: Sequence[WireEvent]) -> bytes:
        if self.settings.one_block_per_event:
            events = [part for event in events for part in _parts(event)]
        return self._codec.encode_wire(time_s, events)


def _require_number(seq: int) -> int:
    if seq > MAX_SEQUENCE:
        raise ConfigurationError(
            f"event number {seq} is beyond {MAX_SEQUENCE}, the last that routers can read: "
            "remove the small state to start over, and restart the routers"
        )
    return seq


def _parts(event: WireEvent) -> list[WireEvent]:
    if isinstance(event, StoredEvent):
        return [event.part(i, i + 1) for i in range(len(event.block_hashes))]
    return [event]
