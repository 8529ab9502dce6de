"""This package's manager under comparison."""

from __future__ import annotations

from typing import Any

from kvcache.core import CoreSettings
from kvcache.core.flat_core import FlatCore
from kvcache.manager import KVCacheManager
from kvcache.requests.request import Request
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from tests.core.slow_core import SlowCore, make_slow_core
from tests.oracle.walk import (
    CHUNK_TOKENS,
    MAX_MODEL_LEN,
    WINDOW_TOKENS,
    Counts,
    Scenario,
    block_size_of,
)


def make_spec(kind: str) -> KVCacheSpec:
    size, kind = block_size_of(kind), kind.removeprefix("coarse-")
    if kind == "window":
        return SlidingWindowSpec(size, 1, 8, sliding_window=WINDOW_TOKENS)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(size, 1, 8, attention_chunk_size=CHUNK_TOKENS)
    return {"full": FullAttentionSpec, "mla": MLAAttentionSpec}[kind](size, 1, 8)


class OurSide:
    """Drives the per-request calls; sometimes checks the manager's own state."""

    def __init__(self, scenario: Scenario, slow: type[SlowCore] | None = None) -> None:
        """Use the flat core, or a slow one."""

        def make_slow(settings: CoreSettings) -> FlatCore:
            return make_slow_core(settings, slow or SlowCore)

        config = KVCacheConfig(
            num_blocks=scenario.num_blocks,
            kv_cache_tensors=(),
            kv_cache_groups=tuple(
                KVCacheGroupSpec((f"layer.{group}",), make_spec(kind))
                for group, kind in enumerate(scenario.groups)
            ),
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            use_eagle=scenario.use_eagle,
            watermark=scenario.watermark,
            core_factory=FlatCore if slow is None else make_slow,
        )

    def new_request(self, name: str, tokens: list[int]) -> Request:
        return Request(name, tokens)

    def append(self, request: Request, tokens: list[int]) -> None:
        request.append_output_token_ids(tokens)

    def look_up(self, request: Request) -> tuple[Any, int]:
        return self.manager.get_computed_blocks(request)

    def allocate(self, request: Request, counts: Counts, hit: Any, is_alone: bool) -> bool:
        blocks = self.manager.allocate_slots(
            request,
            counts.new,
            num_new_computed_tokens=counts.hit,
            new_computed_blocks=hit,
            num_draft_tokens=counts.draft,
            num_lookahead_tokens=counts.lookahead,
            num_external_computed_tokens=counts.external,
            delay_cache_blocks=counts.is_delayed,
        )
        return blocks is not None

    def cache(self, request: Request, num_tokens: int) -> None:
        self.manager.cache_blocks(request, num_tokens)

    def set_computed(self, request: Request, num_tokens: int) -> None:
        request.num_computed_tokens = num_tokens

    def free(self, request: Request, is_preempted: bool) -> None:
        self.manager.free(request)

    def reset(self) -> bool:
        return self.manager.reset_prefix_cache()

    def num_free_blocks(self) -> int:
        return self.manager.statistics().core.num_free_blocks
