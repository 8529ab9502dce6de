"""A store: the paged KV cache of one stock model, in this process.

    model = AutoModelForCausalLM.from_pretrained(...)
    with PagedCacheStore(model, MemorySizes(1 << 30)) as store:
        inputs = tokenizer(["a system prompt ... a question"], return_tensors="pt")
        with store.open(**inputs) as cache:
            output = model.generate(**inputs, past_key_values=cache, max_new_tokens=50)
        inputs = tokenizer(["a system prompt ... another one"], return_tensors="pt")
        with store.open(**inputs) as cache:  # the common prefix is not computed again
            output = model.generate(**inputs, past_key_values=cache, max_new_tokens=50)

Users start here. The store hooks into the model's own forward (`close` removes the hooks), so it
knows the tokens of every column, and later calls find computed blocks by them. The output is that
of the model without a store; only the place of keys and values differs. It works with greedy and
sampled decoding, beams, several sequences for a prompt, assisted decoding, batches padded on the
left, chunked prefill, and several turns on one cache. It refuses input that token blocks cannot
tell apart (see model_call.py), and models with other caches (see `ModelLayers`).

Every layer of a forward copies all keys and values that it reads, as `transformers`' own dynamic
cache does. The store saves computation and the memory of shared prefixes, but no reading.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache.base.errors import ConfigurationError, RequestError
from kvcache.integrations.transformers.paged_cache import PagedCache
from kvcache.integrations.transformers.paged_memory import ContentScope, MemorySizes, PagedMemory
from kvcache.requests.request import LoRARequest
from kvcache.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model in order: names `layers.0`, `layers.1`, ...; a spec for each.

    `windows[i]`: tokens that layer i sees, its own included; None: all. A layer that attends in
    chunks of `n` tokens counts as one with a window of `n`, which covers its chunk.
    `max_position_embeddings`: the length that the model was trained for.
    """

    specs: Mapping[str, KVCacheSpec]
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    max_position_embeddings: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, in the model's order."""
        return tuple(self.specs)

    @classmethod
    def of(cls, model: PreTrainedModel, block_size: int) -> ModelLayers:
        """Read `model`'s configuration.

        Raises:
            ConfigurationError: names a layer whose state is not keys and values per token.
        """
        config = model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder:
            raise ConfigurationError(
                f"{type(model).__name__} has an encoder: use a model that only decodes"
            )
        windows = tuple(
            _window(type(model).__name__, index, layer)
            for index, layer in enumerate(DynamicCache(config=config).layers)
        )
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        dtype = str(model.dtype).removeprefix("torch.")
        full = FullAttentionSpec(
            block_size=block_size, num_kv_heads=num_heads, head_size=head_size, dtype=dtype
        )
        specs: dict[str, KVCacheSpec] = {
            f"layers.{index}": full
            if window is None
            else SlidingWindowSpec(
                block_size=block_size,
                num_kv_heads=num_heads,
                head_size=head_size,
                dtype=dtype,
                sliding_window=window,
            )
            for index, window in enumerate(windows)
        }
        longest = getattr(config, "max_position_embeddings", None) or _LONGEST
        return cls(specs, windows, model.dtype, model.device, longest)


_LONGEST = 1 << 17
"""Longest row of a model without a limit of its own."""


def _window(model_name: str, index: int, layer: Any) -> int | None:
    """Return the window of a layer of `transformers`' own cache; None: all tokens."""
    if type(layer) is DynamicSlidingWindowLayer:
        return int(layer.sliding_window)
    if type(layer) is DynamicLayer:
        return None
    raise ConfigurationError(
        f"layer {index} of {model_name} keeps a {type(layer).__name__}, not one key and value per "
        "token: use a model whose layers are full, sliding or chunked attention"
    )


@dataclass(frozen=True)
class StoreStatistics:
    """Statistics of a `PagedCacheStore`; counters since it was made.

    Blocks without the null block: every one is in use by an open cache, or cached and evictable, or
    free and empty. `num_asked_tokens` were opened with, `num_hit_tokens` of these were not computed
    again. `num_computed_tokens`: tokens whose keys and values were written.
    """

    num_blocks: int
    num_blocks_in_use: int
    num_blocks_cached: int
    num_evictions: int
    num_open_caches: int
    num_rows: int
    num_asked_tokens: int
    num_hit_tokens: int
    num_computed_tokens: int
    num_copied_blocks: int


_FROM_TOKENIZERS = frozenset({"token_type_ids", "special_tokens_mask", "length"})
"""Tokenizer outputs besides tokens and mask; they follow from the tokens."""


@dataclass
class Counters:
    """Counters of all caches of a store."""

    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    num_computed_tokens: int = 0


class PagedCacheStore:
    """Blocks of one model, and the open caches. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        sizes: MemorySizes | None = None,
        *,
        block_size: int = 16,
        eviction_policy: str = "lru",
    ) -> None:
        """Allocate blocks on the model's device, in its dtype, and hook into its forward.

        Args:
            model: a decoder whose layers keep a key and a value per token.
            sizes: memory, and most rows.
            block_size: tokens of a block; a hit is a multiple of it.
            eviction_policy: as of `KVCacheManager`.

        Raises:
            ConfigurationError: the model needs another kind of cache, or a value is invalid.
            NotEnoughMemoryError: not even one token fits, or not `sizes.max_model_len`.
        """
        self.layers = ModelLayers.of(model, block_size)
        self.memory = PagedMemory(
            self.layers.specs,
            MemorySizes() if sizes is None else sizes,
            device=self.layers.device,
            max_position_embeddings=self.layers.max_position_embeddings,
            eviction_policy=eviction_policy,
        )
        self.counters = Counters()
        self._open: list[PagedCache] = []
        self._signature = inspect.signature(model.forward)
        self._is_closed = False
        self._hooks = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    def __enter__(self) -> PagedCacheStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a row."""
        return self.memory.max_model_len

    def open(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        is_shared: bool = True,
        **others: object,
    ) -> PagedCache:
        """Return a cache for this batch, which begins with the cached prefixes of its prompts.

        Args:
            input_ids: `(batch, tokens)`, as passed to `generate`: not repeated for beams. Without
                them nothing is looked up, and the first forward defines the batch.
            attention_mask: likewise; pads on the left.
            lora: the adapter that is active while this cache is used.
            cache_salt: only caches of the same salt share.
            is_shared: False: look nothing up, and let no request hit the computed blocks.
            others: other outputs of a tokenizer, such as `token_type_ids`; ignored.

        Raises:
            RequestError: the store is closed, or the batch is invalid.
            OutOfBlocksError: more rows than `MemorySizes.max_rows`.
        """
        if self._is_closed:
            raise RequestError("the store is closed: make another one")
        unknown = sorted(set(others) - _FROM_TOKENIZERS)
        if unknown:
            raise RequestError(
                f"open() was given {', '.join(unknown)}: blocks are found by input_ids, "
                "attention_mask, lora and cache_salt alone"
            )
        cache = PagedCache(self, ContentScope(lora, cache_salt, is_shared))
        if input_ids is not None:
            cache.start(input_ids, attention_mask)
        self._open.append(cache)
        return cache

    def reset(self) -> None:
        """Forget all cached blocks, because the model's weights have changed.

        Raises:
            RequestError: caches are open.
        """
        if not self.memory.manager.reset_prefix_cache(drain=False):
            raise RequestError(
                f"{len(self._open)} caches are open and hold blocks: close them first"
            )

    def statistics(self) -> StoreStatistics:
        """Return frozen statistics."""
        statistics = self.memory.manager.statistics()
        core, counters = statistics.core, self.counters
        return StoreStatistics(
            num_blocks=core.num_blocks,
            num_blocks_in_use=core.num_blocks - core.num_free_blocks,
            num_blocks_cached=core.num_cached_blocks,
            num_evictions=core.num_evictions,
            num_open_caches=len(self._open),
            num_rows=statistics.num_running_requests,
            num_asked_tokens=counters.num_asked_tokens,
            num_hit_tokens=counters.num_hit_tokens,
            num_computed_tokens=counters.num_computed_tokens,
            num_copied_blocks=self.memory.worker.statistics().num_blocks_copied,
        )

    def check(self) -> None:
        """Raise `InvariantError` if the tables are inconsistent."""
        self.memory.check()

    def close(self) -> None:
        """Close all caches, remove the hooks, release the tensors."""
        if self._is_closed:
            return
        self._is_closed = True
        for cache in tuple(self._open):
            cache.close()
        for hook in self._hooks:
            hook.remove()
        self.memory.close()

    def forget(self, cache: PagedCache) -> None:
        """Remove a closed cache."""
        self._open = [other for other in self._open if other is not cache]

    # Hooks of the model's forward.

    def _before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        arguments = self._arguments(args, kwargs)
        cache = arguments.get("past_key_values")
        if not isinstance(cache, PagedCache):
            return None
        if cache not in self._open:
            cache.require_open()
            raise RequestError(
                "the cache is of another store: open one from the store of this model"
            )
        return (), cache.begin(arguments)

    def _after(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        cache = self._arguments(args, kwargs).get("past_key_values")
        if not isinstance(cache, PagedCache) or cache not in self._open:
            return
        if output is None:  # it failed
            cache.abandon()
        else:
            cache.finish()

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model's forward by name."""
        names = list(self._signature.parameters)
        return {**dict(zip(names, args, strict=False)), **kwargs}
