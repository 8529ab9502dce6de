"""Our cache events as vLLM's, for the stream that vLLM publishes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvcache.core import BlocksRemoved, BlocksStored
from kvcache.events.translation import MEDIA


def extra_keys_of(request: Any, start: int, end: int) -> tuple[tuple[Any, ...], ...] | None:
    """Return what else than tokens entered the hash of a request's block."""
    keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    found: tuple[tuple[Any, ...], ...] | None = keys
    return found


def engine_events(
    events: Sequence[BlocksStored | BlocksRemoved],
) -> list[BlockStored | BlockRemoved]:
    """Return events as vLLM publishes those of its own blocks, with the same hashes."""
    return [_stored(each) if isinstance(each, BlocksStored) else _removed(each) for each in events]


def has_cleared(queue: Iterable[Any]) -> bool:
    """Say whether events tell that every medium is empty."""
    return any(isinstance(each, AllBlocksCleared) for each in queue)


def _stored(event: BlocksStored) -> BlockStored:
    lora, parent = event.namespace.lora, event.parent_digest
    return BlockStored(
        block_hashes=list(map(maybe_convert_block_hash, event.digests)),
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        token_ids=event.token_ids.tolist(),
        block_size=event.block_size,
        lora_id=None,
        medium=MEDIA[event.medium],
        lora_name=None if lora is None else json.loads(lora)[0],
        extra_keys=to_event_extra_keys(event.extra_keys),
        group_idx=event.group,
    )


def _removed(event: BlocksRemoved) -> BlockRemoved:
    hashes = list(map(maybe_convert_block_hash, event.digests))
    return BlockRemoved(block_hashes=hashes, medium=MEDIA[event.medium], group_idx=event.group)
