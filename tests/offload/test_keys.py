"""Names of blocks in tiers."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.errors import InvalidInputError, MalformedMessageError
from kvcache.offload import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    label_keys,
    make_offload_key,
    make_offload_keys,
    namespaced_digest,
    pack_keys,
    unpack_keys,
)
from kvcache.protocol.commands import Label
from kvcache.requests.digests import PackedDigests
from kvcache.requests.hashing import BlockHash
from kvcache.requests.request import Namespace
from kvcache.requests.request_content import namespace_name

PLAIN = Namespace(0, None, None, None)
DIGEST = bytes(range(32))


def test_a_key_is_a_digest_and_a_group_in_big_endian() -> None:
    key = make_offload_key(DIGEST, 258)
    assert key == DIGEST + b"\x00\x00\x01\x02"
    assert get_offload_block_hash(key) == DIGEST
    assert get_offload_group_idx(key) == 258


@pytest.mark.parametrize("group", [-1, 2**32, "0", None])
def test_a_group_that_does_not_fit_is_refused(group: int) -> None:
    with pytest.raises(InvalidInputError) as caught:
        make_offload_key(DIGEST, group)
    assert str(caught.value) == (f"group_idx is {group!r}: pass an integer from 0 to 4294967295")


@pytest.mark.parametrize("key", [b"", b"abcd"])
def test_bytes_too_short_for_a_key_are_refused(key: bytes) -> None:
    for read in (get_offload_block_hash, get_offload_group_idx):
        with pytest.raises(InvalidInputError) as caught:
            read(OffloadKey(key))
        assert str(caught.value) == (
            f"offload key {key!r}: pass a digest followed by 4 bytes of group index, as "
            "make_offload_key returns it"
        )


def test_the_plain_namespace_leaves_digests_as_they_are() -> None:
    assert namespaced_digest(DIGEST, PLAIN) == DIGEST


def test_every_part_of_a_namespace_sets_keys_apart() -> None:
    namespaces = [
        PLAIN,
        Namespace(1, None, None, None),
        Namespace(0, "a", None, None),
        Namespace(0, None, "a", None),
        Namespace(0, None, None, "a"),
        Namespace(0, "a", "a", None),
    ]
    folded = {namespaced_digest(DIGEST, namespace) for namespace in namespaces}
    assert len(folded) == len(namespaces)
    for namespace in namespaces:
        assert namespaced_digest(namespaced_digest(DIGEST, namespace), namespace) == DIGEST


def test_many_keys_are_those_made_one_by_one() -> None:
    digests = [BlockHash(bytes([i]) * 32) for i in range(5)]
    for namespace in (None, PLAIN, Namespace(3, None, "salt", None)):
        expected = [
            make_offload_key(namespaced_digest(digest, namespace or PLAIN), 2) for digest in digests
        ]
        assert make_offload_keys(digests, 2, namespace) == expected
        packed = PackedDigests(b"".join(digests), 32)
        assert make_offload_keys(packed, 2, namespace) == expected
    assert make_offload_keys([], 0) == []


def test_digests_of_two_algorithms_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="digests of unequal length"):
        make_offload_keys([BlockHash(bytes(16)), BlockHash(bytes(32))], 0)


def test_a_labels_keys_are_those_of_its_rows() -> None:
    namespaces = [PLAIN, Namespace(2, None, None, "tenant")]
    digests = [bytes([i]) * 32 for i in range(4)]
    label = Label(
        block_ids=int32_array([4, 3, 9, 1]),
        groups=int32_array([0, 1, 0, 7]),
        slots=int32_array([0] * 4),
        digests=b"".join(digests),
        parent_digests=bytes(4 * 32),
        token_counts=int32_array([0] * 4),
        token_ids=int32_array([]),
        namespaces=int32_array([0, 1, 1, 0]),
        namespace_names=tuple(namespace_name(each) for each in namespaces),
    )
    assert label_keys(label) == [
        make_offload_key(namespaced_digest(digests[0], namespaces[0]), 0),
        make_offload_key(namespaced_digest(digests[1], namespaces[1]), 1),
        make_offload_key(namespaced_digest(digests[2], namespaces[1]), 0),
        make_offload_key(namespaced_digest(digests[3], namespaces[0]), 7),
    ]


def test_packed_keys_are_unpacked_again() -> None:
    keys = make_offload_keys([BlockHash(bytes([i]) * 16) for i in range(3)], 1)
    assert unpack_keys(pack_keys(keys, 20), 20) == keys
    assert unpack_keys(b"", 20) == []


def test_keys_of_another_length_are_not_packed() -> None:
    with pytest.raises(InvalidInputError) as caught:
        pack_keys([make_offload_key(bytes(16), 0), make_offload_key(bytes(32), 0)], 20)
    assert str(caught.value) == (
        "1 of 2 offload keys are not 20 bytes long, the first of them 36: pass keys of one hash "
        "algorithm"
    )
    with pytest.raises(MalformedMessageError, match="21 bytes of offload keys of 20 bytes each"):
        unpack_keys(bytes(21), 20)
    with pytest.raises(InvalidInputError, match="key_bytes is 4: pass an integer of at least 5"):
        pack_keys([], 4)


def test_a_namespace_that_is_not_readable_is_refused() -> None:
    zero, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    label = Label(zero, zero, zero, bytes(32), bytes(32), zero, none, zero, (b"\xff",))
    with pytest.raises(MalformedMessageError, match="is not readable"):
        label_keys(label)
