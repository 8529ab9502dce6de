"""What the tiers write down of a vLLM block: its digest, its group, its parent's digest, no tokens.

Imported by both sides, so that slots and files carry the same labels. vLLM folds salt, adapters and
images into its digests, so all blocks are of one namespace here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.offload.keys import OffloadKey, make_offload_key
from kvcache.protocol.commands import Label
from kvcache.requests.request_content import DEFAULT_NAMESPACE, namespace_name

DIGEST_BYTES = 32
MAX_BLOCK_TOKENS = 1
"""Of a label. Blocks are found by digest."""

NO_PARENT = bytes(DIGEST_BYTES)
_NAMES = (namespace_name(DEFAULT_NAMESPACE),)


def block_labels(
    block_ids: Int32Array, keys: Sequence[bytes], parents: Sequence[bytes] = ()
) -> Label:
    """Return labels of the blocks or slots of these keys; without `parents`, they have none."""
    zeros = np.zeros(len(block_ids), np.int32)
    return Label(
        block_ids=block_ids,
        groups=int32_array([int.from_bytes(key[DIGEST_BYTES:], "big") for key in keys]),
        slots=zeros - 1,
        digests=b"".join([key[:DIGEST_BYTES] for key in keys]),
        parent_digests=b"".join(parents) if parents else bytes(DIGEST_BYTES * len(keys)),
        token_counts=zeros,
        token_ids=zeros[:0],
        namespaces=zeros,
        namespace_names=_NAMES,
    )


def labelled_keys(labels: Label) -> list[OffloadKey]:
    """Return the key in each label. One that was never written has the key of no block."""
    return [
        make_offload_key(labels.digests[place : place + DIGEST_BYTES], max(0, group))
        for place, group in zip(
            range(0, len(labels.digests), DIGEST_BYTES), labels.groups.tolist(), strict=True
        )
    ]
