"""One tensor inside a page, as a worker shows it to a layer.

Free of torch: dtypes are names. Its spec has checked shapes and dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvcache.specs.units import dtype_size_bytes


@dataclass(frozen=True)
class PageTensor:
    """A contiguous tensor of `shape`, `offset_bytes` after the start of every page of a layer."""

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
