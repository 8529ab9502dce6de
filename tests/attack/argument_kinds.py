"""Kinds of arguments: the values that every interface must refuse, and those it must accept."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

INT64 = 2**63 - 1


class Index:
    """An integer type of another library."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value

    def __repr__(self) -> str:
        return f"Index({self._value})"


class Hostile:
    """An object without a working `repr`."""

    __hash__ = None  # type: ignore[assignment]  # what cannot be hashed is the point

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")


def _no_forms(good: Any) -> tuple[object, ...]:
    return ()


@dataclass(frozen=True)
class Kind:
    """`wrong` values are refused; `forms(good)` are other ways to write a good value."""

    name: str
    wrong: tuple[object, ...]
    forms: Callable[[Any], tuple[object, ...]] = _no_forms

    def without(self, *allowed: object) -> Kind:
        """The kind of a parameter that accepts some of these values after all."""
        wrong = [w for w in self.wrong if not any(w is a for a in allowed)]
        return Kind(self.name, tuple(wrong), self.forms)

    def also(self, *wrong: object) -> Kind:
        """The kind of a parameter that refuses more."""
        return Kind(self.name, (*self.wrong, *wrong), self.forms)


OBJECT = object()
HOSTILE = Hostile()
EMPTY_TUPLE = ()

NO_NUMBER: tuple[object, ...] = (
    None,
    True,
    False,
    np.True_,
    "1",
    b"1",
    [1],
    (1,),
    {1},
    {},
    OBJECT,
    HOSTILE,
    np.array(1),
    np.array([1]),
    np.array([1, 2]),
    1j,
    math.nan,
    np.timedelta64(1),
    int,
)

NO_INTEGER = (
    *NO_NUMBER,
    1.0,
    1.5,
    50.0,
    math.inf,
    np.float64(1),
    np.float32(1.5),
    Decimal(1),
    Fraction(1),
    2**70,
    -(2**70),
)


def int_forms(good: Any) -> tuple[object, ...]:
    if good is None or not -128 <= good <= 127:
        return (Index(good), np.int64(good)) if good is not None else ()
    return (np.int8(good), np.int32(good), np.int64(good), Index(good))


COUNT = Kind("count", (*NO_INTEGER, -1, np.int8(-1), Index(-1)), int_forms)
POSITIVE = COUNT.also(0, np.int64(0))
INTEGER = Kind("integer", NO_INTEGER, int_forms)
ID = COUNT.also(10**9)
"""A count below a billion."""


def number_forms(good: Any) -> tuple[object, ...]:
    forms = [np.float64(good)]
    if float(np.float32(good)) == good:
        forms.append(np.float32(good))
    if good == int(good):
        forms += [int(good), np.int32(good)]
    return tuple(forms)


NUMBER = Kind("number", (*NO_NUMBER, math.inf, -math.inf, 10**400), number_forms)
SECONDS = NUMBER.also(-1, -0.5)
TIME_LIMIT = SECONDS.also(0, 0.0)
SHARE = SECONDS.also(1.5, 2)

BOOL = Kind(
    "bool",
    (None, 0, 1, 1.0, "yes", "", b"", [], EMPTY_TUPLE, {}, OBJECT, HOSTILE, np.array(True), bool),
    lambda good: (np.bool_(good),),
)

TEXT = Kind(
    "text",
    (
        None,
        5,
        1.5,
        True,
        b"a",
        bytearray(b"a"),
        ["a"],
        ("a",),
        {"a"},
        {},
        OBJECT,
        HOSTILE,
        np.array("a"),
        "",
        "\ud800",
        str,
        math.nan,
    ),
    lambda good: (np.str_(good),) if good else (),
)
OPTIONAL_TEXT = TEXT.without(None)
NAME = TEXT.also("no such name", "LRU")
"""One of a few values."""


def token_forms(good: Any) -> tuple[object, ...]:
    tokens = [int(token) for token in good]
    return (
        tokens,
        tuple(tokens),
        array("i", tokens),
        [*map(np.int64, tokens)],
        np.array(tokens, np.int32),
        np.array(tokens, np.int64),
        np.array(tokens, np.uint8),
        np.array(tokens, object),
    )


NO_LIST: tuple[object, ...] = (
    None,
    5,
    1.5,
    True,
    "12",
    b"12",
    OBJECT,
    HOSTILE,
    {1: 2},
    np.array(5),
    list,
)

NO_INTEGERS = (
    *NO_LIST,
    [1.0],
    [1.5],
    ["1"],
    [True],
    [1, True],
    [None],
    [[1]],
    [math.nan],
    [OBJECT],
    [2**70],
    (1.9, "7"),
    np.array([1.5]),
    np.array([math.nan]),
    np.array([True]),
    np.array(["1"]),
    np.array([[1]]),
    np.array([1.5, None], dtype=object),
)

TOKENS = Kind(
    "tokens",
    (*NO_INTEGERS, [-1], [2**31], {1}, np.array([-1]), np.array([2**40]), np.array([2**64 - 1])),
    token_forms,
)


def id_forms(good: Any) -> tuple[object, ...]:
    ids = [int(i) for i in good]
    return (
        tuple(ids),
        [*map(np.int32, ids)],
        [*map(Index, ids)],
        np.array(ids, np.int32),
        np.array(ids, np.int64),
        np.array(ids, np.uint16),
        np.array(ids, np.uint64),
    )


IDS = Kind(
    "ids",
    (*NO_INTEGERS, [-1], [10**9], np.array([-1]), np.array([10**9]), np.array([2**64 - 1])),
    id_forms,
)
COUNTS = Kind("counts", (*NO_INTEGERS, [-1], np.array([-1])), id_forms)


def objects_wrong(*more: object) -> tuple[object, ...]:
    return (
        None,
        5,
        1.5,
        True,
        "x",
        b"x",
        OBJECT,
        HOSTILE,
        [1],
        {1: 2},
        np.array(1),
        np.array([1, 2]),
        math.nan,
        *more,
    )


def instance_of(cls: type[Any], *more: object) -> Kind:
    """An object of a class; the class itself is refused."""
    return Kind(cls.__name__, objects_wrong([], EMPTY_TUPLE, {}, cls, *more))


THING = Kind("thing", objects_wrong([], EMPTY_TUPLE))
"""An object with methods of its own."""

OPTIONAL_THING = THING.without(None)


def list_of(good: str, *more: object) -> Kind:
    """A list or tuple of unusual items."""
    return Kind(
        f"list of {good}",
        (*NO_LIST, [None], [5], [1.5], [OBJECT], [[]], (HOSTILE,), *more),
        lambda value: (list(value), tuple(value)),
    )


TEXTS = list_of("texts", ["a", 5], [b"a"], [""], "a", ["\ud800"])
MAPPING = Kind(
    "mapping", (None, 5, 1.5, True, "x", b"x", OBJECT, HOSTILE, [1], (1, 2), np.array([1, 2]))
)

BYTES = Kind(
    "bytes",
    (None, 5, 1.5, True, "aa", OBJECT, HOSTILE, [1], [b"a"], {}, np.array([1]), b"", bytearray(2)),
)
DIGESTS = list_of("digests", ["aa"], [bytearray(2)], [b""])


class _FakeDtype:
    """What looks like a dtype of torch, with a name of nothing."""

    def __str__(self) -> str:
        return "torch.no_such"


DTYPE = NAME.also(_FakeDtype(), "complex64", int, float, np.float32)

HASHABLE = Kind("hashable", ([1], {}, {1}, HOSTILE, np.array([1])))
