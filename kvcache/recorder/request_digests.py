"""What of a request leaves the coordinator when it is recorded: salted digests of its blocks.

A digest covers its block, all before it, and what sets the content apart (LoRA, images, salt,
tenant). It is keyed with a secret of the recording, so tokens cannot be found by hashing guesses,
and two recordings cannot be compared. A trace does not even hold the digests: its writer
puts numbers in order of appearance in their place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvcache.protocol.step import NewRequest
from kvcache.recorder.request_tracer import SeenRequest

DIGEST_BYTES = 16
SALT_BYTES = 32


@dataclass(frozen=True)
class RecordedRequest:
    """A request without its tokens. `digests` has `DIGEST_BYTES` for each block, the last one,
    partly filled, included."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    digests: bytes
    tenant: str | None


@dataclass(frozen=True)
class RecordedBatch:
    """What a coordinator says when it is asked for requests.

    `num_lost` found no room since the recording began; `block_size` is tokens per block.
    """

    requests: tuple[RecordedRequest, ...]
    num_lost: int
    block_size: int


def record_request(seen: SeenRequest, block_size: int, salt: bytes) -> RecordedRequest:
    """Return what may be told of a request; `salt` is the recording's secret."""
    request = seen.request
    return RecordedRequest(
        arrival_s=seen.arrival_s,
        num_prompt_tokens=len(request.token_ids),
        num_output_tokens=seen.num_output_tokens,
        digests=block_digests(request, block_size, salt),
        tenant=request.tenant,
    )


def block_digests(request: NewRequest, block_size: int, salt: bytes) -> bytes:
    """Return the digests of all blocks of a prompt, one after another."""
    apart = [request.lora_name, request.lora_path, request.cache_salt, request.tenant]
    digest = _digest(json.dumps(apart).encode(), salt)
    tokens = np.ascontiguousarray(request.token_ids, dtype="<i4").tobytes()
    items = _items(request)
    digests = []
    width = 4 * block_size
    for start in range(0, len(tokens), width):
        end_token = start // 4 + block_size
        content = tokens[start : start + width]
        while items and items[-1][0] < end_token:
            content += json.dumps(items.pop()).encode()
        digest = _digest(digest + content, salt)
        digests.append(digest)
    return b"".join(digests)


def _items(request: NewRequest) -> list[tuple[int, int, str]]:
    """Return offset, length and hash of multimodal items, the first one last."""
    items = zip(
        request.mm_offsets.tolist(), request.mm_lengths.tolist(), request.mm_hashes, strict=True
    )
    return sorted(items, reverse=True)


def _digest(data: bytes, salt: bytes) -> bytes:
    return blake2b(data, key=salt, digest_size=DIGEST_BYTES).digest()
