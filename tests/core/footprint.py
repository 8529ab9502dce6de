"""The memory that an object references, directly or not."""

from __future__ import annotations

import sys
from collections import deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

_NOT_OWNED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def footprint_bytes(root: object) -> int:
    """Return the bytes of all objects reachable from `root`, except classes and functions."""
    seen: set[int] = set()
    pending: list[object] = [root]
    total = 0
    while pending:
        found = pending.pop()
        if id(found) in seen or isinstance(found, _NOT_OWNED):
            continue
        seen.add(id(found))
        if isinstance(found, np.ndarray):
            owner = found
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            if id(owner) not in seen or owner is found:
                seen.add(id(owner))
                total += owner.nbytes
            if owner.dtype == object:
                pending += owner.tolist()
            continue
        total += sys.getsizeof(found)
        if isinstance(found, dict):
            pending += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple, set, frozenset, deque)):
            pending += found
        else:
            pending += vars(found).values() if hasattr(found, "__dict__") else ()
            for cls in type(found).__mro__:
                slots = cls.__dict__.get("__slots__", ())
                pending += [getattr(found, name, None) for name in slots]
    return total
