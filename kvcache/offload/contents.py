"""The labels of a tier's addresses, for tiers that publish events or feed another tier.

Otherwise a tier knows contents only by their keys. Labels are stored, moved and published with
their blocks. Blocks without a label (swapped tails) are not published.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvcache.base.arguments import as_int, check_fields
from kvcache.base.arrays import IndexArray, Int32Array, int32_array
from kvcache.base.errors import InvalidInputError
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import LabelTable, validate_label_command

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


class ContentTable:
    """Labels by address."""

    def __init__(self, num_addresses: int, shape: LabelShape) -> None:
        """Start without labels."""
        self._max_block_tokens = shape.max_block_tokens
        self._table = LabelTable(
            num_addresses + _FIRST_ID, shape.digest_bytes, shape.max_block_tokens
        )

    def validate(self, labels: Label, num_keys: int) -> None:
        """Raise unless these labels fit here, one for each of `num_keys` keys."""
        if len(labels.block_ids) != num_keys:
            raise InvalidInputError(
                f"labels of {len(labels.block_ids)} blocks for {num_keys} keys: pass one row for "
                "each key, in order"
            )
        validate_label_command(labels, self._table.digest_bytes)
        longest = int(labels.token_counts.max()) if num_keys else 0
        if longest > self._max_block_tokens:
            raise InvalidInputError(
                f"label of a block of {longest} tokens, the largest block here holds "
                f"{self._max_block_tokens}: pass labels of this plan"
            )

    def write(self, labels: Label, rows: IndexArray, addresses: IndexArray) -> None:
        """Store `labels[rows[i]]` at `addresses[i]`. The labels have been validated."""
        self._table.apply(replace(label_rows(labels, rows), block_ids=_ids(addresses)))

    def withdraw(self, addresses: IndexArray) -> None:
        """Drop the labels of addresses."""
        self._table.withdraw(_ids(addresses))

    def read(self, addresses: IndexArray) -> tuple[IndexArray, Label]:
        """Return which of the addresses have a label (positions in the array), and those labels,
        with addresses as block ids."""
        labelled: IndexArray = np.flatnonzero(self._table.are_labelled(_ids(addresses)))
        labels = self._table.labels_of(_ids(addresses[labelled]))
        return labelled, replace(labels, block_ids=int32_array(addresses[labelled]))

    def check(self) -> None:
        """Raise InvariantError if the labels are inconsistent."""
        self._table.check()


def label_rows(labels: Label, rows: IndexArray) -> Label:
    """Return some rows of labels, in this order; a copy. Each row may be named once."""
    count = len(labels.block_ids)
    if len(rows) == count and bool((rows == np.arange(count)).all()):
        return labels
    size = len(labels.digests) // count if count else 1
    digests = np.frombuffer(labels.digests, np.uint8).reshape(count, size)
    parents = np.frombuffer(labels.parent_digests, np.uint8).reshape(count, size)
    counts = labels.token_counts[rows]
    starts = (np.cumsum(labels.token_counts) - labels.token_counts)[rows]
    ends = np.cumsum(counts)
    tokens = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(
        starts - (ends - counts), counts
    )
    extra_keys = {}
    if labels.extra_keys:
        extra_keys = {
            place: labels.extra_keys[row]
            for place, row in enumerate(rows.tolist())
            if row in labels.extra_keys
        }
    return Label(
        block_ids=labels.block_ids[rows],
        groups=labels.groups[rows],
        slots=labels.slots[rows],
        digests=digests[rows].tobytes(),
        parent_digests=parents[rows].tobytes(),
        token_counts=counts,
        token_ids=labels.token_ids[tokens],
        namespaces=labels.namespaces[rows],
        namespace_names=labels.namespace_names,
        extra_keys=extra_keys,
    )


def _ids(addresses: IndexArray) -> Int32Array:
    return int32_array(addresses + _FIRST_ID)
