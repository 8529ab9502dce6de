"""The loop under the random walks: draw an operation, do it, compare.

A walk does the same operations to something and to its model. Everything it draws comes from one
source, so that a seed repeats it. The mark `seeds` gives a test its seeds (`tests/README.md`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

Operation = Callable[[], object]

NUM_SHOWN = 12


def random_walk(
    title: str,
    source: random.Random,
    operations: Mapping[Operation, float],
    num_steps: int,
    compare: Operation,
) -> None:
    """Do `num_steps` operations, drawn by their weights, and `compare` after each.

    If one raises, prints the title, the step and the last operations.
    """
    acts, weights = [*operations], [*operations.values()]
    done: list[str] = []
    try:
        for _ in range(num_steps):
            [act] = source.choices(acts, weights)
            done.append(act.__name__)
            act()
            compare()
    except BaseException:
        last = ", ".join(done[-NUM_SHOWN:])
        print(f"walk {title} failed in step {len(done)} of {num_steps}, after: {last}")
        raise
