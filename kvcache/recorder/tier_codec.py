"""Tiers in a recording: their calls as plain values, and what their loads are asked for.

Below the records. A request that waits for its load is known only to the tiers, so what it
holds is written down with the load, as the message of a step that brings it; one that the manager
knows is named. Refuses calls of unknown kinds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kvcache.base.arrays import int32_array
from kvcache.coordinator.tier_calls import Gone, LookedUp, SwappedOut, TierCall
from kvcache.core import OffloadAnswer, OffloadHit
from kvcache.manager.loads import PrefixLoad
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.protocol.wire import encode
from kvcache.recorder.outcomes import Digests, digest_of
from kvcache.requests.request import Request

_LOAD_PARTS = ("load_id", "num_device_tokens", "num_tokens", "columns", "block_ids")


def pack_calls(calls: Sequence[TierCall]) -> list[list[Any]]:
    """Return plain values."""
    return [_packed(call) for call in calls]


def unpack_calls(values: Any) -> tuple[TierCall, ...]:
    """Return what `pack_calls` made; raises ValueError or TypeError for anything else."""
    return tuple(_unpacked(*value) for value in values)


def digests_of_load(load: PrefixLoad | None) -> Digests:
    """Return the digest of each part of what a load has got; nothing if there was no room."""
    if load is None:
        return ()
    return tuple((name, digest_of(getattr(load, name))) for name in _LOAD_PARTS)


def message_of(request: Request) -> bytes:
    """Return the bytes of a step that brings a request of this content."""
    lora = request.lora
    new = NewRequest(
        request.request_id,
        request.all_token_ids,
        request.num_tokens,
        lora_name=None if lora is None else lora.name,
        lora_path=None if lora is None else lora.path,
        mm_hashes=request.mm_hashes,
        mm_offsets=int32_array([position.offset for position in request.mm_positions]),
        mm_lengths=int32_array([position.length for position in request.mm_positions]),
        cache_salt=request.cache_salt,
        tenant=request.namespace.tenant,
        skip_reading_prefix_cache=request.skip_reading_prefix_cache,
    )
    return encode(StepRequest(new=(new,)), sys.maxsize)


def _packed(call: TierCall) -> list[Any]:
    match call:
        case LookedUp(request_id, num_device_tokens, answer):
            return ["?", request_id, num_device_tokens, answer.answer.value, answer.num_tokens]
        case SwappedOut(request_id, num_tokens, num_cached_tokens):
            return ["swap", request_id, num_tokens, num_cached_tokens]
        case Gone(request_id, released_loads):
            return ["gone", request_id, list(released_loads)]


def _unpacked(kind: str, request_id: str, *values: Any) -> TierCall:
    if type(request_id) is not str:
        raise TypeError(f"{type(request_id).__name__} is no request id")
    match (kind, *values):
        case ("?", int(num_device_tokens), str(answer), int(num_tokens)):
            hit = OffloadHit(OffloadAnswer(answer), num_tokens)
            return LookedUp(request_id, num_device_tokens, hit)
        case ("swap", int(num_tokens), int(num_cached_tokens)):
            return SwappedOut(request_id, num_tokens, num_cached_tokens)
        case ("gone", list(load_ids)) if all(type(one) is int for one in load_ids):
            return Gone(request_id, tuple(load_ids))
    raise ValueError(f"a call of tiers that is {kind!r} with {values!r:.100}")
