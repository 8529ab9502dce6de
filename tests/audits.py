"""How often a random walk lets `check()` audit the books: now and then, never by the clock.

An audit walks every run of the fast core, and so settles what it lets wait on purpose. A walk that
audits after every operation never lets anything wait from one operation to the next. Therefore a
coin is tossed, from the walk's own seed but with dice of its own: how often a walk audits does not
change what it does. Whoever walks audits once more at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable

ONE_IN = 8


class Audits:
    """Calls `check` at one of `one_in` opportunities; at each one if that is 1."""

    def __init__(self, seed: object, check: Callable[[], None], one_in: int = ONE_IN) -> None:
        """Toss by `seed`, which is anything that prints as the same text again."""
        self._dice = random.Random(f"audits {seed}")
        self._check = check
        self._one_in = one_in
        self.num_made = 0

    def perhaps(self) -> None:
        """Audit, or leave it."""
        if not self._dice.randrange(self._one_in):
            self.make()

    def make(self) -> None:
        """Audit."""
        self.num_made += 1
        self._check()
