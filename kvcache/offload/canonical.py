"""A rank's KV caches as tiers see them: rows of bytes with the block outermost.

Used between a worker, which knows layers, and handlers, which copy blocks. Every layout becomes
tensors of shape `(num_blocks, page_bytes)` of one-byte elements. For each KV cache group,
references say which tensors hold its pages and how much of each page is content:

    block outermost, all layers of a block side by side      one tensor
    one allocation per layer, block outermost                one tensor per layer
    keys before values, (2, num_blocks, ...)                 two tensors per layer

The worker knows how to split a layout. Free of torch: a tensor is any object with a shape and an
element size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvcache.base.arguments import as_int, as_tuple, check_fields, check_methods
from kvcache.base.errors import ConfigurationError


class ByteRows(Protocol):
    """The interface of a tensor."""

    @property
    def shape(self) -> Sequence[int]:
        """Length in each dimension."""

    def element_size(self) -> int:
        """Return bytes of one element."""


Rows_co = TypeVar("Rows_co", bound=ByteRows, covariant=True)


@dataclass(frozen=True, eq=False)
class CanonicalKVCacheTensor(Generic[Rows_co]):
    """Pages of `page_bytes`, one per block: `tensor` is `(num_blocks, page_bytes)` int8.

    A view: writing to it writes the pool. Rows need not be adjacent, bytes of a row are. Raises
    ConfigurationError for another shape or wider elements.
    """

    tensor: Rows_co

    def __post_init__(self) -> None:
        check_methods("tensor", self.tensor, ("element_size",), ConfigurationError)
        as_tuple("shape", getattr(self.tensor, "shape", None), ConfigurationError)
        shape, element_bytes = tuple(self.tensor.shape), self.tensor.element_size()
        if len(shape) != 2 or shape[1] < 1 or element_bytes != 1:
            raise ConfigurationError(
                f"canonical tensor of shape {shape} with elements of {element_bytes} bytes: pass "
                "a view of shape (num_blocks, page_bytes) with elements of one byte"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks, including the null block."""
        return int(self.tensor.shape[0])

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in this tensor, including padding."""
        return int(self.tensor.shape[1])


@dataclass(frozen=True)
class CanonicalKVCacheRef:
    """Pages of one group: the first `page_bytes` bytes of each row of tensor `tensor_idx`.

    `page_bytes` excludes padding. Raises ConfigurationError for a negative index or no bytes.
    """

    tensor_idx: int
    page_bytes: int

    def __post_init__(self) -> None:
        check_fields(self, as_int, "tensor_idx")
        check_fields(self, as_int, "page_bytes", at_least=1)


@dataclass(frozen=True, eq=False)
class CanonicalKVCaches(Generic[Rows_co]):
    """All tensors of a rank; `group_refs[g]` says where group `g`'s pages are in them.

    Raises ConfigurationError for tensors of different numbers of blocks, or a reference to a tensor
    that does not exist or has shorter pages.
    """

    tensors: tuple[CanonicalKVCacheTensor[Rows_co], ...]
    group_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]

    def __post_init__(self) -> None:
        check_fields(self, as_tuple, "tensors", kind=CanonicalKVCacheTensor)
        check_fields(self, as_tuple, "group_refs")
        by_group = [
            as_tuple(f"group_refs[{group}]", of_group, ConfigurationError, CanonicalKVCacheRef)
            for group, of_group in enumerate(self.group_refs)
        ]
        object.__setattr__(self, "group_refs", tuple(by_group))
        lengths = sorted({tensor.num_blocks for tensor in self.tensors})
        if len(lengths) > 1:
            raise ConfigurationError(
                f"canonical tensors of {', '.join(map(str, lengths))} blocks: all of them hold the "
                "same blocks"
            )
        for group, refs in enumerate(self.group_refs):
            for ref in refs:
                if ref.tensor_idx >= len(self.tensors):
                    raise ConfigurationError(
                        f"group {group} refers to tensor {ref.tensor_idx}, there are "
                        f"{len(self.tensors)}"
                    )
                page_bytes = self.tensors[ref.tensor_idx].page_bytes
                if ref.page_bytes > page_bytes:
                    raise ConfigurationError(
                        f"group {group} has pages of {ref.page_bytes} bytes in tensor "
                        f"{ref.tensor_idx}, whose pages have {page_bytes}"
                    )

    @property
    def rows(self) -> tuple[Rows_co, ...]:
        """The tensors themselves, in order."""
        return tuple(tensor.tensor for tensor in self.tensors)

    @property
    def num_blocks(self) -> int:
        """Blocks of every tensor; 0 without tensors."""
        return self.tensors[0].num_blocks if self.tensors else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all tensors."""
        return sum(tensor.page_bytes for tensor in self.tensors)
