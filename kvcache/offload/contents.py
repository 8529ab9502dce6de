"""The labels of a tier's addresses and its events, for tiers that publish or feed another tier.

Otherwise a tier knows contents only by their keys. Labels are stored, moved and published with
their blocks. Blocks without a label (partial block swaps) are not published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvcache.base.arguments import as_int, check_fields, check_kind
from kvcache.base.arrays import IndexArray, Int32Array, index_array, int32_array
from kvcache.base.errors import InvalidInputError
from kvcache.offload.events import OffloadingEvent, parents_first
from kvcache.offload.keys import OffloadKey
from kvcache.offload.slots import READY, STORING, SlotTable
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import LabelTable, label_rows, validate_label_command

_FIRST_ID = 1
"""Label tables reserve id 0 for the null block: address `a` has id `a + 1`."""


@dataclass(frozen=True)
class LabelShape:
    """Sizes of labels: bytes of a digest, tokens of the largest block of any group.

    Raises ConfigurationError for less than 1 of either.
    """

    digest_bytes: int
    max_block_tokens: int

    def __post_init__(self) -> None:
        check_fields(self, as_int, "digest_bytes", "max_block_tokens", at_least=1)


class TierContents:
    """Labels by address, and the events about them. Without a `shape`, a tier has neither."""

    def __init__(self, slots: SlotTable, medium: str, shape: LabelShape | None) -> None:
        """Start without labels, for the addresses of `slots`."""
        self._slots = slots
        self._medium = medium
        self._max_block_tokens = 0 if shape is None else shape.max_block_tokens
        self._events: list[OffloadingEvent] = []
        self._labels = None
        if shape is not None:
            self._labels = LabelTable(
                len(slots.keys) + _FIRST_ID, shape.digest_bytes, shape.max_block_tokens
            )

    def validate(self, labels: Label | None, num_keys: int) -> None:
        """Raise unless these labels fit here, one for each of `num_keys` keys."""
        if labels is None:
            return
        check_kind("labels", labels, Label)
        if self._labels is None:
            return
        if len(labels.block_ids) != num_keys:
            raise InvalidInputError(
                f"labels of {len(labels.block_ids)} blocks for {num_keys} keys: pass one row for "
                "each key, in order"
            )
        validate_label_command(labels, self._labels.digest_bytes)
        longest = int(labels.token_counts.max()) if num_keys else 0
        if longest > self._max_block_tokens:
            raise InvalidInputError(
                f"label of a block of {longest} tokens, the largest block here holds "
                f"{self._max_block_tokens}: pass labels of this plan"
            )

    def write(self, labels: Label | None, rows: IndexArray, addresses: IndexArray) -> None:
        """Store `labels[rows[i]]` at `addresses[i]`. The labels have been validated."""
        if labels is not None and self._labels is not None:
            self._labels.apply(replace(label_rows(labels, rows), block_ids=_ids(addresses)))

    def describe(self, keys: Sequence[OffloadKey], labels: Label) -> None:
        """Complete the labels of keys that are here and were adopted without tokens, with events.

        `labels` has one row per key. Skips other keys. Raises as `validate`.
        """
        addresses = self._slots.addresses_of(keys)
        check_kind("labels", labels, Label)
        self.validate(labels, len(keys))
        if self._labels is None:
            return
        _, rows = np.unique(addresses, return_index=True)
        rows.sort()
        addresses = addresses[rows]
        states = self._slots.states_of(addresses)
        is_here = (states == STORING) | (states == READY)
        rows, addresses = rows[is_here], addresses[is_here]
        labelled, found = self._read(self._labels, addresses)
        lacking = labelled[found.token_counts == 0]
        if len(lacking):
            self.write(labels, rows[lacking], addresses[lacking])
            is_ready = self._slots.states[addresses[lacking]] == READY
            self.tell(addresses[lacking][is_ready], removed=False)

    def withdraw(self, addresses: IndexArray) -> None:
        """Drop the labels of addresses."""
        if self._labels is not None:
            self._labels.withdraw(_ids(addresses))

    def labels_at(self, addresses: IndexArray | Int32Array) -> Label | None:
        """Return the labels of addresses, one row each; None unless all have one."""
        if self._labels is None or not len(addresses):
            return None
        labelled, labels = self._read(self._labels, index_array(addresses))
        return labels if len(labelled) == len(addresses) else None

    def tell(self, addresses: IndexArray, *, removed: bool) -> None:
        """Add an event of the contents of these addresses, which have appeared or go."""
        event = self._event(addresses, removed=removed)
        if event is not None:
            self._events.append(event)

    def present_event(self) -> OffloadingEvent | None:
        """Return an event with all ready content, parents first; None without labels."""
        addresses: IndexArray = np.flatnonzero(self._slots.states == READY)
        if self._labels is None or not len(addresses):
            return None
        labelled, labels = self._read(self._labels, addresses)
        return self._event(addresses[labelled][parents_first(labels)], removed=False)

    def tell_present(self) -> None:
        """Add the event of `present_event`."""
        event = self.present_event()
        if event is not None:
            self._events.append(event)

    def take_events(self) -> tuple[OffloadingEvent, ...]:
        """Return the events since the last call, in order."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def check(self) -> None:
        """Raise InvariantError if the labels are inconsistent."""
        if self._labels is not None:
            self._labels.check()

    def _event(self, addresses: IndexArray, *, removed: bool) -> OffloadingEvent | None:
        """Return an event of the addresses that have a label; None if there are none."""
        if self._labels is None or not len(addresses):
            return None
        labelled, labels = self._read(self._labels, addresses)
        keys = tuple(self._slots.keys_at(addresses[labelled]))
        return OffloadingEvent(keys, self._medium, removed, labels) if keys else None

    def _read(self, labels: LabelTable, addresses: IndexArray) -> tuple[IndexArray, Label]:
        """Return which of the addresses have a label (positions in the array), and those labels,
        with addresses as block ids."""
        labelled: IndexArray = np.flatnonzero(labels.are_labelled(_ids(addresses)))
        found = labels.labels_of(_ids(addresses[labelled]))
        return labelled, replace(found, block_ids=int32_array(addresses[labelled]))


def _ids(addresses: IndexArray) -> Int32Array:
    return int32_array(addresses + _FIRST_ID)
