"""This package's manager, wrapped for `workloads`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from side_setup import BLOCK_SIZE, WINDOW_TOKENS, Setup
from stopwatch import now_s

from kvcache.base.arrays import EMPTY_INT32, Int32Array
from kvcache.core import BlocksStored
from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.events import EventCodec
from kvcache.manager import KVCacheManager
from kvcache.protocol.step import (
    EMPTY_RUNNING,
    NewRequest,
    RunningRequests,
    StepRequest,
    StepResult,
)
from kvcache.requests.digests import PackedDigests
from kvcache.requests.hashing import get_hash_fn, get_request_block_hasher
from kvcache.requests.request import Request
from kvcache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

CLIENT = "benchmark"


@dataclass
class Batch:
    """Running rows of one decode workload."""

    request_ids: tuple[str, ...]
    slots: Int32Array


@dataclass
class Stored:
    """Blocks that have just filled: packed digests."""

    request: Request
    digests: PackedDigests


class OurManager:
    """Prompts go through the per-request calls, decoding through one `step` per step."""

    def __init__(self, setup: Setup, core_factory: CoreFactory = FlatCore) -> None:
        specs: list[KVCacheSpec] = [FullAttentionSpec(BLOCK_SIZE, 1, 8)]
        if setup.is_hybrid:
            specs.append(SlidingWindowSpec(BLOCK_SIZE, 1, 8, sliding_window=WINDOW_TOKENS))
        groups = tuple(KVCacheGroupSpec((f"layer.{i}",), spec) for i, spec in enumerate(specs))
        config = KVCacheConfig(
            num_blocks=setup.num_blocks, kv_cache_tensors=(), kv_cache_groups=groups
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            max_num_seqs=8192,
            caching_hash_algo=setup.hash_algorithm,
            enable_kv_cache_events=setup.has_events,
            core_factory=core_factory,
        )
        hash_fn = get_hash_fn(setup.hash_algorithm)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn)
        self._codec = EventCodec(groups)
        self._has_events = setup.has_events
        self._slots = EMPTY_INT32
        self._count = 0
        self._step = 0

    def tokens(self, tokens: np.ndarray, as_list: bool) -> Any:
        return tokens.tolist() if as_list else tokens

    def new_request(self, tokens: Any) -> Request:
        self._count += 1
        return Request(str(self._count), tokens, block_hasher=self._hasher)

    def hash(self, request: Request) -> None:
        _ = request.block_hashes

    def prepare(self, request: Request) -> None:
        """Do nothing: cached blocks are found by their tokens."""

    def look_up(self, request: Request) -> Any:
        return self._manager.get_computed_blocks(request)

    def allocate(self, request: Request, num_tokens: int, hit: Any = None) -> None:
        if hit is None:
            blocks = self._manager.allocate_slots(request, num_tokens)
        else:
            blocks = self._manager.allocate_slots(
                request, request.num_tokens - hit[1], hit[1], hit[0]
            )
        if blocks is None:
            raise RuntimeError("our manager found no room")

    def free(self, request: Request) -> None:
        self._manager.free(request)

    def start_decoding(self, count: int) -> Batch:
        random = np.random.default_rng(count)
        new = []
        for i in range(count):
            tokens = random.integers(0, 150_000, 256 + i % BLOCK_SIZE, dtype=np.int32)
            new.append(NewRequest(f"decode-{self._step}-{i}", tokens, max_new_tokens=len(tokens)))
        result = self._run(new=tuple(new))
        if (result.admitted_slots < 0).any():
            raise RuntimeError("our manager found no room")
        return Batch(tuple(request.request_id for request in new), result.admitted_slots)

    def decode_steps(self, batch: Batch, steps: int) -> float:
        running = one_token_each(batch.slots, np.full(len(batch.slots), 7, np.int32))
        start = now_s()
        for _ in range(steps):
            result = self._run(running=running)
        taken = now_s() - start
        if not result.running_scheduled.all():
            raise RuntimeError("our manager found no room")
        return taken

    def stop_decoding(self, batch: Batch) -> None:
        self._run(finished=batch.request_ids)

    def serve_step(
        self, finished: list[str], kept: np.ndarray, tokens: Any, new: list[tuple[str, Any]]
    ) -> int:
        """Serve one step; return the tokens that new requests found in the cache."""
        slots = self._slots[kept]
        result = self._run(
            finished=tuple(finished),
            running=one_token_each(slots, tokens),
            new=tuple(NewRequest(name, prompt, len(prompt)) for name, prompt in new),
        )
        if result.no_room or (len(slots) and not result.running_scheduled.all()):
            raise RuntimeError("our manager found no room")
        self._slots = np.concatenate([slots, result.admitted_slots]) if new else slots
        if self._has_events:
            self._codec.encode(1.5, self._manager.take_events())
        return int(result.num_hit_tokens.sum()) if new else 0

    def stored(self, request: Request) -> Stored:
        digests = request.block_hashes
        return Stored(request, PackedDigests(b"".join(digests), len(digests[0])))

    def encode_stored(self, stored: Stored) -> bytes:
        """Build and encode the event, with the digests as the core has them."""
        request = stored.request
        event = BlocksStored(
            group=0,
            medium="device",
            digests=stored.digests[:],
            parent_digest=None,
            token_ids=request.all_token_ids,
            block_size=BLOCK_SIZE,
            namespace=request.namespace,
        )
        return self._codec.encode(1.5, [event])

    def check_stored(self, stored: Stored, payload: bytes) -> str:
        return "" if payload == self.encode_stored(stored) else "differs"

    def _run(self, **fields: Any) -> StepResult:
        self._step += 1
        result = self._manager.step(
            StepRequest(CLIENT, self._step, 0, completed_step=self._step - 1 or -1, **fields)
        )
        self._manager.take_commands()
        return result


def one_token_each(slots: Int32Array, tokens: Int32Array) -> RunningRequests:
    """Return rows that append one token each and compute it."""
    count = len(slots)
    if not count:
        return EMPTY_RUNNING
    zeros = np.zeros(count, np.int32)
    return RunningRequests(
        slots=slots,
        num_new_tokens=np.ones(count, np.int32),
        num_draft_tokens=zeros,
        num_rejected_tokens=zeros,
        token_offsets=np.arange(count + 1, dtype=np.int32),
        token_ids=tokens,
    )
