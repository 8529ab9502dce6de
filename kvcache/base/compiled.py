"""Compiles functions over arrays to machine code, for work that numpy cannot do in a few calls.

numba compiles a function when its module is imported, only for the given signatures, so that no
step ever waits for a compiler. The code is cached next to the source, and later processes load it.
A service imports such modules when it starts; a command that only prints help does not.

The cache key covers the text of the function's source file, the processor and the versions
(`_Kept`). So a function must not call compiled functions of other files, whose changes the key
would miss, unless its `family` covers the text of all those files.

numba's environment has two modes for tests and debuggers: `NUMBA_DISABLE_JIT=1` compiles nothing,
and `NUMBA_BOUNDSCHECK=1` checks every index against its array's shape.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar, cast

import llvmlite
import numba
from numba import config, njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.runtime.nrt import rtsys

from kvcache.base.logs import get_logger

logger = get_logger(__name__)

Signature: TypeAlias = Any
"""A result type called with the argument types: `types.int64(array_type("int32"), types.intp)`."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

IS_PLAIN = bool(config.DISABLE_JIT)
"""Whether functions are left uncompiled, for debuggers."""

IS_CHECKED = bool(config.BOUNDSCHECK)
"""Whether compiled functions check every index, for tests."""

_OPTIONS = {
    "nogil": True,
    "boundscheck": IS_CHECKED,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
}


def array_type(dtype: str, num_dimensions: int = 1, *, is_read: bool = False) -> types.Array:
    """Return the type of a C-contiguous array with numpy's `dtype`. With `is_read`, read-only
    arrays are accepted, too, and the function cannot write."""
    return types.Array(getattr(types, dtype), num_dimensions, "C", readonly=is_read)


def compiled(
    *signatures: Signature, family: str = "", **options: Any
) -> Callable[[_Function], _Function]:
    """Compile a function for these signatures, now.

    A call releases Python's lock unless numba's `options` say otherwise. `family` stands for the
    text of all files whose functions it calls. A call with other types raises TypeError. Indices
    are not checked: callers must have checked them.
    """

    def compile_now(function: _Function) -> _Function:
        if IS_PLAIN:
            return function
        all_options = {**_OPTIONS, **options}
        made: Any = njit(**all_options)(function)
        try:
            made._cache = _Kept(function, made.targetctx, (family, sorted(all_options.items())))
        except Exception as error:  # no place for a cache, or another numba
            logger.info("%s is compiled again in every process: %s", function.__name__, error)
        for signature in signatures:
            made.compile(signature)
        made.disable_compile()
        return cast(_Function, made)

    return compile_now


class _Kept(FunctionCache):  # type: ignore[misc]  # numba has no types for it
    """The cache of one function: its own files for each source, processor and version.

    numba writes the index before the numbered files with code. If versions or processors shared an
    index, a number could refer to another version's code, permanently if the writer was killed or
    the disk was full. A file that cannot be read or written costs only a compilation.
    """

    def __init__(self, function: Callable[..., Any], target: Any, made_by: object) -> None:
        """Look for cached files of the function; raises RuntimeError if there is no directory
        for them."""
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        versions = numba.__version__, llvmlite.__version__
        made_of = stamp, versions, target.codegen().magic_tuple(), made_by
        name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
        base = f"{self._impl.filename_base}-{name}"
        self._cache_file = IndexDataCacheFile(self._cache_path, base, stamp)

    def load_overload(self, sig: Signature, target_context: Any) -> Any:
        """Return the cached code for a signature, or None."""
        try:
            # Numba's own method first prepares the context for compiling, which takes longer than
            # to load all cached code. The compiler prepares it itself.
            rtsys.initialize(target_context)
            return self._load_overload(sig, target_context)
        except Exception as error:  # a truncated file can raise anything
            logger.warning("%s is compiled again: %r", self._name, error)
            self._drop_unreadable_list()
            return None

    def save_overload(self, sig: Signature, data: Any) -> None:
        """Write code to the cache, if there is room."""
        try:
            super().save_overload(sig, data)
        except Exception as error:  # a full disk must not prevent a start
            logger.warning("%s is compiled again in every process: %r", self._name, error)

    def _drop_unreadable_list(self) -> None:
        """Rewrite an index file that cannot be read, and replace code that cannot."""
        try:
            self._cache_file._load_index()
        except Exception:  # as above
            with suppress(OSError):
                os.unlink(self._cache_file._index_path)
