"""`kvcache watch` and `kvcache events dump`: cache events, live or as lines of JSON.

Both follow a running cluster, or the two addresses of a publisher, as a router does, and change
nothing. `watch` also asks the coordinator for its hit rate and for its publisher's state, in a
thread of its own, so that a silent coordinator does not delay events. `dump` begins with a snapshot
of the cache and leaves out only empty batches. Its fields are those of the wire, hashes as plain
integers.

`EventTally` and `PrefixForest` are state machines, `EventFollower` has the socket and the clock.
Prefixes are blocks of group 0, by hash, each with its parent. They are shown by hash and length,
never by tokens. States are compared only at equal sequence numbers.
"""

from __future__ import annotations

import heapq
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from actors.cli.clusters import open_cluster
from actors.cli.command import SecondsOption, command, facts_table
from kvcache.base.errors import ConfigurationError, DeadlineError, NotRunningError

if TYPE_CHECKING:
    from actors.routing.event_endpoints import EventEndpoints
    from kvcache.coordinator.settings import CoordinatorStatistics
    from kvcache.events.subscriber import KVEventSubscriber
    from kvcache.events.subscription import SubscriptionStatistics, Update
    from kvcache.events.wire_events import RemovedEvent, StoredEvent, WireEvent

_INTERVAL_S = 1.0
_ASK_S = 0.5
_STATE_S = 15.0
_POLL_S = 0.1
_KEPT_CHECKSUMS = 4096
_NUM_TOP = 5

ClusterArgument = Annotated[
    str | None, typer.Argument(help="Name of the cluster (default: the only running one).")
]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", help="Follow the publisher at this address.")
]
ReplayEndpointOption = Annotated[
    str | None,
    typer.Option(
        "--replay-endpoint", help="With --endpoint: the address that replays missed events."
    ),
]


@command
def watch(
    name: ClusterArgument = None,
    *,
    endpoint: EndpointOption = None,
    replay_endpoint: ReplayEndpointOption = None,
    seconds: SecondsOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON each second.")
    ] = False,
) -> None:
    """Follow a cache's events live: rates, blocks, prefixes, and whether any are missing."""
    with open_source(name, endpoint, replay_endpoint) as source:
        try:
            with _shower(source.title, as_json) as show, _Watch(source) as watching:
                watching.run(show, seconds)
        except KeyboardInterrupt:
            return


@command
def dump(
    name: ClusterArgument = None,
    *,
    endpoint: EndpointOption = None,
    replay_endpoint: ReplayEndpointOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new events.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-l", help="Stop after N events.", min=1)
    ] = None,
) -> None:
    """Print cache events as lines of JSON, first a snapshot; prompt tokens included."""
    from actors.routing.event_endpoints import subscribe

    with (
        open_source(name, endpoint, replay_endpoint) as source,
        subscribe(source.endpoints) as subscriber,
    ):
        try:
            for line in islice(_lines(_updates(subscriber, follow)), limit):
                print(line, flush=follow)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of the pipe has gone: flush nothing to it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyboardInterrupt:
            return


@dataclass(frozen=True)
class EventSource:
    """What to follow. `look` asks the coordinator for its statistics; None if only addresses are
    known. `host`: where the publisher runs."""

    title: str
    endpoints: EventEndpoints
    look: Callable[[], CoordinatorStatistics | None] | None = None
    host: str = ""


@contextmanager
def open_source(
    name: str | None, endpoint: str | None, replay_endpoint: str | None
) -> Iterator[EventSource]:
    """Yield the source; connect to Ray for a cluster.

    Raises ConfigurationError when the choices contradict each other or the cluster publishes no
    events, NotRunningError if no cluster runs or its coordinator cannot be asked.
    """
    from actors.routing.event_endpoints import EventEndpoints

    if endpoint is None and replay_endpoint is None:
        with _cluster_source(name) as source:
            yield source
    elif endpoint is None or replay_endpoint is None:
        raise ConfigurationError(
            "one address is missing: give --endpoint for the live stream and --replay-endpoint "
            "for missed events"
        )
    elif name is not None:
        raise ConfigurationError(
            f"{name} and --endpoint {endpoint}: give a cluster or addresses, not both"
        )
    else:
        yield EventSource(endpoint, EventEndpoints(endpoint, replay_endpoint))


@contextmanager
def _cluster_source(name: str | None) -> Iterator[EventSource]:
    from actors.routing.event_endpoints import cluster_endpoints, publisher_host

    with open_cluster(name, otherwise="pass --endpoint and --replay-endpoint") as cluster:
        yield EventSource(
            cluster.name,
            cluster_endpoints(cluster),
            cluster.coordinator_statistics,
            publisher_host(cluster),
        )


Show = Callable[["EventLook"], None]


class _Watch:
    """Follows a source, wherever its publisher moves."""

    def __init__(self, source: EventSource) -> None:
        from kvcache.base.serving_loop import ServingLoop

        self._source = source
        self._reader = ServingLoop("figure-reader", self._ask)
        self._coordinator: CoordinatorStatistics | None = None
        self._problem = ""
        self._follower = EventFollower(source.endpoints)

    def __enter__(self) -> _Watch:
        if self._source.look is not None:
            self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.stop()
        self._reader.join()
        self._follower.close()

    def run(self, show: Show, seconds: float | None) -> None:
        """Show the state once per interval, and once more after `seconds`."""
        now_s = time.monotonic()
        end_s = None if seconds is None else now_s + seconds
        next_s = now_s + _INTERVAL_S
        while True:
            self._follower.receive(_POLL_S)
            now_s = time.monotonic()
            is_over = end_s is not None and now_s >= end_s
            if is_over or now_s >= next_s:
                next_s = max(next_s + _INTERVAL_S, now_s)
                host, problem = self._source.host, self._problem
                show(self._follower.look(self._coordinator, host, problem=problem))
            if is_over:
                return

    def _ask(self) -> None:
        """Ask the coordinator once. Runs in its own thread."""
        assert self._source.look is not None
        try:
            self._coordinator, self._problem = self._source.look(), ""
        except (DeadlineError, NotRunningError) as error:
            self._problem = str(error)
        self._reader.pause(_ASK_S)


@contextmanager
def _shower(title: str, as_json: bool) -> Iterator[Show]:
    """Yield a function that shows the state, as a line of JSON or on the whole screen."""
    if as_json:
        yield lambda look: print(json.dumps(look.as_json()), flush=True)
        return
    from rich.live import Live

    with Live(Text(f"{title}: waiting for events"), auto_refresh=False) as live:
        yield lambda look: live.update(_screen(title, look), refresh=True)


def _screen(title: str, look: EventLook) -> Group:
    return Group(Text(title, style="italic"), facts_table(_facts(look)), _prefixes(look))


def _facts(look: EventLook) -> dict[str, str]:
    known, traffic = look.subscription, look.traffic
    blocks = ", ".join(f"{medium} {count:,}" for medium, count in sorted(known.num_blocks.items()))
    facts = {
        "position": f"{known.last_seq}, {'exact' if known.is_exact else 'something is missing'}",
        "state": _state(look),
        "events": f"{traffic.events:,.0f}/s in {traffic.batches:,.1f} batches/s",
        "blocks stored": f"{traffic.stored_blocks:,.0f}/s",
        "blocks removed": f"{traffic.removed_blocks:,.0f}/s",
        "blocks": f"{blocks or 'none'} ({look.num_blocks:,} different ones)",
        "gaps": f"{known.num_gaps:,}, {known.num_missed_batches:,} batches missed and asked for",
        "snapshots": f"{known.num_restatements:,} times, {known.num_restarts:,} other publishers",
    }
    if look.hit_rate is not None:
        now = "" if look.recent_hit_rate is None else f", {look.recent_hit_rate:.1%} just now"
        facts["hit rate"] = f"{look.hit_rate:.1%} of tokens{now}"
    if known.num_malformed:
        facts["malformed"] = f"{known.num_malformed:,}, the last: {known.last_problem}"
    if look.problem:
        facts["problem"] = look.problem
    return facts


def _state(look: EventLook) -> str:
    checksum = hex_digits(look.subscription.checksum)
    if look.publisher_checksum is None:
        return checksum
    if look.is_same_state is None:
        return f"{checksum}, the publisher is at {look.publisher_seq}"
    told = hex_digits(look.publisher_checksum)
    is_same = f"the publisher's at {look.publisher_seq} is {told}"
    return f"{checksum}, {'as the publisher says' if look.is_same_state else 'NOT: ' + is_same}"


def _prefixes(look: EventLook) -> Table:
    table = Table("prefixes", "last block", "blocks", "tokens", "continued by", "adapter", "in")
    for sort, rows in (
        ("most continued", look.top.most_children),
        ("longest", look.top.longest),
        ("newest", look.top.newest),
    ):
        for place, row in enumerate(rows):
            table.add_row("" if place else sort, *_cells(row))
    return table


def _cells(row: PrefixRow) -> tuple[str, ...]:
    return (
        hex_digits(row.block_hash),
        f"{row.num_blocks:,}",
        f"{row.num_tokens:,}",
        f"{row.num_children:,}",
        row.lora_name or "",
        ", ".join(row.media),
    )


def event_fields(seq: int, rank: int, time_s: float, event: WireEvent) -> dict[str, Any]:
    """Return one event as plain values: number and rank of its batch, then the wire's fields,
    optional ones only if they are set."""
    from kvcache.events.wire_events import RemovedEvent, StoredEvent

    fields: dict[str, Any] = {"seq": seq, "rank": rank, "time_s": time_s}
    optional: dict[str, Any] = {}
    if isinstance(event, StoredEvent):
        fields |= {
            "type": "BlockStored",
            "block_hashes": event.block_hashes.tolist(),
            "parent_block_hash": event.parent_block_hash,
            "token_ids": event.token_ids.tolist(),
            "block_size": event.block_size,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": event.lora_name,
        }
        optional = {
            "extra_keys": event.extra_keys or None,
            "group_idx": event.group_idx,
            "kv_cache_spec_kind": event.spec_kind,
            "kv_cache_spec_sliding_window": event.sliding_window,
            "cache_salt": event.cache_salt,
        }
    elif isinstance(event, RemovedEvent):
        fields |= {
            "type": "BlockRemoved",
            "block_hashes": event.block_hashes.tolist(),
            "medium": event.medium,
        }
        optional = {"group_idx": event.group_idx}
    else:
        fields["type"] = "AllBlocksCleared"
    return fields | {key: value for key, value in optional.items() if value is not None}


def _lines(updates: Iterator[Update]) -> Iterator[str]:
    for update in updates:
        batch = update.batch
        for event in batch.events:
            yield json.dumps(
                event_fields(update.seq, batch.data_parallel_rank, batch.time_s, event)
            )


def _updates(subscriber: KVEventSubscriber, follows: bool) -> Iterator[Update]:
    """Yield a snapshot, then new updates if `follows`."""
    give_up_s = time.monotonic() + _STATE_S
    while not (found := subscriber.poll(_POLL_S)):
        if time.monotonic() > give_up_s:
            raise DeadlineError(
                f"no snapshot arrived within {_STATE_S:g} s: check that the publisher runs and "
                "that both addresses are its own"
            )
    yield found[0]
    if not follows:
        return
    yield from found[1:]
    yield from subscriber


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
        from kvcache.events.wire_events import RemovedEvent, StoredEvent

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
        from actors.routing.event_endpoints import subscribe

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
        from actors.routing.event_endpoints import moved, subscribe

        if statistics is not None:
            endpoints = moved(self._endpoints, statistics.events, host)
            if endpoints != self._endpoints:
                self._subscriber.close()
                self._subscriber, self._endpoints = subscribe(endpoints), endpoints
        known = self._subscriber.statistics()
        return self._tally.look(time.monotonic(), known, statistics, problem=problem)

    def close(self) -> None:
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
        self._blocks: dict[int, _Block] = {}
        self._children: dict[int, int] = {}
        """How many present blocks continue a block. The block itself may be gone."""
        self._order = 0

    def __len__(self) -> int:
        """Return the number of blocks; a block in several media counts once."""
        return len(self._blocks)

    def follow(self, events: Iterable[WireEvent]) -> None:
        """Apply events in order."""
        from kvcache.events.wire_events import ClearedEvent, StoredEvent

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
