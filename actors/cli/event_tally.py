"""What a stretch of cache events comes to: rates, positions, and whether the state is the same.

Between a subscriber and what `kvcache watch` shows. A state machine on a clock that others tell.
Refuses to show anything, and to compare states of different numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

from actors.cli.prefix_forest import PrefixForest, TopPrefixes
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.events.subscription import SubscriptionStatistics, Update
from kvcache.events.wire_events import RemovedEvent, StoredEvent

_KEPT_CHECKSUMS = 4096


@dataclass(frozen=True)
class Traffic:
    """What came within a stretch of time, per second. Snapshots do not count."""

    batches: float
    events: float
    stored_blocks: float
    removed_blocks: float


@dataclass(frozen=True)
class Look:
    """What there is to see at one moment.

    `publisher_seq`, `publisher_checksum` and hit rates are None where the coordinator is not asked;
    `is_same_state` is None until a checksum of the same number is known from both. Hit rates are
    tokens found per token asked for, since the epoch began and within the last stretch.
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
    """Adds up what a subscriber passes on. One owner, one thread."""

    def __init__(self, now_s: float) -> None:
        """Begin the first stretch at `now_s`, in seconds of any clock."""
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
        """Remember the state at a number, for when the publisher says what it was there."""
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
        num_top: int = 5,
    ) -> Look:
        """Return what there is to see at `now_s`, and begin the next stretch."""
        told = (None if statistics is None else statistics.events) or {}
        seq, checksum = told.get("last_seq"), told.get("checksum")
        ours = None if seq is None else self._checksums.get(seq)
        total, recent = self._hit_rates(statistics)
        return Look(
            self._traffic(now_s),
            subscription,
            len(self._forest),
            seq,
            checksum,
            None if ours is None or checksum is None else ours == checksum,
            total,
            recent,
            self._forest.top(num_top),
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
        if before is None or asked < before[0]:  # a coordinator that has just begun
            before = (0, 0)
        return _share(hit, asked), _share(hit - before[1], asked - before[0])


def hex_digits(value: int) -> str:
    """Return 64 bits as 16 hexadecimal digits."""
    return f"{value:016x}"


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
