"""Entries by key, the lowest first, and no entry before its children.

A child is inserted before its parent, or with it: requests use whole prefixes and free the tail
first. So the highest key of its children is known when a parent comes, and becomes the parent's if
its own is lower.

    entry:  key, stamp, floor        keys up to the limit ──▶ list ──▶ victims

Only about the lowest 32nd of all keys is in a sorted list. When it is empty, a pass over all
entries raises the limit and fills it. Checks nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from kvcache.base.arrays import IndexArray
from kvcache.base.compiled import array_type, compiled
from kvcache.policies.orders import Float64Array, Int64Array

SIZE, COUNT, LAST_STAMP = range(3)
"""Entries of `number`: places of the list; entries; the number of insertions so far."""

_LOW_SHARE, _MOST_COMPARED, _SPARE = 32, 1024, 64


class Victims(NamedTuple):
    """Invariant: an entry whose key is at most the limit is in the list with its key and its code,
    that is stamp * capacity + entry. Other places of the list are stale. Lowest keys are last."""

    low_key: Float64Array
    low_code: Int64Array
    key: Float64Array  # (entries,): the key when it was inserted last
    stamp: Int64Array  # (entries,): the number of its insertion; negative or 0: it is outside
    floor: Float64Array  # (entries,): the highest key of its children, since its content came
    number: Int64Array
    limit: Float64Array  # (1,)


def make_victims(capacity: int) -> Victims:
    """Return an empty order of entries below `capacity`."""
    return Victims(
        np.empty(capacity + _SPARE),
        np.empty(capacity + _SPARE, np.int64),
        np.zeros(capacity),
        np.zeros(capacity, np.int64),
        np.full(capacity, -np.inf),
        np.zeros(3, np.int64),
        np.full(1, -np.inf),
    )


_types: Any = types  # numba's types are missing
_entries, _new_entries = array_type("intp", is_read=True), array_type("intp")
_reals, _ints = array_type("float64"), array_type("int64")
_victims = _types.NamedTuple([_reals, _ints, _reals, _ints, _reals, _ints, _reals], Victims)


@compiled(types.void(_victims))
def _fill(victims: Victims) -> None:
    """List the lowest keys. The limit is estimated from keys all over the entries."""
    low_key, low_code, key, stamp, _, number, limit = victims
    stride = max(1, len(key) // _MOST_COMPARED)
    some = key[::stride][stamp[::stride] > 0]
    limit[0] = np.sort(some)[len(some) // _LOW_SHARE] if len(some) else np.inf
    size = 0
    for entry in range(len(key)):
        if stamp[entry] > 0 and key[entry] <= limit[0]:
            low_code[size] = stamp[entry] * len(key) + entry
            size += 1
    codes = np.sort(low_code[:size])
    keys = key[codes % len(key)]
    last_first = np.argsort(keys, kind="mergesort")[::-1]
    low_key[:size], low_code[:size], number[SIZE] = keys[last_first], codes[last_first], size


@compiled(types.void(_victims, types.intp))
def _list(victims: Victims, entry: int) -> None:
    """List an entry with one of the lowest keys."""
    low_key, low_code, number = victims.low_key, victims.low_code, victims.number
    key, code = victims.key[entry], victims.stamp[entry] * len(victims.key) + entry
    if number[SIZE] == len(low_key):  # with stale places
        _fill(victims)
        return
    at = number[SIZE]
    number[SIZE] += 1
    while at and (key, code) > (low_key[at - 1], low_code[at - 1]):
        low_key[at], low_code[at] = low_key[at - 1], low_code[at - 1]
        at -= 1
    low_key[at], low_code[at] = key, code


@compiled(types.void(_victims, _entries, _reals, _entries))
def insert(victims: Victims, entries: IndexArray, keys: Float64Array, parents: IndexArray) -> None:
    """Insert entries, children first. A parent is -1 if there is none."""
    _, _, key, stamp, floor, number, limit = victims
    for at in range(len(entries)):
        entry, parent = entries[at], parents[at]
        key[entry] = max(keys[at], floor[entry])
        if parent >= 0:
            floor[parent] = max(floor[parent], key[entry])
        number[LAST_STAMP] += 1
        stamp[entry] = number[LAST_STAMP]
        if key[entry] <= limit[0]:
            _list(victims, entry)
    number[COUNT] += len(entries)


@compiled(types.void(_victims, _entries, types.boolean))
def remove(victims: Victims, entries: IndexArray, is_gone: bool) -> None:
    """Remove entries. `is_gone`: their contents are dropped."""
    for entry in entries:
        victims.stamp[entry] = 0
        if is_gone:
            victims.floor[entry] = -np.inf
    victims.number[COUNT] -= len(entries)


@compiled(types.void(_victims, _new_entries))
def pop(victims: Victims, popped: IndexArray) -> None:
    """Remove the first entries, as many as `popped` has room for; there are enough."""
    stamp, number, count = victims.stamp, victims.number, 0
    while count < len(popped):
        if not number[SIZE]:
            _fill(victims)
        code = victims.low_code[number[SIZE] - 1]
        number[SIZE] -= 1
        entry = code % len(stamp)
        if stamp[entry] == code // len(stamp):
            popped[count] = entry
            count += 1
            stamp[entry], victims.floor[entry] = -stamp[entry], -np.inf
    number[COUNT] -= count


@compiled(types.void(_victims, _entries))
def put_back(victims: Victims, entries: IndexArray) -> None:
    """Return popped entries to their places."""
    for entry in entries:
        victims.stamp[entry] *= -1
        victims.floor[entry] = victims.key[entry]
        if victims.key[entry] <= victims.limit[0]:
            _list(victims, entry)
    victims.number[COUNT] += len(entries)
