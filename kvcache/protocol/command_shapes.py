"""Checks that the arrays of one command fit together, when messages are decoded.

No receiver could read such a command, so no later check is needed. Contents are not checked here:
whether a block exists is decided where a command is applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from kvcache.base.arrays import Int32Array
from kvcache.base.compiled import array_type, compiled
from kvcache.base.errors import MalformedMessageError
from kvcache.protocol.commands import (
    Audit,
    BlockTablePatch,
    Copy,
    Fetch,
    Label,
    Load,
    Spill,
    Store,
    WriteExpected,
)
from kvcache.protocol.labels import validate_label_command


def _same_length(command: object, **arrays: Int32Array) -> int:
    """Return the common length of `arrays`, or raise with all lengths."""
    lengths = set(map(len, arrays.values()))
    if len(lengths) > 1:
        told = {name: len(array) for name, array in arrays.items()}
        raise MalformedMessageError(f"{type(command).__name__} with unequal lengths {told}")
    return lengths.pop()


@compiled(types.int64(array_type("int32", is_read=True)))
def _sum_of(counts: Int32Array) -> int:
    """Return the sum of counts, -1 if one of them is negative."""
    total = 0
    for count in counts:
        if count < 0:
            return -1
        total += count
    return total


def _counts_match(command: object, what: str, counts: Int32Array, items: Int32Array) -> None:
    total = _sum_of(counts)
    if total < 0:
        raise MalformedMessageError(f"{type(command).__name__} with a negative count of {what}")
    if total != len(items):
        raise MalformedMessageError(
            f"{type(command).__name__} announces {total} {what} and brings {len(items)}"
        )


def _validate_patch(patch: BlockTablePatch) -> None:
    count = len(patch.slots)
    if not (count == len(patch.groups) == len(patch.first_indices) == len(patch.counts)):
        _same_length(
            patch,
            slots=patch.slots,
            groups=patch.groups,
            first_indices=patch.first_indices,
            counts=patch.counts,
        )
    _counts_match(patch, "block ids", patch.counts, patch.block_ids)


def _validate_copy(copy: Copy | Store | Load) -> None:
    _same_length(copy, sources=copy.sources, destinations=copy.destinations)


def _validate_label(label: Label) -> None:
    count = len(label.block_ids)
    validate_label_command(label, max(1, len(label.digests) // count) if count else 1)


def _validate_forward(forward: WriteExpected) -> None:
    _same_length(forward, verify_slots=forward.verify_slots, verify_lengths=forward.verify_lengths)
    num_rows = _same_length(
        forward,
        slots=forward.slots,
        is_new=forward.is_new,
        starts=forward.starts,
        counts=forward.counts,
        token_starts=forward.token_starts,
        token_counts=forward.token_counts,
    )
    if len(forward.content_keys) != num_rows:
        raise MalformedMessageError(
            f"WriteExpected of {num_rows} rows with {len(forward.content_keys)} content keys"
        )
    for name in ("external_counts", "draft_counts", "encoder_counts", "encoder_keys"):
        if len(getattr(forward, name)) not in (0, num_rows):
            raise MalformedMessageError(
                f"WriteExpected of {num_rows} rows with {len(getattr(forward, name))} {name}"
            )
    _counts_match(forward, "tokens", forward.token_counts, forward.token_ids)


def _validate_audit(audit: Audit) -> None:
    count = _same_length(audit, block_ids=audit.block_ids, groups=audit.groups)
    if len(audit.digests) % count if count else audit.digests:
        raise MalformedMessageError(
            f"Audit of {count} blocks with {len(audit.digests)} bytes of digests"
        )


def _validate_keys(job: Spill | Fetch) -> None:
    count = len(job.sources if isinstance(job, Spill) else job.destinations)
    if len(job.keys) % count if count else job.keys:
        raise MalformedMessageError(
            f"{type(job).__name__} of {count} slots with {len(job.keys)} bytes of keys"
        )


SHAPE_VALIDATORS: dict[type[Any], Callable[[Any], None]] = {
    BlockTablePatch: _validate_patch,
    Copy: _validate_copy,
    Store: _validate_copy,
    Load: _validate_copy,
    Spill: _validate_keys,
    Fetch: _validate_keys,
    Label: _validate_label,
    WriteExpected: _validate_forward,
    Audit: _validate_audit,
}
"""By class of command: raises MalformedMessageError unless its arrays fit together."""
