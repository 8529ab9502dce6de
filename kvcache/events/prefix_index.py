"""How much of a prompt each cache holds: the leading blocks, by medium.

Fed by subscribers, for routers. Prompts are compared token by token, so it does not matter how a
publisher hashes. Does not rank caches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvcache.base.arguments import as_text, as_tuple, check_hashable, check_kind
from kvcache.base.arrays import Int32Array
from kvcache.base.errors import RequestError
from kvcache.events.subscription import Update
from kvcache.events.wire_events import ClearedEvent, RemovedEvent, RouterKey, StoredEvent
from kvcache.requests.tokens import as_token_ids

BlockKey: TypeAlias = tuple[int, bytes, "str | None", "str | None", tuple[RouterKey, ...]]
"""What distinguishes a block from its siblings: parent, tokens, adapter, salt, items."""

_MEDIA = {"GPU": 1, "CPU": 2, "STORAGE": 4}
_DEVICE, _HOST, _ALL = 1, 3, 7


@dataclass(frozen=True)
class PrefixMatch:
    """Number of leading blocks of a prompt that `source` has: on the device; there or in host
    memory; anywhere. Each count includes the one before."""

    source: Hashable
    device_blocks: int
    host_blocks: int
    storage_blocks: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt that need not be computed there."""
        return self.storage_blocks * self.block_size


class PrefixIndex:
    """The caches of any number of sources, updated by their events. One user, one thread."""

    def __init__(self) -> None:
        """Start without sources."""
        self._sources: dict[Hashable, _SourceIndex] = {}

    @property
    def sources(self) -> tuple[Hashable, ...]:
        """All sources, in the order in which they came."""
        return tuple(self._sources)

    def num_blocks(self, source: Hashable) -> int:
        """Return the number of different blocks of a source in all media."""
        check_hashable("source", source)
        index = self._sources.get(source)
        return 0 if index is None else len(index.media)

    def follow(self, source: Hashable, update: Update) -> None:
        """Apply an update of a subscription, in order."""
        check_hashable("source", source)
        check_kind("update", update, Update)
        index = self._sources.setdefault(source, _SourceIndex())
        for event in update.batch.events:
            if isinstance(event, StoredEvent):
                index.put(event)
            elif isinstance(event, RemovedEvent):
                index.take(event)
            elif isinstance(event, ClearedEvent):
                index = self._sources[source] = _SourceIndex()

    def forget(self, source: Hashable) -> None:
        """Remove a source."""
        check_hashable("source", source)
        self._sources.pop(source, None)

    def match(
        self,
        token_ids: Sequence[int] | Int32Array,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        items: Sequence[tuple[RouterKey, ...]] = (),
    ) -> list[PrefixMatch]:
        """Return how much of a prompt every source has, sources in the order in which they came.

        Args:
            token_ids: the prompt, shape `(n,)`; only whole blocks count.
            lora_name: the adapter it runs with.
            cache_salt: its salt.
            items: for each block, the multimodal items in it as events name them; empty for text
                prompts.

        Raises:
            RequestError: invalid token ids, names that are not text, items that are not tuples.
        """
        tokens = as_token_ids(token_ids, "prompt")
        if lora_name is not None:
            lora_name = as_text("lora_name", lora_name, RequestError)
        if cache_salt is not None:
            cache_salt = as_text("cache_salt", cache_salt, RequestError)
        items = as_tuple("items", items, RequestError, tuple)
        check_hashable("items", items, RequestError)
        cut: dict[int, list[bytes]] = {}
        found: list[PrefixMatch] = []
        for source, index in self._sources.items():
            size = index.block_size
            if size and size not in cut:
                step = size * tokens.itemsize
                data = tokens[: len(tokens) // size * size].tobytes()
                cut[size] = [data[at : at + step] for at in range(0, len(data), step)]
            counts = index.match(cut.get(size, []), lora_name, cache_salt, items)
            found.append(PrefixMatch(source, *counts, size))
        return found


class _SourceIndex:
    """One cache: blocks of group 0 by content, and the media that have each."""

    def __init__(self) -> None:
        self.block_size = 0
        self.media: dict[int, int] = {}
        self._hashes: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}

    def put(self, event: StoredEvent) -> None:
        if event.group_idx:
            return
        self.block_size = event.block_size
        bit = _MEDIA.get(event.medium, _MEDIA["STORAGE"])
        step = event.block_size * event.token_ids.itemsize
        data = np.ascontiguousarray(event.token_ids).tobytes()
        parent = event.parent_block_hash or 0
        for i, value in enumerate(event.block_hashes.tolist()):
            items = _items(event.extra_keys[i]) if event.extra_keys else ()
            tokens = data[i * step : (i + 1) * step]
            key = (parent, tokens, event.lora_name, event.cache_salt, items)
            before = self._keys.get(value)
            if before is not None and before != key and self._hashes.get(before) == value:
                del self._hashes[before]
            self._hashes[key] = parent = value
            self._keys[value] = key
            self.media[value] = self.media.get(value, 0) | bit

    def take(self, event: RemovedEvent) -> None:
        if event.group_idx:
            return
        bit = _MEDIA.get(event.medium, _MEDIA["STORAGE"])
        for value in event.block_hashes.tolist():
            left = self.media.get(value, 0) & ~bit
            if left:
                self.media[value] = left
            elif self.media.pop(value, 0):
                key = self._keys.pop(value)
                if self._hashes.get(key) == value:
                    del self._hashes[key]

    def match(
        self,
        blocks: Sequence[bytes],
        lora_name: str | None,
        cache_salt: str | None,
        items: Sequence[tuple[RouterKey, ...]],
    ) -> tuple[int, int, int]:
        """Return the leading blocks on the device, there or in host memory, and anywhere."""
        parent = 0
        lengths = [0, 0, 0]
        wanted = (_DEVICE, _HOST, _ALL)
        goes_on = [True, True, True]
        for i, tokens in enumerate(blocks):
            there = items[i] if i < len(items) else ()
            found = self._hashes.get((parent, tokens, lora_name, cache_salt, there))
            if found is None:
                break
            media = self.media[found]
            for place in range(3):
                goes_on[place] = goes_on[place] and bool(media & wanted[place])
                lengths[place] += goes_on[place]
            parent = found
        return lengths[0], lengths[1], lengths[2]


def _items(keys: tuple[RouterKey, ...] | None) -> tuple[RouterKey, ...]:
    """Return the multimodal items among a block's extra keys, without names and salts."""
    return tuple(key for key in keys if isinstance(key, tuple)) if keys else ()
