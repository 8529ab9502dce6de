"""This package's manager, wrapped for `workloads`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from workloads import BLOCK_SIZE

from kvcache.arrays import EMPTY_INT32, Int32Array
from kvcache.hashing import get_hash_fn, get_request_block_hasher
from kvcache.manager import KVCacheManager
from kvcache.request import Request
from kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvcache.step import NewRequest, RunningRequests, StepRequest

CLIENT = "benchmark"


@dataclass
class Batch:
    """Running rows of one decode workload."""

    request_ids: tuple[str, ...]
    slots: Int32Array


class OurManager:
    """Prompts go through the per-request calls, decoding through one `step` per step."""

    def __init__(self, num_blocks: int) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8)
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=(),
            kv_cache_groups=(KVCacheGroupSpec(("layer.0",), spec),),
        )
        self._manager = KVCacheManager(config, max_model_len=1 << 20, max_num_seqs=8192)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn("sha256"))
        self._count = 0
        self._step = 0

    def new_request(self, tokens: np.ndarray) -> Request:
        self._count += 1
        return Request(str(self._count), tokens, block_hasher=self._hasher)

    def hash(self, request: Request) -> None:
        _ = request.block_hashes

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
        count = len(batch.slots)
        ones, zeros = np.ones(count, np.int32), np.zeros(count, np.int32)
        running = RunningRequests(
            slots=batch.slots,
            num_new_tokens=ones,
            num_draft_tokens=zeros,
            num_rejected_tokens=zeros,
            token_offsets=np.arange(count + 1, dtype=np.int32),
            token_ids=np.full(count, 7, np.int32),
            draft_token_ids=EMPTY_INT32,
        )
        start = time.perf_counter()
        for _ in range(steps):
            self._run(running=running)
        return time.perf_counter() - start

    def stop_decoding(self, batch: Batch) -> None:
        self._run(finished=batch.request_ids)

    def _run(self, **fields: Any) -> Any:
        self._step += 1
        result = self._manager.step(
            StepRequest(CLIENT, self._step, 0, completed_step=self._step - 1 or -1, **fields)
        )
        self._manager.take_commands()
        return result
