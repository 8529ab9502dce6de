"""What numba lacks: arrays by their address, comparing and copying memory, calls by address.

Under all modules whose functions are compiled. `kernel` is what Python calls, `inner` goes into the
body of whatever calls it, `routine` is called as a function by kernels. What is compiled is kept by
the text of all modules of this package (`compiled.py`). In plain mode (`NUMBA_DISABLE_JIT=1`) all
of it is ordinary Python. Refuses nothing: addresses and sizes come from the columns.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvcache.compiled import IS_CHECKED, IS_PLAIN, Signature, array_type, compiled

_Function = TypeVar("_Function", bound=Callable[..., Any])
_njit: Any = njit
_intrinsic: Any = intrinsic
_types: Any = types
_ir: Any = ir
_cgutils: Any = cgutils

_OPTIONS = {"nogil": False, "boundscheck": IS_CHECKED, "error_model": "numpy"}


def _family() -> str:
    """Return what stands for the text of all modules of this package that have such functions."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    marks = (b"\n@inner\n", b"\n@routine\n", b"\n@kernel(")
    texts = [text for text in texts if any(mark in text for mark in marks)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


_FAMILY = _family()

BOOK = array_type("int64")
"""All columns of a core, as kernels get them."""
INT = types.intp
INTS = array_type("int32", is_read=True)
NEW_INTS = array_type("int32")
INT_ROWS = array_type("int32", 2, is_read=True)
NEW_INT_ROWS = array_type("int32", 2)
BYTE_ROWS = array_type("uint8", 2, is_read=True)
NEW_BYTE_ROWS = array_type("uint8", 2)
NOTHING = types.void


def kernel(*signature: Signature) -> Callable[[_Function], _Function]:
    """Compile a function that Python calls: its result's type, then those of its arguments."""
    result, *arguments = signature
    return compiled(result(*arguments), family=_FAMILY, holds_gil=True)


def inner(function: _Function) -> _Function:
    """Compile a function into the body of those that call it."""
    made: _Function = _njit(forceinline=True, **_OPTIONS)(function)
    return made


def routine(function: _Function) -> _Function:
    """Compile a function that kernels call."""
    made: _Function = _njit(**_OPTIONS)(function)
    return made


@_intrinsic  # type: ignore[untyped-decorator]  # numba's
def _pointer(typing_context: Any, address: Any) -> Any:
    """Return an address as a pointer, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], _cgutils.voidptr_t)

    return _types.voidptr(_types.int64), generate


def _call_by_address(num_arguments: int) -> Any:
    """Return `call(address, arguments)`; all arguments and the result are 64 bits wide."""

    @_intrinsic  # type: ignore[untyped-decorator]  # numba's
    def call(typing_context: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            word = _ir.IntType(64)
            kind = _ir.FunctionType(word, [word] * num_arguments)
            function = builder.inttoptr(values[0], kind.as_pointer())
            each = [builder.extract_value(values[1], i) for i in range(num_arguments)]
            return builder.call(function, each)

        arguments_type = _types.UniTuple(_types.int64, num_arguments)
        return _types.int64(_types.int64, arguments_type), generate

    return call


@_intrinsic  # type: ignore[untyped-decorator]  # numba's
def _call_for_pair(typing_context: Any, address: Any, data: Any, num_bytes: Any) -> Any:
    """Call a function that returns two words in registers: XXH3_128bits, low word first."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = _ir.IntType(64)
        kind = _ir.FunctionType(_ir.LiteralStructType([word, word]), [word, word])
        made = builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return _cgutils.pack_array(builder, [builder.extract_value(made, i) for i in range(2)])

    pair = _types.UniTuple(_types.int64, 2)
    return pair(_types.int64, _types.int64, _types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]  # numba's
def _are_same(typing_context: Any, one: Any, other: Any, num_bytes: Any) -> Any:
    """Say whether so many bytes at two addresses are equal."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        byte = _cgutils.voidptr_t
        kind = _ir.FunctionType(_ir.IntType(32), [byte, byte, _ir.IntType(64)])
        function = _cgutils.get_or_insert_function(builder.module, kind, "memcmp")
        first, second = (builder.inttoptr(value, byte) for value in values[:2])
        answer = builder.call(function, [first, second, values[2]])
        return builder.icmp_signed("==", answer, _ir.Constant(_ir.IntType(32), 0))

    return _types.boolean(_types.int64, _types.int64, _types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]  # numba's
def _are_same_64(typing_context: Any, one: Any, other: Any) -> Any:
    """Say whether 64 bytes at two addresses are equal: a few instructions, no call."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        line = _ir.VectorType(_ir.IntType(64), 8)
        first, second = (
            builder.load(builder.inttoptr(value, line.as_pointer()), align=4) for value in values
        )
        differs = builder.icmp_unsigned("!=", first, second)
        bits = builder.bitcast(differs, _ir.IntType(8))
        return builder.icmp_unsigned("==", bits, _ir.Constant(_ir.IntType(8), 0))

    return _types.boolean(_types.int64, _types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]  # numba's
def _copy(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy so many bytes from one address to another; they do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        places = [builder.inttoptr(value, _cgutils.voidptr_t) for value in values[:2]]
        alignment = _ir.Constant(_ir.IntType(64), 1)
        _cgutils.raw_memcpy(builder, *places, values[2], alignment)
        return context.get_dummy_value()

    return _types.void(_types.int64, _types.int64, _types.int64), generate


def _plain_are_same(one: int, other: int, num_bytes: int) -> bool:
    return ctypes.string_at(int(one), int(num_bytes)) == ctypes.string_at(
        int(other), int(num_bytes)
    )


def _plain_copy(target: int, source: int, num_bytes: int) -> None:
    ctypes.memmove(int(target), int(source), int(num_bytes))


def _plain_are_same_64(one: int, other: int) -> bool:
    return _plain_are_same(one, other, 64)


pointer: Any = _pointer
call_3: Any = _call_by_address(3)
call_for_pair: Any = _call_for_pair
are_same: Any = _plain_are_same if IS_PLAIN else _are_same
are_same_64: Any = _plain_are_same_64 if IS_PLAIN else _are_same_64
copy: Any = _plain_copy if IS_PLAIN else _copy


@inner
def address_of(array: Any, i: int) -> int:
    """Return the address of item or row `i`, in 64 bits also where Python runs this."""
    return array.ctypes.data + np.int64(i) * np.int64(array.strides[0])
