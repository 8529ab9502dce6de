"""`kvcache events dump`: cache events as lines of JSON, for programs that do not speak the format.

What is cached now comes first, as the publisher states it; with --follow, what happens then. Fields
are those of the wire, hashes as plain integers. Refuses to leave anything out but empty batches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from actors.cli.event_source import SourceChoice, open_source
from actors.event_endpoints import subscribe
from kvcache.base.errors import DeadlineError
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.events.subscription import Update
from kvcache.events.wire_events import RemovedEvent, StoredEvent, WireEvent

_STATE_S = 15.0
_POLL_S = 0.1


def dump_events(choice: SourceChoice, follows: bool, limit: int | None) -> None:
    """Print events, at most `limit`; with `follows`, until Ctrl-C or the reader has had enough.

    Raises what `open_source` raises, ConfigurationError for addresses that are none, DeadlineError
    when no publisher says what is cached.
    """
    with open_source(choice) as source, subscribe(source.endpoints) as subscriber:
        try:
            for line in islice(_lines(_updates(subscriber, follows)), limit):
                print(line, flush=follows)
            sys.stdout.flush()
        except BrokenPipeError:
            # Who reads the lines has gone; nothing may be flushed to it when this process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyboardInterrupt:
            return


def event_fields(seq: int, rank: int, time_s: float, event: WireEvent) -> dict[str, Any]:
    """Return one event as plain values: number and rank of its batch, then the wire's fields, the
    optional ones only where they say something."""
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
    """Yield what states everything, then what comes if it `follows`."""
    give_up_s = time.monotonic() + _STATE_S
    while not (found := subscriber.poll(_POLL_S)):
        if time.monotonic() > give_up_s:
            raise DeadlineError(
                f"no publisher said within {_STATE_S:g} s what is cached: is the publisher there, "
                "and are both addresses its own?"
            )
    yield found[0]
    if not follows:
        return
    yield from found[1:]
    yield from subscriber
