"""The peer's manager, wrapped for `workloads`. Runs only in the peer's environment."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from workloads import BLOCK_SIZE


class PeerManager:
    """vLLM's KV cache manager at its best: its own request objects, no logging, no statistics."""

    def __init__(self, num_blocks: int) -> None:
        kv_cache_utils.init_none_hash(sha256)
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float16
        )
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, sha256)
        self._count = 0
        self._sampling = SamplingParams(max_tokens=1 << 20)

    def new_request(self, tokens: np.ndarray) -> Request:
        self._count += 1
        return Request(str(self._count), tokens.tolist(), self._sampling, None)

    def hash(self, request: Request) -> None:
        request.block_hashes = self._hasher(request)
        request._block_hasher = self._hasher

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
            raise RuntimeError("the peer found no room")

    def free(self, request: Request) -> None:
        self._manager.free(request)

    def start_decoding(self, count: int) -> list[Request]:
        random = np.random.default_rng(count)
        batch = []
        for i in range(count):
            # Staggered lengths: one request in sixteen fills a block in each step.
            tokens = random.integers(0, 150_000, 256 + i % BLOCK_SIZE, dtype=np.int32)
            request = self.new_request(tokens)
            self.hash(request)
            self.allocate(request, len(tokens))
            request.num_computed_tokens = len(tokens)
            batch.append(request)
        return batch

    def decode_steps(self, batch: list[Request], steps: int) -> float:
        allocate = self._manager.allocate_slots
        start = time.perf_counter()
        for _ in range(steps):
            self._manager.new_step_starts()
            for request in batch:
                request.append_output_token_ids(7)
                allocate(request, 1)
                request.num_computed_tokens += 1
        return time.perf_counter() - start

    def stop_decoding(self, batch: list[Request]) -> None:
        for request in batch:
            self._manager.free(request)
