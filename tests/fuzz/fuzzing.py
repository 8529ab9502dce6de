"""Feeds broken input to one target, for a number of times or for a time."""

from __future__ import annotations

import random
import time

from tests.fuzz.targets import Target


class Finding(AssertionError):
    """An undocumented answer of a decoder; the message has the input."""


def fuzz(target: Target, seed: int, *, count: int | None = None, seconds: float = 0.0) -> int:
    """Feed `target` until `count` inputs, or for `seconds`; return how many there were.

    Raises Finding for an undocumented answer.
    """
    chance = random.Random(f"{target.name} {seed}")
    good, end_s, number = list(target.good), time.monotonic() + seconds, 0
    while number < count if count is not None else time.monotonic() < end_s:
        data = target.mutate(chance.choice(good), good, chance)
        number += 1
        try:
            target.read(data)
        except target.errors:
            continue
        except Exception as error:
            raise Finding(
                f"{target.name}, seed {seed}, input {number}: {type(error).__name__}: {error}\n"
                f"    data = {data!r}"
            ) from error
    return number
