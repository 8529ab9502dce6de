"""Add up cache events: rates, positions, prefixes, and whether the state equals the publisher's.

Used by `kvcache watch` and the dashboard. State machines, except `EventFollower`, which has the
socket and the clock. Prefixes
are blocks of group 0, by hash, each with its parent. They are shown by hash and length, never by
tokens. States are compared only at equal sequence numbers.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from actors.routing.event_endpoints import EventEndpoints, moved, subscribe
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.events.subscription import SubscriptionStatistics, Update
from kvcache.events.wire_events import ClearedEvent, RemovedEvent, StoredEvent, WireEvent

_KEPT_CHECKSUMS = 4096
_NUM_TOP = 5


@dataclass(frozen=True)
class PrefixRow:
    """The prefix that ends with block `block_hash`: its length, and how many blocks continue it."""

    block_hash: int
    num_blocks: int
    num_tokens: int
    num_children: int
    lora_name: str | None
    media: tuple[str, ...]


@dataclass(frozen=True)
class TopPrefixes:
    """The prefixes with the most continuations, the longest, and the most recently extended."""

    most_children: tuple[PrefixRow, ...]
    longest: tuple[PrefixRow, ...]
    newest: tuple[PrefixRow, ...]


@dataclass(frozen=True)
class Traffic:
    """Events of an interval, per second. Snapshots do not count."""

    batches: float
    events: float
    stored_blocks: float
    removed_blocks: float


@dataclass(frozen=True)
class EventLook:
    """The state at one moment.

    `publisher_seq`, `publisher_checksum` and hit rates are None if the coordinator is not asked;
    `is_same_state` is None until both checksums are known for one sequence number. Hit rates are
    hit tokens per token looked up, since the epoch began and in the last interval.
    """

    traffic: Traffic
    subscription: SubscriptionStatistics
    num_blocks: int
    publisher_seq: int | None
    publisher_checksum: int | None
    is_same_state: bool | None
    hit_rate: float | None
    recent_hit_rate: float | None
    top: TopPrefixes
    problem: str

    def as_json(self) -> dict[str, Any]:
        """Return plain values; hashes and checksums as 16 hexadecimal digits."""
        known = self.subscription
        return {
            "seq": known.last_seq,
            "is_exact": known.is_exact,
            "checksum": hex_digits(known.checksum),
            "publisher_seq": self.publisher_seq,
            "publisher_checksum": (
                None if self.publisher_checksum is None else hex_digits(self.publisher_checksum)
            ),
            "is_same_state": self.is_same_state,
            "per_second": asdict(self.traffic),
            "blocks": known.num_blocks,
            "num_different_blocks": self.num_blocks,
            "hit_rate": self.hit_rate,
            "recent_hit_rate": self.recent_hit_rate,
            "num_gaps": known.num_gaps,
            "num_missed_batches": known.num_missed_batches,
            "num_restatements": known.num_restatements,
            "num_restarts": known.num_restarts,
            "num_duplicates": known.num_duplicates,
            "num_malformed": known.num_malformed,
            "problem": self.problem or known.last_problem,
            "top": {
                sort: [{**row, "block_hash": hex_digits(row["block_hash"])} for row in rows]
                for sort, rows in asdict(self.top).items()
            },
        }


class EventTally:
    """Adds up the updates of a subscriber. Not thread-safe."""

    def __init__(self, now_s: float) -> None:
        """Begin the first interval at `now_s`, in seconds of any clock."""
        self._forest = PrefixForest()
        self._since_s = now_s
        self._num_batches = self._num_events = self._num_stored = self._num_removed = 0
        self._checksums: OrderedDict[int, int] = OrderedDict()
        self._asked_before: tuple[int, int] | None = None

    def take(self, update: Update) -> None:
        """Count one batch."""
        events = update.batch.events
        self._forest.follow(events)
        self._num_batches += 1
        if update.is_restatement:
            return
        self._num_events += len(events)
        for event in events:
            if isinstance(event, StoredEvent):
                self._num_stored += len(event.block_hashes)
            elif isinstance(event, RemovedEvent):
                self._num_removed += len(event.block_hashes)

    def note(self, seq: int | None, checksum: int) -> None:
        """Remember the state at a sequence number, to compare it with the publisher's later."""
        if seq is not None:
            self._checksums[seq] = checksum
            if len(self._checksums) > _KEPT_CHECKSUMS:
                self._checksums.popitem(last=False)

    def look(
        self,
        now_s: float,
        subscription: SubscriptionStatistics,
        statistics: CoordinatorStatistics | None,
        *,
        problem: str = "",
    ) -> EventLook:
        """Return the state at `now_s`, and begin the next interval."""
        told = (None if statistics is None else statistics.events) or {}
        seq, checksum = told.get("last_seq"), told.get("checksum")
        ours = None if seq is None else self._checksums.get(seq)
        total, recent = self._hit_rates(statistics)
        return EventLook(
            self._traffic(now_s),
            subscription,
            len(self._forest),
            seq,
            checksum,
            None if ours is None or checksum is None else ours == checksum,
            total,
            recent,
            self._forest.top(_NUM_TOP),
            problem,
        )

    def _traffic(self, now_s: float) -> Traffic:
        counts = (self._num_batches, self._num_events, self._num_stored, self._num_removed)
        self._num_batches = self._num_events = self._num_stored = self._num_removed = 0
        passed_s, self._since_s = now_s - self._since_s, now_s
        return Traffic(*(count / passed_s if passed_s > 0 else 0.0 for count in counts))

    def _hit_rates(self, statistics: CoordinatorStatistics | None) -> tuple[float | None, ...]:
        manager = None if statistics is None else statistics.manager
        if manager is None:
            return None, None
        asked, hit = manager.num_asked_tokens, manager.num_hit_tokens
        before, self._asked_before = self._asked_before, (asked, hit)
        if before is None or asked < before[0]:  # a new coordinator
            before = (0, 0)
        return _share(hit, asked), _share(hit - before[1], asked - before[0])


class EventFollower:
    """Follows a publisher, wherever it moves, and adds up its events. One thread uses it."""

    def __init__(self, endpoints: EventEndpoints) -> None:
        """Begin to follow. Raises ConfigurationError for invalid addresses."""
        self._endpoints = endpoints
        self._subscriber = subscribe(endpoints)
        self._tally = EventTally(time.monotonic())

    def receive(self, timeout_s: float) -> None:
        """Take what arrives; wait for it at most `timeout_s`."""
        for update in self._subscriber.poll(timeout_s):
            self._tally.take(update)
        self._tally.note(self._subscriber.last_seq, self._subscriber.checksum)

    def look(
        self, statistics: CoordinatorStatistics | None, host: str, *, problem: str = ""
    ) -> EventLook:
        """Return the present state, and begin the next interval. If the publisher on `host` has
        restarted at another address, follow it there; it sends a snapshot."""
        if statistics is not None:
            endpoints = moved(self._endpoints, statistics.events, host)
            if endpoints != self._endpoints:
                self._subscriber.close()
                self._subscriber, self._endpoints = subscribe(endpoints), endpoints
        known = self._subscriber.statistics()
        return self._tally.look(time.monotonic(), known, statistics, problem=problem)

    def close(self) -> None:
        """Stop following."""
        self._subscriber.close()


def hex_digits(value: int) -> str:
    """Return 64 bits as 16 hexadecimal digits."""
    return f"{value:016x}"


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass
class _Block:
    parent: int
    num_blocks: int
    num_tokens: int
    lora_name: str | None
    media: set[str]
    order: int


class PrefixForest:
    """Blocks and their children. Not thread-safe."""

    def __init__(self) -> None:
        """Begin without blocks."""
        self._blocks: dict[int, _Block] = {}
        self._children: dict[int, int] = {}
        """How many present blocks continue a block. The block itself may be gone."""
        self._order = 0

    def __len__(self) -> int:
        """Return the number of blocks; a block in several media counts once."""
        return len(self._blocks)

    def follow(self, events: Iterable[WireEvent]) -> None:
        """Apply events in order."""
        for event in events:
            if isinstance(event, ClearedEvent):
                self._blocks.clear()
                self._children.clear()
            elif event.group_idx:
                continue
            elif isinstance(event, StoredEvent):
                self._put(event)
            else:
                self._take(event)

    def top(self, count: int) -> TopPrefixes:
        """Return the first `count` prefixes of each order."""
        branching = [h for h, n in self._children.items() if n > 1 and h in self._blocks]
        ends = [h for h in self._blocks if not self._children.get(h)]
        blocks = self._blocks
        children = heapq.nlargest(
            count, branching, key=lambda h: (self._children[h], blocks[h].num_blocks, -h)
        )
        longest = heapq.nlargest(count, ends, key=lambda h: (blocks[h].num_blocks, -h))
        newest = heapq.nlargest(count, ends, key=lambda h: blocks[h].order)
        return TopPrefixes(*(tuple(map(self._row, found)) for found in (children, longest, newest)))

    def _put(self, event: StoredEvent) -> None:
        parent = event.parent_block_hash or 0
        for block_hash in event.block_hashes.tolist():
            block = self._blocks.get(block_hash)
            if block is None:
                above = self._blocks.get(parent)
                depth, tokens = (0, 0) if above is None else (above.num_blocks, above.num_tokens)
                self._order += 1
                self._blocks[block_hash] = _Block(
                    parent,
                    depth + 1,
                    tokens + event.block_size,
                    event.lora_name,
                    {event.medium},
                    self._order,
                )
                self._children[parent] = self._children.get(parent, 0) + 1
            else:
                block.media.add(event.medium)
            parent = block_hash

    def _take(self, event: RemovedEvent) -> None:
        for block_hash in event.block_hashes.tolist():
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            block.media.discard(event.medium)
            if block.media:
                continue
            del self._blocks[block_hash]
            left = self._children[block.parent] - 1
            if left:
                self._children[block.parent] = left
            else:
                del self._children[block.parent]

    def _row(self, block_hash: int) -> PrefixRow:
        block = self._blocks[block_hash]
        return PrefixRow(
            block_hash,
            block.num_blocks,
            block.num_tokens,
            self._children.get(block_hash, 0),
            block.lora_name,
            tuple(sorted(block.media)),
        )
