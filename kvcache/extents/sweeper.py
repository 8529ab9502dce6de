"""What nothing else would ever let go: units that lost their blocks, numbers nobody matches by.

Beside the tree, for the core, which asks from time to time. Where a plan has ordered groups the
eviction policy takes runs away with their blocks. Where it has none a run costs no block, and no
policy knows it: when the last block beside its end has gone, nothing can hit there any more. Looks
at everything only when there is about twice as much as after the last look, so that a published
unit pays for a look or two in its life. Refuses to forget what could still hit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcache.extents.match_tokens import numbers_in
from kvcache.extents.parts import CoreParts
from kvcache.extents.run import Run

_MIN_UNITS = 128


class Sweeper:
    """Keeps the memory of one core in proportion to its blocks and its running requests."""

    def __init__(self, parts: CoreParts) -> None:
        """Work on the parts of one core."""
        self._shape = parts.shape
        self._has_ordered = bool(parts.shape.ordered)
        self._store = parts.store
        self._tree = parts.tree
        self._match_tokens = parts.match_tokens
        self._min_units = max(_MIN_UNITS, 2 * parts.store.num_blocks)
        self._many_units = self._min_units

    def sweep(self) -> None:
        """Forget units at which nothing can hit, and that nobody holds, if it is time to.

        And the numbers that no run has.
        """
        self.forget_numbers()
        if self._has_ordered or self._tree.num_units <= self._many_units:
            return
        for run in reversed(list(self._tree.runs())):  # children before parents
            if not run.children and not run.num_holders:
                self._trim(run)
        self._many_units = max(self._min_units, 2 * self._tree.num_units)

    def forget_numbers(self) -> None:
        """Forget the match tokens' numbers that no run has, if it is time to.

        Nobody has asked for match tokens that he has not used yet.
        """
        if self._match_tokens.is_crowded(self._tree.num_units):
            self._match_tokens.forget_unused(self._numbers(), self._tree.num_units)

    # --- inside --------------------------------------------------------------------------------

    def _trim(self, run: Run) -> None:
        """Cut a leaf behind its last unit that has a block."""
        run.settle()
        kept = np.flatnonzero(self._store.are_valid(run.handles).any(axis=0))
        num_kept = int(kept[-1]) + 1 if len(kept) else 0
        if num_kept < run.num_units:
            self._tree.trim(run, run.num_units - num_kept)

    def _numbers(self) -> Iterator[int]:
        for run in self._tree.runs():
            run.settle()
            yield from numbers_in(run.tokens, self._shape.unit_tokens)
