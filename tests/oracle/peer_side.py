"""The peer's manager under comparison. Runs only in the peer's environment.

    python peer_side.py

Reads one walk per line, `[scenario, operations, answers of the other side]`; writes its own
answers, up to the first different one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from walk import CHUNK_TOKENS, MAX_MODEL_LEN, WINDOW_TOKENS, Counts, Replay, Scenario, block_size_of


def make_spec(kind: str) -> KVCacheSpec:
    shape = {
        "block_size": block_size_of(kind),
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float16,
    }
    kind = kind.removeprefix("coarse-")
    if kind == "window":
        return SlidingWindowSpec(**shape, sliding_window=WINDOW_TOKENS)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=CHUNK_TOKENS)
    return {"full": FullAttentionSpec, "mla": MLAAttentionSpec}[kind](**shape)


class PeerSide:
    """vLLM's KV cache manager with dense retention: every block of a window stays findable."""

    def __init__(self, scenario: Scenario) -> None:
        kv_cache_utils.init_none_hash(sha256)
        config = KVCacheConfig(
            num_blocks=scenario.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{group}"], make_spec(kind))
                for group, kind in enumerate(scenario.groups)
            ],
            prefix_cache_retention_interval=None,
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=scenario.step_tokens,
            hash_block_size=scenario.hash_tokens,
            use_eagle=scenario.use_eagle,
            watermark=scenario.watermark,
        )
        self._hasher = kv_cache_utils.get_request_block_hasher(scenario.hash_tokens, sha256)

    def new_request(self, name: str, tokens: list[int]) -> Request:
        sampling = SamplingParams(max_tokens=MAX_MODEL_LEN)
        return Request(name, tokens, sampling, None, block_hasher=self._hasher)

    def append(self, request: Request, tokens: list[int]) -> None:
        request.append_output_token_ids(tokens)

    def look_up(self, request: Request) -> tuple[Any, int]:
        blocks, num_tokens, _ = self._manager.get_computed_blocks(request)
        return blocks, num_tokens

    def allocate(self, request: Request, counts: Counts, hit: Any, is_alone: bool) -> bool:
        self._manager.new_step_starts()
        blocks = self._manager.allocate_slots(
            request,
            counts.new,
            num_new_computed_tokens=counts.hit,
            new_computed_blocks=hit,
            num_lookahead_tokens=counts.lookahead,
            num_external_computed_tokens=counts.external,
            delay_cache_blocks=counts.is_delayed,
            has_scheduled_reqs=not is_alone,
        )
        if blocks is not None:
            request.status = RequestStatus.RUNNING
        return blocks is not None

    def cache(self, request: Request, num_tokens: int) -> None:
        self._manager.cache_blocks(request, num_tokens)

    def set_computed(self, request: Request, num_tokens: int) -> None:
        request.num_computed_tokens = num_tokens

    def free(self, request: Request, is_preempted: bool) -> None:
        self._manager.free(request)
        if is_preempted:
            request.status = RequestStatus.PREEMPTED
            request.num_preemptions += 1

    def reset(self) -> bool:
        return bool(self._manager.reset_prefix_cache())

    def num_free_blocks(self) -> int:
        return int(self._manager.block_pool.get_num_free_blocks())


def main() -> None:
    answers_out = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        scenario, operations, expected = json.loads(line)
        replay = Replay(PeerSide(Scenario(**scenario)))
        answers = []
        for operation, other in zip(operations, expected, strict=True):
            answers.append(replay.run(operation))
            if answers[-1] != other:
                break
        print(json.dumps(answers), file=answers_out, flush=True)


if __name__ == "__main__":
    main()
