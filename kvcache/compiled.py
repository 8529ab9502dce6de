"""How functions over arrays become machine code: for what numpy cannot say in few calls.

Beside everything, like arrays.py. numba compiles a function when its module is imported, for the
signatures that it is given and no others, so that no step ever waits for a compiler; what it
made is kept beside the source, and later processes load it. A module that uses this is imported by
a service when it starts, and not by a command that only asks for help.

What is kept is looked up by the file that the function stands in: it calls nothing compiled of
another file, whose changes would go unseen. Refuses to replace numpy: what a few of its calls can
say, they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

from numba import njit, types

logger = logging.getLogger(__name__)

Signature: TypeAlias = Any
"""The result called with the arguments: `types.int64(array_type("int32"), types.intp)`."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def array_type(dtype: str, num_dimensions: int = 1, *, is_read: bool = False) -> types.Array:
    """Return the type of a C-contiguous array, `dtype` as numpy spells it. One that `is_read` only
    may be writable or not; reading is all that is compiled for it."""
    return types.Array(getattr(types, dtype), num_dimensions, "C", readonly=is_read)


def tuple_type(item: Signature, count: int) -> Signature:
    """Return the type of so many items of a type."""
    make: Any = types.UniTuple
    return make(item, count)


def compiled(*signatures: Signature) -> Callable[[_Function], _Function]:
    """Compile a function for these signatures, now. Calls let other threads run meanwhile.

    A call with other types raises TypeError. Indices are not checked: callers have done that.
    """

    def compile_now(function: _Function) -> _Function:
        compile_for = partial(
            njit, list(signatures), nogil=True, boundscheck=False, error_model="numpy"
        )
        made: Any
        try:
            made = compile_for(cache=True)(function)
        except RuntimeError as error:  # nowhere to keep it, neither here nor at home
            logger.info("%s is compiled anew in every process: %s", function.__name__, error)
            made = compile_for()(function)
        return cast(_Function, made)

    return compile_now
