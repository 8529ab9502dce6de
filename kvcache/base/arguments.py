"""Checks of arguments at public interfaces.

Each check takes the argument's name and value. It returns a plain Python or numpy value, so that a
32-bit numpy scalar cannot overflow later, or raises one of our errors, which names the argument,
the value and the remedy. Integers are the values that `operator.index` takes; booleans, floats,
text and arrays are refused. Callers check all arguments before they change anything.
`quickly_made` speeds up the constructors of messages.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from numbers import Real
from operator import index
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import Int64Array
from kvcache.base.errors import ConfigurationError, InvalidInputError, shown

MAX_INT = 2**63 - 1
"""Largest integer that an argument can be: messages and arrays carry 64 bits."""

MAX_INT32 = 2**31 - 1

Error: TypeAlias = type[InvalidInputError]
_Made = TypeVar("_Made")

_INTS = frozenset({int})
_TEXTS = frozenset({str})
_BYTES = frozenset({bytes})
_NOT_SEQUENCES = (str, bytes, bytearray, memoryview, Mapping)


def are_ints(values: Iterable[object]) -> bool:
    """Return whether all values are plain integers, not booleans. Does not check their range."""
    return _INTS.issuperset(map(type, values))


def are_counts(values: Sequence[object]) -> bool:
    """Return whether all values are plain integers from 0 to the largest of 64 bits."""
    for value in values:  # noqa: SIM110 - a generator takes longer
        if type(value) is not int or not 0 <= value <= MAX_INT:
            return False
    return True


def as_int(
    what: str,
    value: object,
    at_least: int = 0,
    at_most: int = MAX_INT,
    error: Error = InvalidInputError,
) -> int:
    """Return an integer within limits as a plain `int`; raises `error` for everything else."""
    if type(value) is int and at_least <= value <= at_most:
        return value
    # A value with a length is an array or a tensor; some without dimensions look like integers.
    if not isinstance(value, (bool, np.bool_)) and not hasattr(value, "__len__"):
        try:
            number = index(value)  # type: ignore[arg-type]  # that is the question
        except TypeError:
            pass
        else:
            if at_least <= number <= at_most:
                return int(number)
    raise error(f"{what} is {shown(value)}: pass {_integer(at_least, at_most)}")


def as_number(
    what: str,
    value: object,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    error: Error = InvalidInputError,
    *,
    above: float = -math.inf,
) -> float:
    """Return a finite real number within limits as a `float`; raises `error` otherwise."""
    number = math.nan
    is_real = isinstance(value, Real) and not isinstance(value, (bool, np.timedelta64))
    if type(value) is float or is_real:
        with suppress(OverflowError):
            number = float(value)  # type: ignore[arg-type]  # a real number
    if math.isfinite(number) and at_least <= number <= at_most and number > above:
        return number
    raise error(f"{what} is {shown(value)}: pass {_number(at_least, at_most, above)}")


def as_bool(what: str, value: object, error: Error = InvalidInputError) -> bool:
    """Return True or False, Python's or numpy's, as a plain `bool`; raises `error` otherwise."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise error(f"{what} is {shown(value)}: pass True or False")


def as_text(
    what: str, value: object, error: Error = InvalidInputError, *, may_be_empty: bool = False
) -> str:
    """Return text that can be encoded in UTF-8; raises `error` otherwise."""
    if not isinstance(value, str) or not (value or may_be_empty):
        raise error(f"{what} is {shown(value)}: pass a {'' if may_be_empty else 'non-empty '}str")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise error(f"{what} is {shown(value)}: pass text that UTF-8 can encode") from None
    return value if type(value) is str else str.__str__(value)


def are_plain_texts(values: tuple[object, ...]) -> bool:
    """Return whether all values are non-empty ASCII texts."""
    return _TEXTS.issuperset(map(type, values)) and all(values) and "".join(values).isascii()  # type: ignore[arg-type]  # they are texts


def as_texts(what: str, values: object, error: Error = InvalidInputError) -> tuple[str, ...]:
    """Return a list or tuple of texts, none of them empty, as a tuple; raises `error` otherwise."""
    listed = as_tuple(what, values, error)
    if are_plain_texts(listed):
        return listed
    return tuple([as_text(f"{what}[{i}]", text, error) for i, text in enumerate(listed)])


def as_tuple(
    what: str,
    values: object,
    error: Error = InvalidInputError,
    kind: type[Any] | tuple[type[Any], ...] = object,
) -> tuple[Any, ...]:
    """Return a list or tuple of objects of a kind as a tuple; raises `error` otherwise."""
    if isinstance(values, _NOT_SEQUENCES) or not isinstance(values, Sequence):
        raise error(f"{what} is {shown(values)}: pass a list or tuple")
    for place, value in enumerate(values) if kind is not object else ():
        if not isinstance(value, kind):
            check_kind(f"{what}[{place}]", value, kind, error)
    return values if type(values) is tuple else tuple(values)


def as_objects(
    what: str,
    values: object,
    kind: type[Any] | tuple[type[Any], ...],
    error: Error = InvalidInputError,
) -> tuple[Any, ...]:
    """Return the objects of a kind from an iterable, not a mapping; raises `error` otherwise."""
    if isinstance(values, _NOT_SEQUENCES) or not isinstance(values, Iterable):
        raise error(f"{what} is {shown(values)}: pass a list or another iterable")
    try:
        listed = tuple(values)
    except TypeError:  # an array without dimensions
        raise error(f"{what} is {shown(values)}: pass a list or another iterable") from None
    return as_tuple(what, listed, error, kind)


def as_bytes(what: str, value: object, error: Error = InvalidInputError) -> bytes:
    """Return bytes, at least one; raises `error` otherwise."""
    if not isinstance(value, bytes) or not value:
        raise error(f"{what} is {shown(value)}: pass non-empty bytes")
    return value


def as_byte_strings(what: str, values: object, error: Error = InvalidInputError) -> Sequence[bytes]:
    """Return a sequence of non-empty bytes as it is; raises `error` otherwise."""
    if isinstance(values, _NOT_SEQUENCES) or not isinstance(values, Sequence):
        raise error(f"{what} is {shown(values)}: pass a list of bytes")
    if not (_BYTES.issuperset(map(type, values)) and all(values)):
        for place, value in enumerate(values):
            as_bytes(f"{what}[{place}]", value, error)
    return values


def check_kind(
    what: str,
    value: object,
    kind: type[Any] | tuple[type[Any], ...],
    error: Error = InvalidInputError,
) -> None:
    """Raise `error` unless `value` is an object of a class, or of one of several."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join("None" if each is type(None) else each.__name__ for each in kinds)
        raise error(f"{what} is {shown(value)}: pass {_with_article(names)}")


def check_hashable(what: str, value: object, error: Error = InvalidInputError) -> None:
    """Raise `error` unless `value` can be a key."""
    try:
        hash(value)
    except TypeError:
        raise error(f"{what} is {shown(value)}: pass something hashable") from None


def check_methods(
    what: str, value: object, methods: Sequence[str], error: Error = InvalidInputError
) -> None:
    """Raise `error` unless `value` is an object that has these methods."""
    missing = [name for name in methods if not callable(getattr(value, name, None))]
    if missing or isinstance(value, type):
        raise error(f"{what} is {shown(value)}: pass an object with {', '.join(methods)}")


def as_integers(
    what: str,
    values: object,
    at_least: int = 0,
    at_most: int = MAX_INT,
    error: Error = InvalidInputError,
) -> Int64Array:
    """Return integers within limits as a one-dimensional array; raises `error` otherwise.

    `values` is a list, another iterable, or a one-dimensional array of integers, which is not
    copied if it already has 64 bits. Valid values cost no Python per element.
    """
    found: npt.NDArray[Any] | None = None
    if isinstance(values, array):
        values = np.asarray(values)
    if isinstance(values, np.ndarray):
        if values.ndim == 1 and (values.dtype.kind in "iu" or not values.size):
            found = values
        elif values.ndim != 1 or values.dtype.kind != "O":
            raise _no_integers(what, values, at_least, at_most, error)
        values = values.tolist() if found is None else values
    elif isinstance(values, _NOT_SEQUENCES) or not isinstance(values, Iterable):
        raise _no_integers(what, values, at_least, at_most, error)
    if found is None:
        listed = values if type(values) is list else list(values)
        if not are_ints(listed):
            listed = [
                as_int(f"{what}[{place}]", value, at_least, at_most, error)
                for place, value in enumerate(listed)
            ]
        try:
            found = np.array(listed, dtype=np.int64)
        except OverflowError:
            raise _first_outside(what, listed, at_least, at_most, error) from None
    if found.size and not (
        at_least <= int(np.minimum.reduce(found)) and int(np.maximum.reduce(found)) <= at_most
    ):
        raise _first_outside(what, found.tolist(), at_least, at_most, error)
    result: Int64Array = found.astype(np.int64, copy=False)
    return result


def check_fields(
    made: object,
    check: Callable[..., Any],
    *names: str,
    error: Error = ConfigurationError,
    is_optional: bool = False,
    **limits: Any,
) -> None:
    """Replace fields of a frozen dataclass under construction by the results of `check`.

    With `is_optional`, None stays None.
    """
    for name in names:
        value = getattr(made, name)
        if not (is_optional and value is None):
            object.__setattr__(made, name, check(name, value, error=error, **limits))


def _first_outside(
    what: str, values: Iterable[int], at_least: int, at_most: int, error: Error
) -> InvalidInputError:
    place, value = next(
        (place, value) for place, value in enumerate(values) if not at_least <= value <= at_most
    )
    return error(f"{what}[{place}] is {shown(value)}: pass {_integers(at_least, at_most)}")


def _no_integers(
    what: str, values: object, at_least: int, at_most: int, error: Error
) -> InvalidInputError:
    return error(
        f"{what} is {shown(values)}: pass a list or one-dimensional array of "
        f"{_integers(at_least, at_most)}"
    )


def _integer(at_least: int, at_most: int) -> str:
    if at_most == MAX_INT:
        return "an integer" if at_least < -1 else f"an integer of at least {at_least}"
    return f"an integer from {at_least} to {at_most}"


def _integers(at_least: int, at_most: int) -> str:
    return _integer(at_least, at_most).replace("an integer", "integers")


def _number(at_least: float, at_most: float, above: float) -> str:
    low = f"above {above:g}" if above > -math.inf else f"of at least {at_least:g}"
    if above == at_least == -math.inf:
        return "a finite number"
    return f"a number {low}" + (f" and at most {at_most:g}" if at_most < math.inf else "")


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def quickly_made(made: type[_Made]) -> type[_Made]:
    """Replace the constructor of a frozen dataclass by one that sets all fields at once. The
    original calls a function per field and takes twice as long. All objects share a default."""
    scope: dict[str, Any] = {}
    parameters, lines = ["self"], ["values = self.__dict__"]
    for each in fields(cast(Any, made)):
        default = each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        if default is MISSING:
            parameters.append(each.name)
        else:
            scope[f"default_{each.name}"] = default
            parameters.append(f"{each.name}=default_{each.name}")
        lines.append(f"values[{each.name!r}] = {each.name}")
    # Compiled from text, as dataclasses do it: only such a constructor is fast.
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines), scope)
    own: Any = made
    for name in ("__annotations__", "__qualname__"):
        setattr(scope["__init__"], name, getattr(own.__init__, name))
    own.__init__ = scope["__init__"]
    return made


def changed(made: _Made, changes: Mapping[str, object]) -> _Made:
    """Return a copy of an object of a `quickly_made` class with some fields changed. Takes a tenth
    of the time of `dataclasses.replace`."""
    copy = object.__new__(type(made))
    vars(copy).update(vars(made))
    vars(copy).update(changes)
    return copy
