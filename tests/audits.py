"""How often a random walk calls `check()`: sometimes, independent of time.

An audit visits the whole state of the fast core, and so completes work that the core defers on
purpose. A walk that audits after every operation never lets work wait. So a coin decides, drawn
from the walk's seed with a generator of its own: the frequency of audits does not change the walk.
Every walk audits once more at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable

ONE_IN = 8


class Audits:
    """Calls `check` at one of `one_in` opportunities; at each one if that is 1."""

    def __init__(self, seed: object, check: Callable[[], None], one_in: int = ONE_IN) -> None:
        """Draw by `seed`, any object with a stable `repr`."""
        self._dice = random.Random(f"audits {seed}")
        self._check = check
        self._one_in = one_in
        self.num_made = 0

    def perhaps(self) -> None:
        """Audit, or not."""
        if not self._dice.randrange(self._one_in):
            self.make()

    def make(self) -> None:
        """Audit."""
        self.num_made += 1
        self._check()
