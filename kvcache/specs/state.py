"""The kind that keeps a state instead of tokens: Mamba and other linear recurrences.

`spec.py` has the interface. Refuses unknown dtypes, pages padded below their content, and unknown
cache modes.

    mode none     one state per request, overwritten                    [state]
    mode align    the state after a block's last token stays in that      [null null b4 | b9]
                  block; the block after it takes the running state              ^ can be hit
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import lcm, prod
from typing import ClassVar

from kvcache.base.arguments import as_int, check_fields
from kvcache.base.errors import ConfigurationError, shown
from kvcache.specs.spec import KVCacheSpec, PageTensor
from kvcache.specs.units import (
    ceil_div,
    dtype_name,
    dtype_size_bytes,
    require_count,
    require_lengths,
    require_tokens,
)

MAMBA_CACHE_MODES = ("none", "align")


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A layer that keeps one state per sequence: tensors of `shapes`, of `dtypes`, in one page.

    The tensors of a page follow each other, each aligned to its element size. A block stands for
    `block_size` tokens and holds the state after the last of them (or after the last token so
    far). `num_speculative_blocks`: additional states, one per draft token, so that rejected drafts
    can be rolled back. `page_size_padded`: bytes that a page is padded to.
    """

    kind: ClassVar[str] = "mamba"

    shapes: tuple[tuple[int, ...], ...] = field(kw_only=True)
    dtypes: tuple[str, ...] = field(kw_only=True)
    mamba_cache_mode: str = field(default="none", kw_only=True)
    num_speculative_blocks: int = field(default=0, kw_only=True)
    page_size_padded: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shapes", _as_shapes(self.shapes))
        object.__setattr__(self, "dtypes", _as_dtypes(self.dtypes))
        if len(self.shapes) != len(self.dtypes) or not self.shapes:
            raise ConfigurationError(
                f"a state of {len(self.shapes)} shapes and {len(self.dtypes)} dtypes: give one "
                "dtype per shape, and at least one of each"
            )
        mode = self.mamba_cache_mode
        if not isinstance(mode, str) or mode not in MAMBA_CACHE_MODES:
            raise ConfigurationError(
                f"mamba_cache_mode is {shown(self.mamba_cache_mode)}: use one of "
                f"{', '.join(MAMBA_CACHE_MODES)}"
            )
        check_fields(self, as_int, "num_speculative_blocks", at_least=0)
        if self.page_size_padded is None:
            return
        check_fields(self, as_int, "page_size_padded", at_least=1)
        element = self.alignment_bytes
        if self.page_size_padded < self.real_page_size_bytes or self.page_size_padded % element:
            raise ConfigurationError(
                f"page_size_padded is {self.page_size_padded} bytes, but a state takes "
                f"{self.real_page_size_bytes} bytes of {', '.join(self.dtypes)}: pad to at least "
                f"that, in multiples of {element}"
            )

    @property
    def state_offsets_bytes(self) -> tuple[int, ...]:
        """First byte of each state tensor inside a page."""
        return self._offsets_and_end()[:-1]

    @property
    def page_tensors(self) -> tuple[PageTensor, ...]:
        """One tensor per shape, in order."""
        return tuple(map(PageTensor, self.state_offsets_bytes, self.shapes, self.dtypes))

    @property
    def real_page_size_bytes(self) -> int:
        return self._offsets_and_end()[-1]

    @property
    def page_size_bytes(self) -> int:
        if self.page_size_padded is not None:
            return self.page_size_padded
        return ceil_div(self.real_page_size_bytes, self.alignment_bytes) * self.alignment_bytes

    @property
    def alignment_bytes(self) -> int:
        return lcm(*map(dtype_size_bytes, self.dtypes))

    @property
    def can_prefix_cache(self) -> bool:
        return self.mamba_cache_mode == "align"

    @property
    def supports_eagle(self) -> bool:
        """False: the state before the last one is not kept."""
        return False

    @property
    def num_state_blocks(self) -> int | None:
        """One state, or with `align` one to read and one to write; and the drafts'."""
        return (2 if self.mamba_cache_mode == "align" else 1) + self.num_speculative_blocks

    def max_table_blocks(self, max_model_len: int) -> int:
        """Return one column, or with `align` one per block; and the drafts'."""
        max_model_len = require_tokens("max_model_len", max_model_len)
        is_aligned = self.mamba_cache_mode == "align"
        num_states = ceil_div(max_model_len, self.block_size) if is_aligned else 1
        return num_states + self.num_speculative_blocks

    @property
    def max_draft_tokens(self) -> int | None:
        return self.num_speculative_blocks

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the number of tokens before the block that holds the newest state.

        With mode `none` there is only one block.
        """
        num_computed_tokens = require_tokens("num_computed_tokens", num_computed_tokens)
        if self.mamba_cache_mode == "none":
            return 0
        return max(0, num_computed_tokens - 1) // self.block_size * self.block_size

    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Return the bytes of the states that a request holds at a time."""
        require_lengths(max_model_len, max_num_batched_tokens)
        return (self.num_state_blocks or 0) * self.page_size_bytes

    def with_block_size(self, block_size: int) -> KVCacheSpec | None:
        """Return a copy that keeps a state every `block_size` tokens; its page stays the same."""
        return replace(self, block_size=block_size)

    def with_page_size_padded(self, page_size_bytes: int) -> KVCacheSpec | None:
        page_size_padded = require_count("page_size_bytes", page_size_bytes)
        return replace(self, page_size_padded=page_size_padded)

    def _offsets_and_end(self) -> tuple[int, ...]:
        offsets = [0]
        for shape, dtype, after in zip(
            self.shapes, self.dtypes, (*self.dtypes[1:], self.dtypes[-1]), strict=True
        ):
            end = offsets[-1] + prod(shape) * dtype_size_bytes(dtype)
            element = dtype_size_bytes(after)
            offsets.append(ceil_div(end, element) * element)
        return tuple(offsets)


def _as_shapes(shapes: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes as tuples; raises ConfigurationError unless all sizes are counts."""
    try:
        made = tuple(tuple(shape) for shape in shapes)
    except TypeError as error:  # not a list of lists
        raise ConfigurationError(
            f"shapes is {shown(shapes)}: give one list of sizes per state tensor"
        ) from error
    what = "a size of a state's shape"
    return tuple([tuple([require_count(what, size) for size in shape]) for shape in made])


def _as_dtypes(dtypes: Iterable[str]) -> tuple[str, ...]:
    """Return the dtypes as a tuple; raises ConfigurationError for an unknown one."""
    if not isinstance(dtypes, (tuple, list)):
        raise ConfigurationError(f"dtypes is {shown(dtypes)}: give one dtype per state tensor")
    return tuple([dtype_name(dtype) for dtype in dtypes])
