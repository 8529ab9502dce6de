"""`kvcache watch` and `kvcache events dump`: cache events, live or as lines of JSON.

Both follow a running cluster, or the two addresses of a publisher, as a router does, and change
nothing. `watch` also asks the coordinator for its hit rate and for its publisher's state, in a
thread of its own, so that a silent coordinator does not delay events. `dump` begins with a snapshot
of the cache and leaves out only empty batches. Its fields are those of the wire, hashes as plain
integers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from actors.cli.command import SecondsOption, command
from actors.cli.tables import facts_table
from kvcache.base.errors import ConfigurationError, DeadlineError, NotRunningError

if TYPE_CHECKING:
    from actors.cli.event_tally import EventLook, PrefixRow
    from actors.routing.event_endpoints import EventEndpoints
    from kvcache.coordinator.settings import CoordinatorStatistics
    from kvcache.events.subscriber import KVEventSubscriber
    from kvcache.events.subscription import Update
    from kvcache.events.wire_events import WireEvent

_INTERVAL_S = 1.0
_ASK_S = 0.5
_STATE_S = 15.0
_POLL_S = 0.1

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
    from actors.cli.clusters import open_cluster
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
        from actors.cli.event_tally import EventFollower
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
    from actors.cli.event_tally import hex_digits

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
    from actors.cli.event_tally import hex_digits

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
