"""Additions to numba: columns by address, memory comparison and copies, calls by address.

All modules with compiled functions import this one. Python calls a `kernel`. An `inner` function is
compiled into the bodies of its callers. A `routine` is a function that kernels call. Compiled code
is cached under a key that covers the text of all modules of this package (`base/compiled.py`). In
plain mode (`NUMBA_DISABLE_JIT=1`) everything is ordinary Python. Nothing here checks addresses or
sizes: they come from the columns.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from kvcache.base.compiled import IS_CHECKED, IS_PLAIN, Signature, array_type, compiled

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OPTIONS = {
    "nogil": False,  # no other thread sees a kernel's unfinished changes
    "boundscheck": IS_CHECKED,
    "error_model": "numpy",
    "_nrt": False,  # kernels allocate nothing, so numba need not count references to arrays
    "no_cfunc_wrapper": True,
}


def family_of(package: Path) -> str:
    """Return a hash of the text of all modules of a package on which compiled code depends: those
    with compiled functions, with numbers that they contain, or with the order of the columns."""
    texts = [path.read_bytes() for path in sorted(package.rglob("*.py"))]
    marks = (b"\n@inner\n", b"\n@routine\n", b"\n@kernel(", b" = range(", b"\nclass Columns(")
    texts = [text for text in texts if any(mark in text for mark in marks)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


_FAMILY = family_of(Path(__file__).parent)

INT = types.intp
CORE = INT
"""The first argument of kernels: the address of a table with the columns' addresses and shapes."""
INTS = array_type("int32", is_read=True)
NEW_INTS = array_type("int32")
INT_ROWS = array_type("int32", 2, is_read=True)
NEW_INT_ROWS = array_type("int32", 2)
BYTE_ROWS = array_type("uint8", 2, is_read=True)
NEW_BYTE_ROWS = array_type("uint8", 2)
NOTHING = types.void


def kernel(*signature: Signature, checks_types: bool = False) -> Callable[[_Function], _Function]:
    """Compile a function that Python calls. The signature gives the type of the result, then those
    of the arguments.

    Calls skip numba's check of argument types, which takes longer than many kernels run: an array
    of a wrong type would be misread. With `checks_types`, and whenever indices are checked, a wrong
    type raises TypeError. Kernels that get arrays from outside need it.
    """
    result, *arguments = signature
    compile_now = compiled(result(*arguments), family=_FAMILY, **_OPTIONS)

    def compile_entry(function: _Function) -> _Function:
        made: Any = compile_now(function)
        if checks_types or IS_PLAIN or IS_CHECKED:
            return cast(_Function, made)
        return cast(_Function, made.overloads[made.signatures[0]].entry_point)

    return compile_entry


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]  # numba's
    """A library that is optimised and turned into machine code only as a part of kernels."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):  # type: ignore[misc]  # numba's
    """Lower a function just far enough that kernels can include it."""

    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        # Numba identifies compiled functions by a builtin method. Any unique one will do that fails
        # when Python calls it.
        name: Any = list[int]().pop
        state.targetctx.insert_user_function(name, state["cr"].fndesc, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=name)
        return True


class _PartCompiler(CompilerBase):  # type: ignore[misc]  # numba's
    """Compile with a lowering pass of its own instead of numba's."""

    def define_pipelines(self) -> list[Any]:
        made = DefaultPassBuilder.define_nopython_pipeline(self.state)
        made.passes = [
            (_PartLowering if p is NativeLowering else p, text) for p, text in made.passes
        ]
        made._finalized = False
        made.finalize()
        return [made]


_PART_OPTIONS: Any = {**_OPTIONS, "no_cpython_wrapper": True, "pipeline_class": _PartCompiler}


def inner(function: _Function) -> _Function:
    """Compile a function into the bodies of its callers."""
    return _part(function, forceinline=True)


def routine(function: _Function) -> _Function:
    """Compile a function that kernels call. It is compiled once, for 64-bit integers."""
    return _part(function)


def _part(function: _Function, **options: Any) -> _Function:
    made: Any = njit(**_PART_OPTIONS, **options)(function)
    if not IS_PLAIN:
        find = made.get_call_template
        made.get_call_template = lambda args, names: find([_widened(t) for t in args], names)
    return cast(_Function, made)


def _widened(kind: Any) -> Any:
    """Return an argument's type, with 64 bits for every integer."""
    return types.int64 if isinstance(kind, (types.Integer, types.IntegerLiteral)) else kind


def columns_at(result: type, columns: Sequence[tuple[int, str, int]]) -> Any:
    """Return a function that makes a named tuple `result` of some columns behind an address. Each
    entry of `columns` is a column's number in the address table, its dtype and its number of
    dimensions."""
    kinds = [types.Array(getattr(types, dtype), ndim, "C") for _, dtype, ndim in columns]
    made = types.NamedTuple(kinds, result)
    word = ir.IntType(64)

    @intrinsic  # type: ignore[untyped-decorator]  # numba's
    def columns_of(typing_context: Any, core: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            entries, arrays = builder.inttoptr(values[0], word.as_pointer()), []
            for (number, _, ndim), kind in zip(columns, kinds, strict=True):
                places = [ir.Constant(word, 3 * number + k) for k in range(ndim + 1)]
                address, *shape = [builder.load(builder.gep(entries, [at])) for at in places]
                item = context.get_data_type(kind.dtype)
                size = ir.Constant(word, context.get_abi_sizeof(item))
                strides = [size] if ndim == 1 else [builder.mul(shape[1], size), size]
                array = context.make_array(kind)(context, builder)
                populate_array(
                    array,
                    data=builder.inttoptr(address, item.as_pointer()),
                    shape=cgutils.pack_array(builder, shape),
                    strides=cgutils.pack_array(builder, strides),
                    itemsize=size,
                    meminfo=None,
                )
                arrays.append(array._getvalue())
            return context.make_tuple(builder, made, arrays)

        return made(types.int64), generate

    return columns_of


def _call_by_address(num_arguments: int) -> Any:
    """Return `call(address, arguments)`. All arguments and the result have 64 bits."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba's
    def call(typing_context: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            word = ir.IntType(64)
            kind = ir.FunctionType(word, [word] * num_arguments)
            function = builder.inttoptr(values[0], kind.as_pointer())
            each = [builder.extract_value(values[1], i) for i in range(num_arguments)]
            return builder.call(function, each)

        arguments_type = types.UniTuple(types.int64, num_arguments)
        return types.int64(types.int64, arguments_type), generate

    return call


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def _call_for_pair(typing_context: Any, address: Any, data: Any, num_bytes: Any) -> Any:
    """Call a function that returns two words in registers, low word first: XXH3_128bits."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.LiteralStructType([word, word]), [word, word])
        made = builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return cgutils.pack_array(builder, [builder.extract_value(made, i) for i in range(2)])

    pair = types.UniTuple(types.int64, 2)
    return pair(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def _are_same(typing_context: Any, one: Any, other: Any, num_bytes: Any) -> Any:
    """Return whether the bytes at two addresses are equal."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        byte = cgutils.voidptr_t
        kind = ir.FunctionType(ir.IntType(32), [byte, byte, ir.IntType(64)])
        function = cgutils.get_or_insert_function(builder.module, kind, "memcmp")
        first, second = (builder.inttoptr(value, byte) for value in values[:2])
        answer = builder.call(function, [first, second, values[2]])
        return builder.icmp_signed("==", answer, ir.Constant(ir.IntType(32), 0))

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def _are_same_64(typing_context: Any, one: Any, other: Any) -> Any:
    """Return whether 64 bytes at two addresses are equal, in a few instructions."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), 8)
        first, second = (
            builder.load(builder.inttoptr(value, line.as_pointer()), align=4) for value in values
        )
        differs = builder.icmp_unsigned("!=", first, second)
        bits = builder.bitcast(differs, ir.IntType(8))
        return builder.icmp_unsigned("==", bits, ir.Constant(ir.IntType(8), 0))

    return types.boolean(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def _int32_at(typing_context: Any, address: Any) -> Any:
    """Return the int32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(builder.inttoptr(values[0], ir.IntType(32).as_pointer()))

    return types.int32(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def _copy(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy bytes from one address to another. The ranges must not overlap."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        places = [builder.inttoptr(value, cgutils.voidptr_t) for value in values[:2]]
        alignment = ir.Constant(ir.IntType(64), 1)
        cgutils.raw_memcpy(builder, *places, values[2], alignment)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _plain_are_same(one: int, other: int, num_bytes: int) -> bool:
    return ctypes.string_at(int(one), int(num_bytes)) == ctypes.string_at(
        int(other), int(num_bytes)
    )


def _plain_copy(target: int, source: int, num_bytes: int) -> None:
    ctypes.memmove(int(target), int(source), int(num_bytes))


def _plain_are_same_64(one: int, other: int) -> bool:
    return _plain_are_same(one, other, 64)


def _plain_call_3(address: int, arguments: tuple[int, int, int]) -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(int(address))
    return int(function(*map(int, arguments)))


def _plain_int32_at(address: int) -> int:
    return ctypes.c_int32.from_address(int(address)).value


call_3: Any = _plain_call_3 if IS_PLAIN else _call_by_address(3)
call_for_pair: Any = _call_for_pair
are_same: Any = _plain_are_same if IS_PLAIN else _are_same
are_same_64: Any = _plain_are_same_64 if IS_PLAIN else _are_same_64
int32_at: Any = _plain_int32_at if IS_PLAIN else _int32_at
copy: Any = _plain_copy if IS_PLAIN else _copy


@inner
def address_of(array: Any, i: int) -> int:
    """Return the address of item or row `i`. Uses 64 bits, in plain mode too."""
    return array.ctypes.data + np.int64(i) * np.int64(array.strides[0])
