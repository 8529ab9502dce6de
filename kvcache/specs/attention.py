"""The kinds that keep data per token: full attention, MLA, sliding window, chunked, cross.

`spec.py` has the interface. Refuses pages padded below their content, layers that remember both a
window and a chunk, and chunks that are not whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar

from kvcache.base.arguments import as_bool, as_int, check_fields
from kvcache.base.errors import ConfigurationError
from kvcache.specs.spec import KVCacheSpec, PageTensor, require_kind
from kvcache.specs.units import (
    ceil_div,
    dtype_name,
    dtype_size_bytes,
    require_count,
    require_lengths,
    require_tokens,
)


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """A layer that keeps a key and a value per token and head, `[block, 2, tokens, heads, size]`.

    `num_kv_heads` are the heads of this rank. `page_size_padded`: bytes a page is padded to.
    """

    num_kv_heads: int
    head_size: int
    dtype: str = "float16"
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, as_int, "num_kv_heads", at_least=1)
        check_fields(self, as_int, "head_size", at_least=1)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        element = dtype_size_bytes(self.dtype)
        if self.page_size_padded is None:
            return
        check_fields(self, as_int, "page_size_padded", at_least=1)
        if self.page_size_padded < self.real_page_size_bytes or self.page_size_padded % element:
            raise ConfigurationError(
                f"page_size_padded is {self.page_size_padded} bytes, but a page holds "
                f"{self.real_page_size_bytes} bytes of {self.dtype}: pad to at least that, in "
                f"multiples of {element}"
            )

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one block's content: `(2, tokens, heads, head_size)`, keys before values."""
        return (2, self.block_size, self.num_kv_heads, self.head_size)

    @property
    def page_tensors(self) -> tuple[PageTensor, ...]:
        return (PageTensor(0, self.page_shape, self.dtype),)

    @property
    def alignment_bytes(self) -> int:
        return dtype_size_bytes(self.dtype)

    @property
    def real_page_size_bytes(self) -> int:
        return prod(self.page_shape) * dtype_size_bytes(self.dtype)

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.real_page_size_bytes

    @property
    def can_prefix_cache(self) -> bool:
        return True

    def with_block_size(self, block_size: int) -> KVCacheSpec | None:
        block_size = require_count("block_size", block_size)
        if self.page_size_padded is not None:
            return None  # the padding fits only the old size
        return replace(self, block_size=block_size)

    def with_page_size_padded(self, page_size_bytes: int) -> KVCacheSpec | None:
        page_size_padded = require_count("page_size_bytes", page_size_bytes)
        return replace(self, page_size_padded=page_size_padded)


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose every token reads all tokens before it (MHA, GQA, MQA; MLA by `use_mla`).

    MLA keeps one latent vector per token instead of a key and a value. `sliding_window` and
    `attention_chunk_size` are set when this spec replaces a windowed or chunked layer: the cache
    then keeps every token, and the model still reads only its window.
    """

    kind: ClassVar[str] = "full"

    use_mla: bool = False
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, as_bool, "use_mla")
        if self.sliding_window is not None:
            check_fields(self, as_int, "sliding_window", at_least=1)
        if self.attention_chunk_size is not None:
            check_fields(self, as_int, "attention_chunk_size", at_least=1)
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ConfigurationError(
                f"a layer remembers a sliding window of {self.sliding_window} tokens and a chunk "
                f"of {self.attention_chunk_size} tokens: set one of them"
            )

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one block's content; MLA has no leading key/value axis."""
        return super().page_shape[1:] if self.use_mla else super().page_shape

    @property
    def reads_whole_prefix(self) -> bool:
        return True

    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        num_tokens, _ = require_lengths(max_model_len, max_num_batched_tokens)
        return ceil_div(num_tokens, self.block_size) * self.page_size_bytes

    def as_full_attention(self) -> FullAttentionSpec | None:
        return self

    def without_remembered_limit(self) -> KVCacheSpec:
        return replace(self, sliding_window=None, attention_chunk_size=None)

    @classmethod
    def merge(cls, specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
        """Return the one spec that serves all of `specs`: equal except for remembered windows.

        The specs may remember at most one window or chunk, which the result remembers. Raises
        ConfigurationError otherwise.
        """
        listed = require_kind(cls, specs)
        full = [spec for spec in listed if isinstance(spec, FullAttentionSpec)]
        windows = {spec.sliding_window for spec in full} - {None}
        chunks = {spec.attention_chunk_size for spec in full} - {None}
        if len(windows) + len(chunks) > 1:
            remembered = [f"window {w}" for w in sorted(w for w in windows if w)]
            remembered += [f"chunk {c}" for c in sorted(c for c in chunks if c)]
            raise ConfigurationError(
                "full attention layers of one KV cache group remember different limits "
                f"({', '.join(remembered)}): give them groups of their own"
            )
        window = next(iter(windows), None)
        chunk = next(iter(chunks), None)
        return super().merge(
            [replace(spec, sliding_window=window, attention_chunk_size=chunk) for spec in full]
        )


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one latent vector per token, `[block, tokens, heads, size]`.

    Reads the whole prefix, as full attention does; only the page differs. `num_kv_heads` is 1
    for current models, and every tensor-parallel rank keeps the whole vector.
    """

    kind: ClassVar[str] = "mla"

    use_mla: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.use_mla:
            raise ConfigurationError(
                "use_mla is False in a spec of kind 'mla': leave it out, or use FullAttentionSpec"
            )


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer whose every token reads itself and the `sliding_window - 1` tokens before it."""

    kind: ClassVar[str] = "sliding_window"

    sliding_window: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, as_int, "sliding_window", at_least=1)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the number of tokens before the next token's window."""
        num_computed_tokens = require_tokens("num_computed_tokens", num_computed_tokens)
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Return the bytes of the window before a step, of the step, and of one block.

        The extra block is needed because the window may begin in the middle of a block.
        """
        longest, batched = require_lengths(max_model_len, max_num_batched_tokens)
        num_tokens = min(self.sliding_window - 1 + batched, longest)
        return (ceil_div(num_tokens, self.block_size) + 1) * self.page_size_bytes

    def as_full_attention(self) -> FullAttentionSpec | None:
        return replace(_as_full_attention(self), sliding_window=self.sliding_window)


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer whose every token reads itself and the tokens before it in its own chunk.

    Chunks have `attention_chunk_size` tokens and begin at multiples of that.
    """

    kind: ClassVar[str] = "chunked_local"

    attention_chunk_size: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, as_int, "attention_chunk_size", at_least=1)
        if self.attention_chunk_size % self.block_size:
            raise ConfigurationError(
                f"attention_chunk_size is {self.attention_chunk_size} tokens, no multiple of the "
                f"block size {self.block_size}, so that a chunk would begin inside a block: choose "
                "a block size that divides it"
            )

    @property
    def supports_eagle(self) -> bool:
        """False: a hit that ends where a chunk begins does not cover the chunk before."""
        return False

    def with_block_size(self, block_size: int) -> KVCacheSpec | None:
        block_size = require_count("block_size", block_size)
        return (
            None if self.attention_chunk_size % block_size else super().with_block_size(block_size)
        )

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the number of tokens before the next token's chunk."""
        num_computed_tokens = require_tokens("num_computed_tokens", num_computed_tokens)
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Return the bytes of one chunk before a step's first token, and of the step."""
        longest, batched = require_lengths(max_model_len, max_num_batched_tokens)
        num_tokens = min(self.attention_chunk_size + batched, longest)
        return ceil_div(num_tokens, self.block_size) * self.page_size_bytes

    def as_full_attention(self) -> FullAttentionSpec | None:
        return replace(_as_full_attention(self), attention_chunk_size=self.attention_chunk_size)


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """A decoder layer that reads the keys and values of an encoder's tokens.

    They are written once, when the request begins, and do not grow with it. No other request can
    start from them. `max_encoder_tokens` is the most encoder tokens of one request.
    """

    kind: ClassVar[str] = "cross"

    max_encoder_tokens: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, as_int, "max_encoder_tokens", at_least=1)

    @property
    def can_prefix_cache(self) -> bool:
        return False

    @property
    def keeps_encoder_tokens(self) -> bool:
        return True

    @property
    def encoder_token_limit(self) -> int:
        return self.max_encoder_tokens

    def max_table_blocks(self, max_model_len: int) -> int:
        """Return the blocks of `max_encoder_tokens`; the request's length does not matter."""
        require_tokens("max_model_len", max_model_len)
        return ceil_div(self.max_encoder_tokens, self.block_size)

    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        require_lengths(max_model_len, max_num_batched_tokens)
        return ceil_div(self.max_encoder_tokens, self.block_size) * self.page_size_bytes


def _as_full_attention(spec: AttentionSpec) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        page_size_padded=spec.page_size_padded,
    )
