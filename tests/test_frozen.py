"""Frozen dataclasses that are made quickly are what they were."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace
from inspect import signature

import pytest

from kvcache.frozen import quickly_made


@quickly_made
@dataclass(frozen=True)
class Point:
    """What a frozen class can have."""

    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)
    scale: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x")


def test_fields_defaults_and_keywords_get_in() -> None:
    assert Point(1) == Point(1, 2, [], scale=1.0)
    point = Point(x=1, names=["a"], scale=3.0)
    assert (point.x, point.y, point.names, point.scale) == (1, 2, ["a"], 3.0)
    assert list(signature(Point).parameters) == ["x", "y", "names", "scale"]
    assert repr(point) == "Point(x=1, y=2, names=['a'], scale=3.0)"


def test_every_object_gets_a_default_of_its_own() -> None:
    assert Point(1).names is not Point(1).names


def test_nobody_writes_to_an_object_afterwards() -> None:
    point = Point(1)
    with pytest.raises(FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del point.y  # type: ignore[misc]


def test_what_must_be_given_must_be_given() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        Point(1, z=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional arguments"):
        Point(1, 2, [], 1.0)  # type: ignore[misc]


def test_what_is_checked_afterwards_is_checked() -> None:
    with pytest.raises(ValueError, match="x"):
        Point(-1)


def test_replaced_and_pickled_objects_are_equal() -> None:
    point = replace(Point(1), y=5)
    assert point == Point(1, 5)
    assert pickle.loads(pickle.dumps(point)) == point


def test_classes_it_cannot_serve_are_refused() -> None:
    with pytest.raises(TypeError, match="Slotted has slots"):

        @quickly_made
        @dataclass(frozen=True, slots=True)
        class Slotted:
            x: int

    with pytest.raises(TypeError, match="Counted has slots or fields that are not given"):

        @quickly_made
        @dataclass(frozen=True)
        class Counted:
            x: int
            y: int = field(default=0, init=False)
