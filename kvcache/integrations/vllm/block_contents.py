"""What events say of a block besides its digest: its tokens, adapter, salt and images.

Made from vLLM's requests, as labels that the tiers keep while events are on. Memory and files hold
no tokens: an adopted block has none until a request brings them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.integrations.vllm.block_labels import DIGEST_BYTES
from kvcache.offload.contents import LabelShape
from kvcache.offload.keys import GROUP_BYTES, OffloadKey
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import extra_keys_bytes
from kvcache.requests.request_content import DEFAULT_NAMESPACE, Namespace, namespace_name

_PLAIN = namespace_name(DEFAULT_NAMESPACE)

ExtraKeys = tuple[tuple[Any, ...], ...]
ExtraKeysOf = Callable[[Any, int, int], ExtraKeys | None]
"""Returns what else entered the hash of a request's tokens from one position to another: kinds and
their values, as vLLM hashes them."""


class BlockContents:
    """Describes blocks of requests. Remembers nothing."""

    def __init__(self, block_sizes: Sequence[int], extra_keys_of: ExtraKeysOf) -> None:
        """Describe blocks of KV cache groups with these numbers of tokens per block."""
        self.block_sizes = tuple(block_sizes)
        self._extra_keys_of = extra_keys_of

    @property
    def shape(self) -> LabelShape:
        return LabelShape(DIGEST_BYTES, max(self.block_sizes))

    def labels(
        self,
        keys: Sequence[OffloadKey],
        parents: Sequence[bytes],
        places: Sequence[tuple[Any, int]],
    ) -> Label:
        """Return labels of `keys`, which continue the digests `parents`; `places[i]` is the request
        of a block, and its index there.

        A block has no tokens in its label if its hash covers what events cannot say, such as
        embeddings.
        """
        groups: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        names: dict[bytes, int] = {}
        namespaces: list[int] = []
        extra_keys: dict[int, bytes] = {}
        for row, (key, (request, index)) in enumerate(zip(keys, places, strict=True)):
            group = int.from_bytes(key[-GROUP_BYTES:], "big")
            size = self.block_sizes[group]
            start, end = index * size, (index + 1) * size
            extra = self._extra_keys_of(request, start, end) or ()
            is_sayable = all(map(_is_sayable, extra))
            if extra and is_sayable:
                extra_keys[row] = extra_keys_bytes(extra)
            groups.append(group)
            counts.append(size if is_sayable else 0)
            if is_sayable:
                tokens += request.all_token_ids[start:end]
            namespaces.append(names.setdefault(_namespace_name(request), len(names)))
        return Label(
            block_ids=int32_array(np.arange(len(keys))),
            groups=int32_array(groups),
            slots=int32_array(np.full(len(keys), -1)),
            digests=b"".join([key[:-GROUP_BYTES] for key in keys]),
            parent_digests=b"".join(parents),
            token_counts=int32_array(counts),
            token_ids=int32_array(tokens),
            namespaces=int32_array(namespaces),
            namespace_names=tuple(names),
            extra_keys=extra_keys,
        )


def _is_sayable(key: tuple[Any, ...]) -> bool:
    """Return whether labels can hold an extra key: a kind, a text, and perhaps a number."""
    is_text = all(isinstance(part, str) for part in key[:2])
    return 2 <= len(key) <= 3 and is_text and type(key[-1]) in (str, int)


def _namespace_name(request: Any) -> bytes:
    adapter = request.lora_request
    if adapter is None and request.cache_salt is None:
        return _PLAIN
    lora = None
    if adapter is not None:
        lora = json.dumps([adapter.lora_name, adapter.lora_path], ensure_ascii=False)
    return namespace_name(Namespace(0, lora, request.cache_salt, None))
