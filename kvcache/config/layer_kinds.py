"""The kinds of layers in a configuration, and the spec that one rank has of each.

Each kind has a section of its own, with only the keys it needs. Sizes are those of the whole model;
every section knows which sizes tensor-parallel ranks divide, and refuses those they cannot.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from kvcache.base.errors import ConfigurationError, shown
from kvcache.config.sections import Count, FewThousand, List, Section
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    dtype_size_bytes,
)


class Layer(Section):
    """`count` consecutive layers of one kind.

    `block_size`: tokens per block of these layers, if it differs from the cache's.
    """

    kind: str
    count: FewThousand = 1
    block_size: Count | None = None

    @property
    def is_beside_previous(self) -> bool:
        """Whether this adds to the layers before it instead of being layers of its own."""
        return False

    def misaligned(self, block_size: int) -> str | None:
        """Return what does not fit blocks of `block_size` tokens, and why; None if all does."""
        return None

    @abstractmethod
    def spec(self, block_size: int, dtype: str, tensor_parallel_size: int) -> KVCacheSpec | None:
        """Return the spec that each rank has of such a layer, None if it keeps nothing.

        Raises ConfigurationError for a block size that is `misaligned`.
        """

    @abstractmethod
    def indivisible(self, tensor_parallel_size: int) -> str | None:
        """Return what cannot be divided over `num_ranks`, and the rule for it; None if all can."""


class HeadsLayer(Layer):
    """Layers with KV heads, which tensor-parallel ranks divide.

    With more ranks than heads, several ranks keep the same head.
    """

    num_kv_heads: Count
    head_size: Count

    def heads_of_rank(self, tensor_parallel_size: int) -> int:
        """Return the number of KV heads that one rank keeps."""
        return max(1, self.num_kv_heads // tensor_parallel_size)

    def indivisible(self, tensor_parallel_size: int) -> str | None:
        size, heads = tensor_parallel_size, self.num_kv_heads
        if not heads % size or not size % heads:
            return None
        return f"{heads} num_kv_heads: heads must divide evenly over ranks, or ranks over heads"


class FullLayer(HeadsLayer):
    """Every token reads all tokens before it."""

    kind: Literal["full"] = "full"

    def spec(self, block_size: int, dtype: str, tensor_parallel_size: int) -> KVCacheSpec:
        heads = self.heads_of_rank(tensor_parallel_size)
        return FullAttentionSpec(block_size, heads, self.head_size, dtype)


class SlidingWindowLayer(HeadsLayer):
    """Every token reads itself and the `window_tokens - 1` tokens before it."""

    kind: Literal["sliding_window"] = "sliding_window"
    window_tokens: Count

    def spec(self, block_size: int, dtype: str, tensor_parallel_size: int) -> KVCacheSpec:
        heads = self.heads_of_rank(tensor_parallel_size)
        window = self.window_tokens
        return SlidingWindowSpec(block_size, heads, self.head_size, dtype, sliding_window=window)


class ChunkedLocalLayer(HeadsLayer):
    """Every token reads the tokens of its own chunk, which is `chunk_tokens` long."""

    kind: Literal["chunked_local"] = "chunked_local"
    chunk_tokens: Count

    def spec(self, block_size: int, dtype: str, tensor_parallel_size: int) -> KVCacheSpec:
        heads, chunk = self.heads_of_rank(tensor_parallel_size), self.chunk_tokens
        return ChunkedLocalAttentionSpec(
            block_size, heads, self.head_size, dtype, attention_chunk_size=chunk
        )

    def misaligned(self, block_size: int) -> str | None:
        if self.chunk_tokens % block_size == 0:
            return None
        return (
            f"chunk_tokens is {self.chunk_tokens}, no multiple of the block size {block_size}, so "
            "that a chunk would begin inside a block: choose a block size that divides it"
        )


class CrossLayer(HeadsLayer):
    """The decoder's tokens read those of an encoder, at most `max_encoder_tokens` per request.

    `beside_previous`: no separate layers; each of the `count` layers before has cross attention in
    addition to its own attention.
    """

    kind: Literal["cross"] = "cross"
    max_encoder_tokens: Count
    beside_previous: bool = False

    @property
    def is_beside_previous(self) -> bool:
        return self.beside_previous

    def spec(self, block_size: int, dtype: str, tensor_parallel_size: int) -> KVCacheSpec:
        heads, tokens = self.heads_of_rank(tensor_parallel_size), self.max_encoder_tokens
        return CrossAttentionSpec(
            block_size, heads, self.head_size, dtype, max_encoder_tokens=tokens
        )


class MLALayer(Layer):
    """Every token reads all before it; each has one latent vector of `head_size` elements.

    The vector has no heads to divide: every tensor-parallel rank keeps all of it.
    """

    kind: Literal["mla"] = "mla"
    head_size: Count

    def spec(self, block_size: int, dtype: str, tensor_parallel_size: int) -> KVCacheSpec:
        return MLAAttentionSpec(block_size, 1, self.head_size, dtype)

    def indivisible(self, tensor_parallel_size: int) -> str | None:
        return None


class MambaLayer(Layer):
    """A state per sequence instead of tokens: tensors of `state_shapes`, of `state_dtypes`.

    Tensor-parallel ranks divide the first size of every shape (channels, heads); the other sizes
    are the same on all. `state_dtypes` None: the model's dtype. `cache_mode` "align": states at the
    ends of blocks are kept, so that other requests can start from them; "none": none are kept.
    `num_speculative_blocks`: additional states, one per draft token.
    """

    kind: Literal["mamba"] = "mamba"
    state_shapes: Annotated[tuple[Annotated[tuple[Count, ...], List], ...], List]
    state_dtypes: Annotated[tuple[str, ...] | None, List] = None
    cache_mode: Literal["none", "align"] = "none"
    num_speculative_blocks: Annotated[int, Field(ge=0, le=4096)] = 0

    @field_validator("state_shapes")
    @classmethod
    def _have_a_size_to_divide(cls, shapes: tuple[tuple[int, ...], ...]) -> object:
        if not shapes or not all(shapes):
            raise ConfigurationError(
                f"{shown([list(shape) for shape in shapes])} lacks a size: write a list of sizes "
                "for each tensor of the state, as in [[4096, 3], [4096, 16]]"
            )
        return shapes

    @model_validator(mode="after")
    def _dtypes_belong_to_shapes(self) -> MambaLayer:
        for dtype in self.state_dtypes or ():
            dtype_size_bytes(dtype)
        if self.state_dtypes is not None and len(self.state_dtypes) != len(self.state_shapes):
            raise ConfigurationError(
                f"state_dtypes has {len(self.state_dtypes)} entries and state_shapes "
                f"{len(self.state_shapes)}: write one dtype per shape, or none at all"
            )
        return self

    def spec(self, block_size: int, dtype: str, tensor_parallel_size: int) -> KVCacheSpec:
        return MambaSpec(
            block_size,
            shapes=tuple((s[0] // tensor_parallel_size, *s[1:]) for s in self.state_shapes),
            dtypes=self.state_dtypes or (dtype,) * len(self.state_shapes),
            mamba_cache_mode=self.cache_mode,
            num_speculative_blocks=self.num_speculative_blocks,
        )

    def indivisible(self, tensor_parallel_size: int) -> str | None:
        for shape in self.state_shapes:
            if shape[0] % tensor_parallel_size:
                return (
                    f"a state of shape {list(shape)} in state_shapes: its first size must divide "
                    "evenly over ranks"
                )
        return None


class StatelessLayer(Layer):
    """Layers without a cache, such as those with only a feed-forward network.

    They count when pipeline stages divide the layers, and in the other layers' names.
    """

    kind: Literal["stateless"] = "stateless"

    def spec(self, block_size: int, dtype: str, tensor_parallel_size: int) -> None:
        return None

    def indivisible(self, tensor_parallel_size: int) -> str | None:
        return None


LayerConfig = Annotated[
    FullLayer
    | SlidingWindowLayer
    | ChunkedLocalLayer
    | MLALayer
    | MambaLayer
    | CrossLayer
    | StatelessLayer,
    Field(discriminator="kind"),
]
"""An entry of `model.layers`: its keys depend on its `kind`."""

LAYER_KINDS: Mapping[str, type[Layer]] = MappingProxyType(
    {str(layer.model_fields["kind"].default): layer for layer in get_args(get_args(LayerConfig)[0])}
)
"""The section of each kind, by its name in files."""
