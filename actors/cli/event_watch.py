"""`kvcache watch`: what a cache's events say, live, and whether they say all.

A subscriber like any router's, followed until Ctrl-C; a cluster's coordinator is asked as well,
for its hit rate and for the state that its publisher has. Refuses to change anything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from actors.cli.event_source import EventSource, SourceChoice, StatisticsReader, open_source
from actors.cli.event_tally import EventTally, Look, hex_digits
from actors.cli.prefix_forest import PrefixRow
from actors.event_endpoints import EventEndpoints, moved, subscribe

_INTERVAL_S = 1.0
_POLL_S = 0.1

Show = Callable[[Look], None]


def watch_events(choice: SourceChoice, as_json: bool, seconds: float | None) -> None:
    """Show what a cache's events say once a second, for `seconds` or until Ctrl-C.

    Raises what `open_source` raises, ConfigurationError for addresses that are none.
    """
    with open_source(choice) as source:
        try:
            with _shower(source.title, as_json) as show, _Watch(source) as watch:
                watch.run(show, seconds)
        except KeyboardInterrupt:
            return


class _Watch:
    """Follows a source, wherever its publisher moves."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._reader = StatisticsReader(source.look)
        self._subscriber = subscribe(source.endpoints)
        self._endpoints = source.endpoints
        self._tally = EventTally(time.monotonic())

    def __enter__(self) -> _Watch:
        self._reader.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(None, None, None)
        self._subscriber.close()

    def run(self, show: Show, seconds: float | None) -> None:
        """Show a look once per interval, and a last one when `seconds` are over."""
        now_s = time.monotonic()
        end_s = None if seconds is None else now_s + seconds
        next_s = now_s + _INTERVAL_S
        while True:
            for update in self._subscriber.poll(_POLL_S):
                self._tally.take(update)
            self._tally.note(self._subscriber.last_seq, self._subscriber.checksum)
            now_s = time.monotonic()
            is_over = end_s is not None and now_s >= end_s
            if is_over or now_s >= next_s:
                next_s = max(next_s + _INTERVAL_S, now_s)
                show(self._look(now_s))
            if is_over:
                return

    def _look(self, now_s: float) -> Look:
        coordinator = self._reader.newest
        if coordinator is not None:
            self._follow_to(moved(self._endpoints, coordinator.events, self._source.host))
        statistics = self._subscriber.statistics()
        return self._tally.look(now_s, statistics, coordinator, problem=self._reader.problem)

    def _follow_to(self, endpoints: EventEndpoints) -> None:
        """Follow a publisher that started again elsewhere: it sends a snapshot."""
        if endpoints != self._endpoints:
            self._subscriber.close()
            self._subscriber = subscribe(endpoints)
            self._endpoints = endpoints


@contextmanager
def _shower(title: str, as_json: bool) -> Iterator[Show]:
    """Yield what shows a look: a line of JSON, or the whole screen."""
    if as_json:
        yield lambda look: print(json.dumps(look.as_json()), flush=True)
        return
    with Live(Text(f"{title}: waiting for events"), auto_refresh=False) as live:
        yield lambda look: live.update(_screen(title, look), refresh=True)


def _screen(title: str, look: Look) -> Group:
    facts = Table(show_header=False)
    facts.add_column(style="bold")
    facts.add_column()
    for name, value in _facts(look).items():
        facts.add_row(name, value)
    return Group(Text(title, style="italic"), facts, _prefixes(look))


def _facts(look: Look) -> dict[str, str]:
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


def _state(look: Look) -> str:
    checksum = hex_digits(look.subscription.checksum)
    if look.publisher_checksum is None:
        return checksum
    if look.is_same_state is None:
        return f"{checksum}, the publisher is at {look.publisher_seq}"
    told = hex_digits(look.publisher_checksum)
    is_same = f"the publisher's at {look.publisher_seq} is {told}"
    return f"{checksum}, {'as the publisher says' if look.is_same_state else 'NOT: ' + is_same}"


def _prefixes(look: Look) -> Table:
    table = Table()
    for heading in ("prefixes", "last block", "blocks", "tokens", "continued by", "adapter", "in"):
        table.add_column(heading)
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
