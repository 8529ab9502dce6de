"""Label sets as plain values and back, for the beginning of an epoch that was restored.

Messages carry labels in pieces with limits; a record has those of all ranks at once. Ranks mostly
hold equal labels: what is equal is written once. Refuses what does not fit together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import KVCacheError, MalformedMessageError
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import LabelSet

_LABEL_FIELDS = tuple(field.name for field in fields(Label))
_SET_FIELDS = tuple(field.name for field in fields(LabelSet) if field.name != "labels")


def pack_label_sets(label_sets: Sequence[LabelSet]) -> list[Any]:
    """Return plain values: the different labels, then for each set its fields and which it has."""
    different: list[list[Any]] = []
    sets = []
    for label_set in label_sets:
        labels = [_plain(getattr(label_set.labels, name)) for name in _LABEL_FIELDS]
        if labels not in different:
            different.append(labels)
        own = [getattr(label_set, name) for name in _SET_FIELDS]
        sets.append([different.index(labels), *own])
    return [different, sets]


def unpack_label_sets(values: Any) -> tuple[LabelSet, ...]:
    """Return what `pack_label_sets` made; raises MalformedMessageError for anything else."""
    try:
        different, sets = values
        labels = [
            Label(**{n: _value(n, v) for n, v in zip(_LABEL_FIELDS, one, strict=True)})
            for one in different
        ]
        return tuple(
            LabelSet(labels=labels[index], **dict(zip(_SET_FIELDS, own, strict=True)))
            for index, *own in sets
        )
    except KVCacheError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedMessageError(f"no labels: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype("<i4", copy=False).tobytes()
    return list(value) if isinstance(value, tuple) else value


def _value(name: str, value: Any) -> Any:
    if name in _ARRAYS:
        return _array(value)
    return tuple(value) if isinstance(value, list) else value


def _array(value: bytes) -> Int32Array:
    return np.frombuffer(value, "<i4").astype(np.int32, copy=False)


_ARRAYS = frozenset({"block_ids", "groups", "slots", "token_counts", "token_ids", "namespaces"})
