"""A block's key in a tier: its digest and its KV cache group, as bytes.

The coordinator makes keys from labels and requests, tiers find slots by them, commands and files
carry them. Contents that must not be shared (another tenant, other weights) have different keys:
the namespace is folded into the digest. `kvcache.requests.hashing` computes digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

import numpy as np

from kvcache.base.arguments import as_byte_strings, as_bytes, as_int, check_kind
from kvcache.base.errors import InvalidInputError, MalformedMessageError, shown
from kvcache.protocol.commands import Label
from kvcache.requests.digests import PackedDigests
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.request_content import (
    DEFAULT_NAMESPACE,
    Namespace,
    namespace_name,
    parse_namespace_name,
)

OffloadKey = NewType("OffloadKey", bytes)
"""A block's digest, its namespace folded in, and its group's index as 4 bytes, big endian."""

GROUP_BYTES = 4

_MAX_DIGEST_BYTES = blake2b.MAX_DIGEST_SIZE


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Return the key of a block in one group.

    Raises InvalidInputError for an empty digest or a group that does not fit 4 bytes.
    """
    return OffloadKey(as_bytes("block_hash", block_hash) + _group_bytes(group_idx))


def get_offload_block_hash(key: OffloadKey) -> BlockHash:
    """Return the digest in a key; raises InvalidInputError for other bytes."""
    _require_key(key)
    return BlockHash(key[:-GROUP_BYTES])


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the group's index in a key; raises InvalidInputError for other bytes."""
    _require_key(key)
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def namespaced_digest(digest: bytes, namespace: Namespace) -> BlockHash:
    """Return `digest` with `namespace` folded in; unchanged for the plain namespace.

    Folding is exclusive-or with a hash of the namespace: different digests stay different, and
    folding again restores the digest. To produce another namespace's digest, an attacker would have
    to find tokens for a given digest.

    Raises InvalidInputError for a digest that is empty or longer than 64 bytes.
    """
    as_bytes("digest", digest)
    check_kind("namespace", namespace, Namespace)
    return BlockHash(_folded(digest, len(digest), namespace))


def make_offload_keys(
    digests: Sequence[BlockHash], group_idx: int, namespace: Namespace | None = None
) -> list[OffloadKey]:
    """Return the keys of many blocks of one group and namespace, in order.

    `digests` are of equal length; packed ones are not taken apart. Raises InvalidInputError for
    digests of unequal length or a group that does not fit 4 bytes.
    """
    group = _group_bytes(group_idx)
    if namespace is not None:
        check_kind("namespace", namespace, Namespace)
    if not isinstance(digests, PackedDigests):
        as_byte_strings("digests", digests)
    if not len(digests):
        return []
    if isinstance(digests, PackedDigests):
        data, size = digests.data, digests.digest_bytes
    else:
        data, size = b"".join(digests), len(digests[0])
        if len(data) != size * len(digests) or any(len(each) != size for each in digests):
            raise InvalidInputError(
                "digests of unequal length: pass those of one hash algorithm together"
            )
    if namespace is not None:
        data = _folded(data, size, namespace)
    return [OffloadKey(data[i : i + size] + group) for i in range(0, len(data), size)]


def label_keys(label: Label) -> list[OffloadKey]:
    """Return the keys of labels, one for each row, in order.

    Raises MalformedMessageError for an unreadable namespace.
    """
    check_kind("label", label, Label)
    count = len(label.block_ids)
    if not count:
        return []
    size = len(label.digests) // count
    rows = np.frombuffer(label.digests, np.uint8).reshape(count, size)
    plain = namespace_name(DEFAULT_NAMESPACE)
    if any(name != plain for name in label.namespace_names):
        folds = b"".join(
            [_fold(parse_namespace_name(name), size) for name in label.namespace_names]
        )
        rows = rows ^ np.frombuffer(folds, np.uint8).reshape(-1, size)[label.namespaces]
    keys = np.empty((count, size + GROUP_BYTES), np.uint8)
    keys[:, :size] = rows
    keys[:, size:] = label.groups.astype(">u4").view(np.uint8).reshape(count, GROUP_BYTES)
    return unpack_keys(keys.tobytes(), size + GROUP_BYTES)


def pack_keys(keys: Sequence[OffloadKey], key_bytes: int) -> bytes:
    """Return keys of `key_bytes` each, joined, as in commands.

    Raises InvalidInputError if one of them has another length.
    """
    key_bytes = _as_width(key_bytes)
    as_byte_strings("keys", keys)
    wrong = [len(key) for key in keys if len(key) != key_bytes]
    if wrong:
        raise InvalidInputError(
            f"{len(wrong)} of {len(keys)} offload keys are not {key_bytes} bytes long, the first "
            f"of them {wrong[0]}: pass keys of one hash algorithm"
        )
    return b"".join(keys)


def unpack_keys(data: bytes, key_bytes: int) -> list[OffloadKey]:
    """Return the keys from `pack_keys`.

    Raises MalformedMessageError for bytes that are not such keys.
    """
    key_bytes = _as_width(key_bytes)
    check_kind("data", data, bytes)
    if len(data) % key_bytes:
        raise MalformedMessageError(
            f"{len(data)} bytes of offload keys of {key_bytes} bytes each: send whole keys"
        )
    return [OffloadKey(data[i : i + key_bytes]) for i in range(0, len(data), key_bytes)]


def _require_key(key: bytes) -> None:
    if not isinstance(key, bytes) or len(key) <= GROUP_BYTES:
        raise InvalidInputError(
            f"offload key {shown(key)}: pass a digest followed by {GROUP_BYTES} bytes of group "
            "index, as make_offload_key returns it"
        )


def _as_width(key_bytes: int) -> int:
    return as_int("key_bytes", key_bytes, at_least=GROUP_BYTES + 1)


def _group_bytes(group_idx: int) -> bytes:
    return as_int("group_idx", group_idx, at_most=2**32 - 1).to_bytes(GROUP_BYTES, "big")


def _folded(data: bytes, digest_bytes: int, namespace: Namespace) -> bytes:
    if namespace == DEFAULT_NAMESPACE:
        return data
    fold = np.frombuffer(_fold(namespace, digest_bytes), np.uint8)
    rows = np.frombuffer(data, np.uint8).reshape(-1, digest_bytes) ^ fold
    return rows.tobytes()


def _fold(namespace: Namespace, digest_bytes: int) -> bytes:
    if not 0 < digest_bytes <= _MAX_DIGEST_BYTES:
        raise InvalidInputError(
            f"digest of {digest_bytes} bytes: pass one of 1 to {_MAX_DIGEST_BYTES} bytes"
        )
    if namespace == DEFAULT_NAMESPACE:
        return bytes(digest_bytes)
    return blake2b(namespace_name(namespace), digest_size=digest_bytes).digest()


def first_victims_first(keys: Sequence[OffloadKey], parents: Sequence[bytes]) -> list[int]:
    """Return all places of `keys`, which are given newest first, in the order in which the blocks
    should be evicted: the oldest first, but each behind those that are of no use without it.

    `keys[i]` continues the block with the digest `parents[i]`.
    """
    place_of = {key: place for place, key in enumerate(keys)}
    is_taken = [False] * len(keys)
    last_victims: list[int] = []
    for place in range(len(keys)):
        chain: list[int] = []
        following: int | None = place
        while following is not None and not is_taken[following]:
            is_taken[following] = True
            chain.append(following)
            group = get_offload_group_idx(keys[following])
            following = place_of.get(make_offload_key(parents[following], group))
        last_victims += reversed(chain)
    return last_victims[::-1]
