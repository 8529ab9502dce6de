"""Some thousand broken inputs for each decoder; `python -m tests.fuzz` plays more."""

from __future__ import annotations

import pytest

from tests.fuzz.fuzzing import Finding, fuzz
from tests.fuzz.targets import Target, make_targets

TARGETS = make_targets()


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_accepts_valid_input(name: str) -> None:
    if name == "calls":
        return  # validity depends on earlier calls
    for data in TARGETS[name].good:
        TARGETS[name].read(data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_answers_anything_with_a_value_or_a_stated_error(name: str) -> None:
    assert fuzz(TARGETS[name], 20, count=400) == 400


def test_an_error_that_is_not_stated_is_found() -> None:
    def read(data: bytes) -> None:
        if len(data) > 5:
            raise KeyError("not stated")

    with pytest.raises(Finding, match="not stated"):
        fuzz(Target("careless", (b"12345",), read), 1, count=1000)
