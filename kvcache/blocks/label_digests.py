"""Do labels' digests follow from what else they say? For audits, and for cutting long blocks.

Beside the rebuilds, which believe the digests that all ranks agree on. A block's digest is a chain
over its units: where block sizes differ, a longer block is called by the digest of its last unit.
Refuses to repair.
"""

from __future__ import annotations

import numpy as np

from kvcache.arrays import Int32Array
from kvcache.errors import MalformedMessageError
from kvcache.hash_algorithms import TOKEN_BYTES, HashFn
from kvcache.hashing import BlockHash, ExtraKeys
from kvcache.labels import LabelSet, parse_extra_keys


def wrong_digests(label_set: LabelSet, hash_fn: HashFn, unit_tokens: int) -> Int32Array:
    """Return the blocks whose digest is not that of their parent, tokens and extra keys.

    `unit_tokens` is the greatest common divisor of all block sizes. Blocks of several units with
    multimodal items cannot be looked at and are left out. O(tokens); changes nothing.
    """
    labels, size = label_set.labels, label_set.digest_bytes
    if size != hash_fn.digest_bytes:
        everything: Int32Array = labels.block_ids.copy()
        return everything
    digests: list[bytes] = np.frombuffer(labels.digests, f"V{size}").tolist()
    parents: list[bytes] = np.frombuffer(labels.parent_digests, f"V{size}").tolist()
    token_bytes = labels.token_ids.astype("<i4", copy=False).tobytes()
    ends: list[int] = (np.cumsum(labels.token_counts) * TOKEN_BYTES).tolist()
    unit_bytes, extra_keys = unit_tokens * TOKEN_BYTES, labels.extra_keys
    is_wrong = np.zeros(len(digests), dtype=np.bool_)
    start = 0
    for row, (digest, parent, end) in enumerate(zip(digests, parents, ends, strict=True)):
        tokens = token_bytes[start:end]
        start = end
        if len(tokens) == unit_bytes and row not in extra_keys:
            is_wrong[row] = hash_fn.hash_plain(parent, tokens) != digest
            continue
        try:
            keys = parse_extra_keys(extra_keys.get(row, b""))
        except MalformedMessageError:
            is_wrong[row] = True
            continue
        expected: list[BlockHash] | None = []
        if tokens and not len(tokens) % unit_bytes:
            expected = digests_of_units(hash_fn, BlockHash(parent), tokens, unit_tokens, keys)
        is_wrong[row] = expected is not None and expected[-1:] != [digest]
    wrong: Int32Array = labels.block_ids[is_wrong]
    return wrong


def digests_of_units(
    hash_fn: HashFn,
    parent: BlockHash,
    tokens: bytes,
    unit_tokens: int,
    extra_keys: ExtraKeys | None,
) -> list[BlockHash] | None:
    """Return the digests of a block's units; None where its keys do not say which units have them.

    That is where it has several units and multimodal items. A salt is the first unit's.
    """
    num_units = len(tokens) // (unit_tokens * TOKEN_BYTES)
    if num_units == 1:
        return hash_fn.chain(parent, tokens, unit_tokens, 1, extra_keys)
    if any(key[0] == "mm" for key in extra_keys or ()):
        return None
    first = hash_fn.chain(parent, tokens, unit_tokens, 1, extra_keys)
    rest = tokens[unit_tokens * TOKEN_BYTES :]
    later = keys_of_later_units(extra_keys)
    return first + hash_fn.chain(first[0], rest, unit_tokens, num_units - 1, later)


def keys_of_later_units(extra_keys: ExtraKeys | None) -> ExtraKeys | None:
    """Return the keys of all units of a block but its first one, where it has no items."""
    return tuple(key for key in extra_keys or () if key[0] == "lora") or None
