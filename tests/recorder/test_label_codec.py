"""Label sets of all ranks decode to themselves, whether they are equal or not."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import numpy as np
import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.errors import MalformedMessageError, VersionMismatchError
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import LABEL_VERSION, LabelSet
from kvcache.recorder.records import pack_label_sets, unpack_label_sets


def label_set(rank: int, block_ids: list[int]) -> LabelSet:
    count = len(block_ids)
    label = Label(
        block_ids=int32_array(block_ids),
        groups=int32_array([0] * count),
        slots=int32_array([-1] * count),
        digests=b"d" * 32 * count,
        parent_digests=b"p" * 32 * count,
        token_counts=int32_array([2] * count),
        token_ids=int32_array(range(2 * count)),
        namespaces=int32_array([i % 2 for i in range(count)]),
        namespace_names=(b"", b"a salt"),
        extra_keys={0: b"an image"} if count else {},
    )
    checksums = np.full(count, -1, "<i8").tobytes()
    return LabelSet(LABEL_VERSION, rank, 3, 17, f"layout {rank}", 32, label, checksums)


def carried(sets: list[LabelSet]) -> tuple[LabelSet, ...]:
    packed = msgpack.packb(pack_label_sets(sets))
    return unpack_label_sets(msgpack.unpackb(packed, strict_map_key=False))


def test_what_ranks_hold_comes_back_equal_or_not() -> None:
    sets = [label_set(0, [1, 5, 7]), label_set(1, [1, 5, 7]), label_set(2, [2]), label_set(3, [])]
    for was, now in zip(sets, carried(sets), strict=True):
        assert list(was) == list(now)
        for name in ("version", "rank", "epoch", "applied_seq", "layout_fingerprint", "checksums"):
            assert getattr(was, name) == getattr(now, name)
        assert was.labels.extra_keys == now.labels.extra_keys


def test_equal_labels_are_written_once() -> None:
    one = len(msgpack.packb(pack_label_sets([label_set(0, list(range(1, 100)))])))
    eight = [label_set(rank, list(range(1, 100))) for rank in range(8)]
    assert len(msgpack.packb(pack_label_sets(eight))) < 2 * one


@pytest.mark.parametrize("values", [None, [], [[], [[0]]], [[[1]], []], [[], 3], {"a": 1}])
def test_anything_else_is_refused(values: object) -> None:
    with pytest.raises(MalformedMessageError, match="no labels: "):
        unpack_label_sets(values)


def test_labels_of_another_version_or_shape_are_refused() -> None:
    packed = pack_label_sets([label_set(0, [1, 2])])
    different, ((index, version, *rest),) = packed
    with pytest.raises(VersionMismatchError, match="have version 2"):
        unpack_label_sets([different, [[index, version + 1, *rest]]])
    wrong = replace(label_set(0, [1, 2]).labels, groups=int32_array([0]))
    labels = [getattr(wrong, name) for name in Label.__dataclass_fields__]
    plain = [v.tobytes() if isinstance(v, np.ndarray) else v for v in labels]
    with pytest.raises(MalformedMessageError, match="label of 2 blocks has arrays of other sizes"):
        unpack_label_sets([[plain], [[0, version, *rest]]])
