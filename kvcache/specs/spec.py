"""The interface of every attention kind.

An engine states a `KVCacheSpec` per layer; the planner, managers and workers query it. Refuses
invalid sizes. Knows nothing of requests, ranks or free memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.base.arguments import as_int, as_objects, check_fields, check_kind
from kvcache.base.errors import ConfigurationError
from kvcache.specs.units import ceil_div, dtype_size_bytes, require_tokens

if TYPE_CHECKING:
    from kvcache.specs.attention import FullAttentionSpec


@dataclass(frozen=True)
class PageTensor:
    """A contiguous tensor of `shape`, `offset_bytes` after the start of every page of a layer.

    Workers show it to a layer. Its spec has checked shape and dtype.
    """

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return dtype_size_bytes(self.dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in one page."""
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True)
class KVCacheSpec(ABC):
    """What a layer keeps per block of `block_size` tokens.

    Kinds differ only in their answers: code that needs to know whether a layer can do something
    asks the spec, not its class. Specs are equal if all fields are equal.
    """

    kind: ClassVar[str]
    """Name of the kind in messages, files and configurations."""

    block_size: int

    def __post_init__(self) -> None:
        check_fields(self, as_int, "block_size", at_least=1)

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes that one block of this layer takes in memory, including padding."""

    @property
    @abstractmethod
    def real_page_size_bytes(self) -> int:
        """Bytes of content in one block of this layer."""

    @property
    @abstractmethod
    def alignment_bytes(self) -> int:
        """Every page of this layer starts at a multiple of this."""

    @property
    @abstractmethod
    def can_prefix_cache(self) -> bool:
        """Whether another request can start from this layer's blocks."""

    @property
    def supports_eagle(self) -> bool:
        """Whether a hit is valid without its last block, which EAGLE computes again."""
        return True

    @property
    def reads_whole_prefix(self) -> bool:
        """Whether a token may read every token before it, so that no block can be dropped."""
        return False

    @property
    def keeps_encoder_tokens(self) -> bool:
        """Whether the cache holds an encoder's tokens, not the request's own."""
        return False

    @property
    def num_state_blocks(self) -> int | None:
        """Blocks that a request needs, whatever its length; None if tokens are kept."""
        return None

    @property
    def page_tensors(self) -> tuple[PageTensor, ...]:
        """The tensors in a page of this layer; empty if workers cannot show them.

        A layer that keeps tokens has one tensor, whose last axes are tokens, heads and head size.
        """
        return ()

    def max_table_blocks(self, max_model_len: int) -> int:
        """Return how many columns the block table of a request of `max_model_len` tokens has."""
        return ceil_div(require_tokens("max_model_len", max_model_len), self.block_size)

    @property
    def max_draft_tokens(self) -> int | None:
        """Most draft tokens of one forward that can be rolled back; None if any number can."""
        return None

    @property
    def encoder_token_limit(self) -> int:
        """Most encoder tokens of one request; 0 if the kind keeps none."""
        return 0

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many leading tokens are never read again after `num_computed_tokens` tokens.

        Blocks that contain only such tokens can be dropped. Divided by the block size, it must be
        the `num_skipped` of the kind (`core/kinds/`).
        """
        require_tokens("num_computed_tokens", num_computed_tokens)
        return 0

    @abstractmethod
    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Return the most bytes one request of `max_model_len` tokens takes in this layer."""

    @abstractmethod
    def with_block_size(self, block_size: int) -> KVCacheSpec | None:
        """Return a copy with blocks of `block_size` tokens, None if this layer does not support it.

        The page grows with the block if tokens are kept.
        """

    @abstractmethod
    def with_page_size_padded(self, page_size_bytes: int) -> KVCacheSpec | None:
        """Return a copy whose pages take `page_size_bytes`, None if this kind cannot be padded."""

    def as_full_attention(self) -> FullAttentionSpec | None:
        """Return the full attention that can replace this layer, None if none can."""
        return None

    def without_remembered_limit(self) -> KVCacheSpec:
        """Return a copy without a remembered window or chunk, which does not affect the cache."""
        return self

    @classmethod
    def merge(cls, specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
        """Return the one spec that serves all of `specs`, which must be equal.

        Raises ConfigurationError if `specs` is empty, or with the first field that differs.
        """
        first, *others = require_kind(cls, specs)
        for other in others:
            difference = first_difference(first, other)
            if difference is not None:
                raise ConfigurationError(
                    f"layers of one KV cache group differ in {difference}: give them groups of "
                    "their own"
                )
        return first

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a message; `spec_from_dict` reads them."""
        return {"kind": self.kind, **{f.name: getattr(self, f.name) for f in fields(self)}}


@dataclass(frozen=True)
class Difference:
    """The first field in which two specs differ, and its value in each."""

    field: str
    one: object
    other: object

    def __str__(self) -> str:
        return f"{self.field} ({self.one}, {self.other})"


def first_difference(one: KVCacheSpec, other: KVCacheSpec) -> Difference | None:
    """Return the first field in which two specs differ, beginning with the kind; None if equal."""
    check_kind("one", one, KVCacheSpec, ConfigurationError)
    check_kind("other", other, KVCacheSpec, ConfigurationError)
    if type(one) is not type(other):
        return Difference("kind", one.kind, other.kind)
    for field in fields(one):
        values = getattr(one, field.name), getattr(other, field.name)
        if values[0] != values[1]:
            return Difference(field.name, *values)
    return None


def as_specs(specs: object) -> tuple[KVCacheSpec, ...]:
    """Return the specs of a list or another iterable; raises ConfigurationError otherwise."""
    listed: tuple[KVCacheSpec, ...] = as_objects("specs", specs, KVCacheSpec, ConfigurationError)
    return listed


def require_kind(cls: type[KVCacheSpec], specs: Sequence[KVCacheSpec]) -> tuple[KVCacheSpec, ...]:
    """Return specs, at least one, all of one kind; raises ConfigurationError otherwise."""
    listed = as_specs(specs)
    if not listed:
        raise ConfigurationError("no specs to merge: a KV cache group has at least one layer")
    for spec in listed:
        if type(spec) is not type(listed[0]) or not isinstance(spec, cls):
            raise ConfigurationError(
                f"layers of one KV cache group differ in kind ({listed[0].kind}, {spec.kind}): "
                "give them groups of their own"
            )
    return listed
