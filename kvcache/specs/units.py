"""Sizes of elements, and checks of counts.

Knows dtypes by name only, so that it does not need torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvcache.base.arguments import as_int
from kvcache.base.errors import ConfigurationError, shown

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


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype, given by name or as torch's object.

    Raises ConfigurationError for an unknown dtype.
    """
    is_of_torch = type(dtype).__name__ == "dtype" and type(dtype).__module__ == "torch"
    name = str(dtype).removeprefix("torch.") if is_of_torch else dtype
    if not isinstance(name, str) or name not in DTYPE_SIZES_BYTES:
        known = ", ".join(DTYPE_SIZES_BYTES)
        raise ConfigurationError(f"dtype {shown(dtype)} is not known: use one of {known}")
    return str.__str__(name)


def dtype_size_bytes(dtype: str) -> int:
    """Return the bytes of one element of `dtype`; raises ConfigurationError for unknown names."""
    size = DTYPE_SIZES_BYTES.get(dtype) if type(dtype) is str else None
    return DTYPE_SIZES_BYTES[dtype_name(dtype)] if size is None else size


def require_count(name: str, value: object, *, at_least: int = 1) -> int:
    """Return an integer of at least `at_least`; raises ConfigurationError otherwise."""
    return as_int(name, value, at_least, error=ConfigurationError)


def require_tokens(name: str, value: object) -> int:
    """Return a number of tokens, 0 or more; raises ConfigurationError otherwise."""
    return as_int(name, value, error=ConfigurationError)


def require_lengths(max_model_len: object, max_num_batched_tokens: object) -> tuple[int, int]:
    """Return the tokens of the longest request and of a step; raises ConfigurationError."""
    return (
        require_tokens("max_model_len", max_model_len),
        require_tokens("max_num_batched_tokens", max_num_batched_tokens),
    )


def ceil_div(dividend: int, divisor: int) -> int:
    """Return `dividend / divisor`, rounded up."""
    return -(-dividend // divisor)
