"""Chains of sealed blocks, as labels."""

from __future__ import annotations

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import extra_keys_bytes
from kvcache.requests.hashing import get_hash_fn, hash_block_tokens, init_none_hash
from kvcache.requests.request import Namespace
from kvcache.requests.request_content import namespace_name

SIZE = 4
HASH_FN = get_hash_fn("sha256")
NONE_HASH = init_none_hash(HASH_FN)
PLAIN = Namespace(0, None, None, None)


def chain_label(
    num_blocks: int,
    *,
    first_token: int = 0,
    group: int = 0,
    namespace: Namespace = PLAIN,
    salt: str | None = None,
) -> Label:
    """Return the labels of a chain; block ids count from 1. `salt` is the first block's own."""
    tokens = np.arange(first_token, first_token + num_blocks * SIZE, dtype=np.int32)
    keys = (("cache_salt", salt),) if salt else None
    digests, parents = [], []
    parent = NONE_HASH
    for i in range(num_blocks):
        parents.append(parent)
        block = tokens[i * SIZE : (i + 1) * SIZE]
        parent = hash_block_tokens(HASH_FN, parent, block, None if i else keys)
        digests.append(parent)
    return Label(
        block_ids=int32_array(range(1, num_blocks + 1)),
        groups=int32_array([group] * num_blocks),
        slots=int32_array([0] * num_blocks),
        digests=b"".join(digests),
        parent_digests=b"".join(parents),
        token_counts=int32_array([SIZE] * num_blocks),
        token_ids=tokens,
        namespaces=int32_array([0] * num_blocks),
        namespace_names=(namespace_name(namespace),),
        extra_keys={0: extra_keys_bytes(keys)} if keys else {},
    )
