"""What the tiers write down of a vLLM block: its digest and its parent's, and no tokens.

Imported by both sides, so that slots and files carry the same labels. vLLM folds salt, adapters and
images into its digests, so all blocks are of one namespace here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.protocol.commands import Label
from kvcache.requests.request_content import DEFAULT_NAMESPACE, namespace_name

DIGEST_BYTES = 32
MAX_BLOCK_TOKENS = 1
"""Of a label. Blocks are found by digest."""

NO_PARENT = bytes(DIGEST_BYTES)
_NAMES = (namespace_name(DEFAULT_NAMESPACE),)


def block_labels(
    block_ids: Int32Array, digests: Sequence[bytes], parents: Sequence[bytes] = ()
) -> Label:
    """Return labels of these blocks or slots; without `parents`, they have none."""
    zeros = np.zeros(len(block_ids), np.int32)
    return Label(
        block_ids=block_ids,
        groups=zeros,
        slots=zeros - 1,
        digests=b"".join(digests),
        parent_digests=b"".join(parents) if parents else bytes(DIGEST_BYTES * len(digests)),
        token_counts=zeros,
        token_ids=zeros[:0],
        namespaces=zeros,
        namespace_names=_NAMES,
    )


def split_digests(digests: bytes) -> list[bytes]:
    """Return the digests that lie one behind the other."""
    return [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]
