"""Sizes of elements, and the two rules of counting that every spec needs.

Stands below the specs. Knows dtypes by name only, so that nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvcache.errors import ConfigurationError, shown

DTYPE_SIZES_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
        "float64": 8,
    }
)


def dtype_size_bytes(dtype: str) -> int:
    """Return the bytes of one element of `dtype`; raises ConfigurationError for unknown names."""
    size = DTYPE_SIZES_BYTES.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        known = ", ".join(DTYPE_SIZES_BYTES)
        raise ConfigurationError(f"dtype {shown(dtype)} is not known: use one of {known}")
    return size


def require_count(name: str, value: object, *, at_least: int = 1) -> None:
    """Raise ConfigurationError unless `value` is an int (not a bool) of `at_least` that much."""
    if type(value) is not int or value < at_least:
        raise ConfigurationError(
            f"{name} is {shown(value)}, but must be a whole number of at least {at_least}: raise it"
        )


def ceil_div(dividend: int, divisor: int) -> int:
    """Return `dividend / divisor`, rounded up."""
    return -(-dividend // divisor)
