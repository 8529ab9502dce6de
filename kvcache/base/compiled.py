"""How functions over arrays become machine code: for what numpy cannot say in few calls.

Used everywhere, like `arrays.py`. numba compiles a function when its module is imported, for the
signatures that it is given and no others, so that no step ever waits for a compiler; what it
made is kept next to the source, and later processes load it. A module that uses this is imported by
a service when it starts, and not by a command that only asks for help.

What is kept goes by the text of the file that the function stands in, the processor and the
versions (`_Kept`): a function calls nothing compiled of another file, whose changes would go
unseen, unless its `family` says what all those files are. Refuses to replace numpy: what a few of
its calls can say, they do.

Two modes for tests and debuggers come from numba's own environment: with `NUMBA_DISABLE_JIT=1`
nothing is compiled, with `NUMBA_BOUNDSCHECK=1` every index is checked against its array's shape.
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
"""The result called with the arguments: `types.int64(array_type("int32"), types.intp)`."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_config: Any = config
IS_PLAIN = bool(_config.DISABLE_JIT)
"""Whether functions stay what they are, for debuggers."""

IS_CHECKED = bool(_config.BOUNDSCHECK)
"""Whether compiled functions check every index, for tests."""

_OPTIONS = {
    "nogil": True,
    "boundscheck": IS_CHECKED,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
}

_njit: Any = njit
_NumbaCache: Any = FunctionCache  # these of numba's have no types, or too narrow ones
_NumbaFile: Any = IndexDataCacheFile
_runtime: Any = rtsys


def array_type(dtype: str, num_dimensions: int = 1, *, is_read: bool = False) -> types.Array:
    """Return the type of a C-contiguous array, `dtype` as numpy spells it. One that `is_read` only
    may be writable or not; reading is all that is compiled for it."""
    return types.Array(getattr(types, dtype), num_dimensions, "C", readonly=is_read)


def tuple_type(item: Signature, count: int) -> Signature:
    """Return the type of so many items of a type."""
    make: Any = types.UniTuple
    return make(item, count)


def compiled(
    *signatures: Signature, family: str = "", **options: Any
) -> Callable[[_Function], _Function]:
    """Compile a function for these signatures, now.

    Calls let other threads run meanwhile; numba's `options` may say otherwise. `family` stands for
    the text of all files whose functions it calls.
    A call with other types raises TypeError. Indices are not checked: callers have done that.
    """

    def compile_now(function: _Function) -> _Function:
        if IS_PLAIN:
            return function
        all_options = {**_OPTIONS, **options}
        made: Any = _njit(**all_options)(function)
        try:
            made._cache = _Kept(function, made.targetctx, (family, sorted(all_options.items())))
        except Exception as error:  # nowhere to keep it, or a numba that keeps it otherwise
            logger.info("%s is compiled again in every process: %s", function.__name__, error)
        for signature in signatures:
            made.compile(signature)
        made.disable_compile()
        return cast(_Function, made)

    return compile_now


class _Kept(_NumbaCache):  # type: ignore[misc]  # numba has no types for it
    """What was made of one function: files of their own for each source, processor and version.

    numba numbers the files with code and writes the list of them first. With the list of another
    source, or of a processor that shares the directory, a number would name their code, for good
    where the writer ended between the two or found no room. A file that cannot be read or written
    costs the time of a compilation, and nothing else.
    """

    def __init__(self, function: Callable[..., Any], target: Any, made_by: object) -> None:
        """Look for files of the function, made so; raises RuntimeError where there is no place for
        any."""
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        versions = numba.__version__, llvmlite.__version__
        made_of = stamp, versions, target.codegen().magic_tuple(), made_by
        name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
        base = f"{self._impl.filename_base}-{name}"
        self._cache_file = _NumbaFile(self._cache_path, base, stamp)

    def load_overload(self, sig: Signature, target_context: Any) -> Any:
        """Return what was kept for a signature, or None."""
        try:
            # Numba's own method makes the context ready to compile first, which takes longer than
            # to load all that is kept. A compiler makes it ready itself.
            _runtime.initialize(target_context)
            return self._load_overload(sig, target_context)
        except Exception as error:  # half a file says anything
            logger.warning("%s is compiled again: %r", self._name, error)
            self._drop_unreadable_list()
            return None

    def save_overload(self, sig: Signature, data: Any) -> None:
        """Keep it, if there is room."""
        try:
            super().save_overload(sig, data)
        except Exception as error:  # as a reader does; a full disk is no reason not to start
            logger.warning("%s is compiled again in every process: %r", self._name, error)

    def _drop_unreadable_list(self) -> None:
        """Rewrite an index file that cannot be read, and replace code that cannot."""
        try:
            self._cache_file._load_index()
        except Exception:  # as above
            with suppress(OSError):
                os.unlink(self._cache_file._index_path)
