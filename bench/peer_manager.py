"""The peer's manager, wrapped for `workloads`. Runs only in the peer's environment."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from side_setup import BLOCK_SIZE, WINDOW_TOKENS, Setup
from stopwatch import now_s
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

HASH_NAMES = {"xxh3_128": "xxhash"}
"""The peer's names of the digests."""


class PeerManager:
    """vLLM's KV cache manager at its best: its own request objects, no logging, no statistics."""

    def __init__(self, setup: Setup) -> None:
        hash_fn = get_hash_fn_by_name(HASH_NAMES.get(setup.hash_algorithm, setup.hash_algorithm))
        kv_cache_utils.init_none_hash(hash_fn)
        shape = {
            "block_size": BLOCK_SIZE,
            "num_kv_heads": 1,
            "head_size": 8,
            "dtype": torch.float16,
        }
        specs = [FullAttentionSpec(**shape)]
        if setup.is_hybrid:
            specs.append(SlidingWindowSpec(**shape, sliding_window=WINDOW_TOKENS))
        config = KVCacheConfig(
            num_blocks=setup.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)
            ],
            prefix_cache_retention_interval=None,  # dense: every block of a window can be found
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_kv_cache_events=setup.has_events,
        )
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_fn)
        self._encode = msgspec.msgpack.Encoder().encode
        self._has_events = setup.has_events
        self._running: list[Request] = []
        self._count = 0
        self._sampling = SamplingParams(max_tokens=1 << 20)

    def tokens(self, tokens: np.ndarray, as_list: bool) -> list[int]:
        return tokens.tolist()

    def new_request(self, tokens: Any) -> Request:
        """Make a request; arrays become lists here, outside the timer."""
        self._count += 1
        as_list = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        return Request(str(self._count), as_list, self._sampling, None)

    def hash(self, request: Request) -> None:
        request.block_hashes = self._hasher(request)
        request._block_hasher = self._hasher

    def prepare(self, request: Request) -> None:
        self.hash(request)

    def stored(self, request: Request) -> Request:
        self.hash(request)
        return request

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
        start = now_s()
        for _ in range(steps):
            self._manager.new_step_starts()
            for request in batch:
                request.append_output_token_ids(7)
                blocks = allocate(request, 1)
                request.num_computed_tokens += 1
        taken = now_s() - start
        if blocks is None:
            raise RuntimeError("the peer found no room")
        return taken

    def stop_decoding(self, batch: list[Request]) -> None:
        for request in batch:
            self._manager.free(request)

    def serve_step(
        self, finished: list[str], kept: np.ndarray, tokens: Any, new: list[tuple[str, Any]]
    ) -> int:
        """Serve one step; return the tokens that new requests found in the cache."""
        manager = self._manager
        allocate = manager.allocate_slots
        manager.new_step_starts()
        going = []
        for request, is_kept in zip(self._running, kept.tolist(), strict=True):
            if is_kept:
                going.append(request)
            else:
                manager.free(request)
        for request, token in zip(going, tokens, strict=True):
            request.append_output_token_ids(token)
            if allocate(request, 1) is None:
                raise RuntimeError("the peer found no room")
            request.num_computed_tokens += 1
        num_hit = 0
        for name, prompt in new:
            request = Request(name, prompt, self._sampling, None, block_hasher=self._hasher)
            blocks, num_tokens, _ = manager.get_computed_blocks(request)
            num_hit += num_tokens
            if allocate(request, len(prompt) - num_tokens, num_tokens, blocks) is None:
                raise RuntimeError("the peer found no room")
            request.num_computed_tokens = len(prompt)
            going.append(request)
        self._running = going
        if self._has_events:
            self._encode(KVEventBatch(1.5, manager.take_events(), 0))
        return num_hit

    def encode_stored(self, request: Request) -> bytes:
        """Build and encode the event of all blocks of the request, as if they had just filled."""
        self._manager.block_pool.emit_cached_block_events(
            request, len(request.block_hashes), BLOCK_SIZE, 0
        )
        return self._encode(KVEventBatch(1.5, self._manager.take_events(), 0))

    def check_stored(self, request: Request, payload: bytes) -> str:
        """Compare a payload with our own event, both read by the peer's typed decoder."""
        decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        theirs, ours = (
            msgspec.to_builtins(decode(data)) for data in (payload, self.encode_stored(request))
        )
        for batch in (theirs, ours):
            for event in batch[1]:
                event.pop("locality", None)  # the peer leaves it out, which means the same
                if not any(event.get("extra_keys") or ()):
                    event.pop("extra_keys", None)
        if theirs == ours:
            return ""
        keys = {key for event in (*theirs[1], *ours[1]) for key in event}
        return "differs in " + ", ".join(
            sorted(k for k in keys if [e.get(k) for e in theirs[1]] != [e.get(k) for e in ours[1]])
        )
