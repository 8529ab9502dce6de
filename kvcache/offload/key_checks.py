"""Whether keys are in the state that an operation demands, and where they are then.

Between a `TierManager`, which is asked, and its table. Everything is looked at before anything is
changed; the errors of a tier about keys come from here. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.base.arrays import IndexArray
from kvcache.base.errors import InvalidInputError, shown
from kvcache.offload.keys import OffloadKey
from kvcache.offload.slot_table import FORGOTTEN, READY, BoolArray, CountArray, SlotTable


class KeyChecks:
    """Checks of keys against one table."""

    def __init__(self, table: SlotTable, medium: str) -> None:
        """Check against `table`; `medium` names it in messages."""
        self._table = table
        self._medium = medium

    def ready(self, keys: Sequence[OffloadKey]) -> IndexArray:
        """Return the addresses of those keys that are ready, each once."""
        addresses = self._table.addresses_of(keys)
        ready: IndexArray = addresses[self._table.states_of(addresses) == READY]
        return self._table.distinct(ready)

    def require(self, keys: Sequence[OffloadKey], states: tuple[int, ...], what: str) -> IndexArray:
        """Return the addresses of keys; raises InvalidInputError unless all are in such a state."""
        addresses = self._table.addresses_of(keys)
        found = self._table.states_of(addresses)
        is_wrong: BoolArray = np.ones(len(found), np.bool_)
        for state in states:
            is_wrong &= found != state
        if is_wrong.any():
            self.refuse(keys, is_wrong, what)
        return addresses

    def require_read(self, keys: Sequence[OffloadKey], counts: CountArray, what: str) -> IndexArray:
        """Return the addresses of keys; raises InvalidInputError unless each is read so often."""
        addresses = self.require(keys, (READY, FORGOTTEN), what)
        is_wrong: BoolArray = counts[addresses] < 1
        if len(self._table.distinct(addresses)) < len(addresses):
            _, inverse, times = np.unique(addresses, return_inverse=True, return_counts=True)
            is_wrong = counts[addresses] < times[inverse]
        if is_wrong.any():
            self.refuse(keys, is_wrong, what)
        return addresses

    def refuse(self, keys: Sequence[OffloadKey], is_wrong: BoolArray, what: str) -> None:
        """Raise InvalidInputError about those of the keys that are wrong, of which there are."""
        wrong = np.flatnonzero(is_wrong)
        raise InvalidInputError(
            f"{len(wrong)} of {len(keys)} keys are not {what} in tier {self._medium!r}, the first "
            f"of them {shown(keys[int(wrong[0])].hex())}: nothing was changed"
        )
