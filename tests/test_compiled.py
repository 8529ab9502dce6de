"""Compiled functions: what they take and refuse, and nowhere to keep them."""

from __future__ import annotations

import numpy as np
import pytest
from numba import types

from kvcache.arrays import Int32Array, int32_array
from kvcache.compiled import array_type, compiled

READ = array_type("int32", is_read=True)
WRITTEN = array_type("int32")


@compiled(types.intp(WRITTEN, READ))
def add_to(sums: Int32Array, values: Int32Array) -> int:
    total = 0
    for i in range(len(values)):
        sums[i] += values[i]
        total += sums[i]
    return total


def test_arrays_are_changed_in_place() -> None:
    sums, values = int32_array([1, 2, 3]), int32_array([10, 20, 30])
    assert add_to(sums, values) == 66
    assert sums.tolist() == [11, 22, 33]
    assert values.tolist() == [10, 20, 30]


def test_what_is_read_may_be_read_only() -> None:
    values = int32_array([1])
    values.flags.writeable = False
    assert add_to(int32_array([1]), values) == 2
    with pytest.raises(TypeError, match="No matching definition"):
        add_to(values, int32_array([1]))
    assert values.tolist() == [1]


@pytest.mark.parametrize(
    "other", [np.zeros(1, np.int64), np.zeros((1, 1), np.int32), np.zeros(4, np.int32)[::2]]
)
def test_other_arrays_are_refused_not_compiled_for(other: Int32Array) -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        add_to(other, int32_array([1]))


def test_without_a_place_to_keep_it_a_function_is_compiled_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names: dict[str, object] = {}
    exec("def double(value):\n    return 2 * value\n", names)  # of no file
    with caplog.at_level("INFO", logger="kvcache.compiled"):
        double = compiled(types.int64(types.int64))(names["double"])  # type: ignore[type-var]
    assert double(21) == 42  # type: ignore[operator]
    assert "double is compiled anew in every process" in caplog.text
