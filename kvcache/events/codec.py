"""Cache events as the payload that routers read: msgpack, field names and values theirs.

Stands behind the event sink: a batch of `CacheEvent`s becomes one payload. Refuses to filter,
number or send: which groups and media are published, and when, is the publisher's choice.

    payload   [time, [event, ...], data parallel rank]
    event     {"type": "BlockStored", "block_hashes": [...], ...}       encoding "map"
              ["BlockStored", [...], ...]                               encoding "array"

Lists of integers make up nearly all of a payload. They are written by numpy (`integers.py`) and
copied once, into the payload; of packed digests no object is made per block. Everything else is
packed by msgpack.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from struct import Struct
from typing import Final, Literal, TypeAlias

import msgpack
import numpy as np

from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from kvcache.errors import ConfigurationError, InvalidInputError, shown
from kvcache.events.hashes import are_distinct, ends_before_repeats, short_hash, short_hashes
from kvcache.events.integers import IntegerWriter, PackedArray
from kvcache.specs import KVCacheGroupSpec, KVCacheSpec

Encoding: TypeAlias = Literal["map", "array"]
Value: TypeAlias = bytes | PackedArray
"""A packed value: whole, or header and body of an array."""
Parts: TypeAlias = list[bytes | memoryview]

MEDIA: Final = {"device": "GPU", "host": "CPU", "storage": "STORAGE"}
"""The names that routers know the media by."""

SPEC_KINDS: Final = {
    "full": "full_attention",
    "mla": "mla_attention",
    "sliding_window": "sliding_window",
    "chunked_local": "chunked_local_attention",
    "mamba": "mamba",
    "cross": "cross_attention",
}
"""The names that routers know the kinds by; others go out under their own."""

STORED_KEYS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "cache_salt",
)
REMOVED_KEYS: Final = ("block_hashes", "medium", "group_idx", "locality")

_NUM_ALWAYS: Final = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}
"""How many keys of each event are there even when they hold nothing."""

_NIL: Final = b"\xc0"
_UINT64: Final = Struct(">BQ")
_UINT64_CODE: Final = 0xCF


class EventCodec:
    """Encodes the events of one data-parallel rank. Remembers nothing from payload to payload."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroupSpec],
        *,
        data_parallel_rank: int = 0,
        encoding: Encoding = "map",
    ) -> None:
        """Encode events of `groups`, by index.

        Args:
            groups: the KV cache groups of the plan, as events number them.
            data_parallel_rank: the rank whose cache this is.
            encoding: events as maps with key names, or as positional arrays for consumers that
                were built before there were maps.

        Raises:
            ConfigurationError: a rank that is no number from 0 on, or an unknown encoding.
        """
        if type(data_parallel_rank) is not int or data_parallel_rank < 0:
            raise ConfigurationError(
                f"data parallel rank {shown(data_parallel_rank)}: pass an integer of at least 0"
            )
        if encoding not in ("map", "array"):
            raise ConfigurationError(
                f"event encoding {shown(encoding)}: choose 'map', or 'array' for consumers that "
                "read positions"
            )
        self._packer = msgpack.Packer()
        self._pack = self._packer.pack
        self._groups = [self._group_fields(group.kv_cache_spec) for group in groups]
        self._rank = self._pack(data_parallel_rank)
        self._is_map = encoding == "map"
        self._integers = IntegerWriter()
        words = {"type", *_NUM_ALWAYS, *STORED_KEYS, *REMOVED_KEYS, *MEDIA.values(), "LOCAL"}
        self._words: dict[str, bytes] = {word: self._pack(word) for word in words}

    def encode(self, time_s: float, events: Sequence[CacheEvent]) -> bytes:
        """Return one payload; no events make a heartbeat. Changes nothing.

        Args:
            time_s: when the batch was made, in seconds since 1970.
            events: parents before children, as a core emits them.

        Raises:
            InvalidInputError: an event of a group or medium that does not exist, or whose tokens
                do not fill its blocks.
        """
        self._integers.reset()
        parts: Parts = []
        num_events = 0
        for event in events:
            if isinstance(event, BlocksStored):
                num_events += self._put_stored(event, parts)
            elif isinstance(event, BlocksRemoved):
                self._put_removed(event, parts)
                num_events += 1
            elif isinstance(event, AllBlocksCleared):
                self._put("AllBlocksCleared", (), (), parts)
                num_events += 1
            else:
                raise InvalidInputError(f"{shown(event)} is no cache event: pass those of a core")
        head = self._packer.pack_array_header(3) + self._pack(float(time_s))
        return b"".join([head, self._packer.pack_array_header(num_events), *parts, self._rank])

    def _put_stored(self, event: BlocksStored, parts: Parts) -> int:
        """Encode what was stored: one event, or several where two blocks share a hash."""
        fields = self._fields_of(event.group)
        num_blocks = len(event.digests)
        if len(event.token_ids) != num_blocks * event.block_size or not num_blocks:
            raise InvalidInputError(
                f"{len(event.token_ids)} tokens for {num_blocks} stored blocks of "
                f"{event.block_size} tokens: a stored event states all tokens of full blocks"
            )
        hashes = short_hashes(event.digests)
        parent = _NIL
        if event.parent_digest is not None:
            parent = _UINT64.pack(_UINT64_CODE, short_hash(event.parent_digest))
        keys = event.extra_keys if any(event.extra_keys) else ()
        namespace, pack = event.namespace, self._pack
        lora = None if namespace.lora is None else json.loads(namespace.lora)[0]
        ends, start = ends_before_repeats(hashes), 0
        for end in ends:
            tokens = event.token_ids[start * event.block_size : end * event.block_size]
            values = (
                self._integers.hashes(hashes[start:end]),
                parent,
                self._integers.tokens(tokens),
                pack(event.block_size),
                _NIL,
                self._medium(event.medium),
                pack(lora),
                pack([_untagged(key) for key in keys[start:end]]) if keys else _NIL,
                *fields,
                self._words["LOCAL"],
                pack(namespace.salt),
            )
            self._put("BlockStored", STORED_KEYS, values, parts)
            parent, start = _UINT64.pack(_UINT64_CODE, hashes[end - 1]), end
        return len(ends)

    def _put_removed(self, event: BlocksRemoved, parts: Parts) -> None:
        """Encode what was removed, every hash once."""
        group_index, *_ = self._fields_of(event.group)
        hashes = short_hashes(event.digests)
        if not are_distinct(hashes):
            hashes = np.array(list(dict.fromkeys(hashes.tolist())), np.uint64)
        values = (self._integers.hashes(hashes), self._medium(event.medium), group_index, _NIL)
        self._put("BlockRemoved", REMOVED_KEYS, values, parts)

    def _put(self, tag: str, keys: Sequence[str], values: Sequence[Value], parts: Parts) -> None:
        """Put one event of packed values; optional ones that hold nothing are left out."""
        always, words = _NUM_ALWAYS[tag], self._words
        count = len(values)
        if self._is_map:
            there = [i for i in range(count) if i < always or values[i] != _NIL]
            parts += (self._packer.pack_map_header(len(there) + 1), words["type"], words[tag])
        else:
            while count > always and values[count - 1] == _NIL:
                count -= 1
            there = list(range(count))
            parts += (self._packer.pack_array_header(count + 1), words[tag])
        for index in there:
            if self._is_map:
                parts.append(words[keys[index]])
            value = values[index]
            if isinstance(value, bytes):
                parts.append(value)
            else:
                parts += value

    def _group_fields(self, spec: KVCacheSpec) -> tuple[bytes, bytes]:
        """Pack what is said of a group beside its index: kind and window."""
        window = spec.to_dict()["sliding_window"] if spec.kind == "sliding_window" else None
        return self._pack(SPEC_KINDS.get(spec.kind, spec.kind)), self._pack(window)

    def _fields_of(self, group: int) -> tuple[bytes, bytes, bytes]:
        if not 0 <= group < len(self._groups):
            raise InvalidInputError(
                f"event of KV cache group {group}: there are groups 0 to {len(self._groups) - 1}"
            )
        return self._pack(group), *self._groups[group]

    def _medium(self, medium: str) -> bytes:
        if medium not in MEDIA:
            raise InvalidInputError(
                f"event of medium {shown(medium)}: there are {', '.join(map(repr, MEDIA))}"
            )
        return self._words[MEDIA[medium]]


def _untagged(keys: tuple[tuple[str | int, ...], ...] | None) -> list[object] | None:
    """Return a block's extra keys as routers read them: names and salts bare, items as pairs."""
    if keys is None:
        return None
    return [list(key[1:]) if key[0] == "mm" else key[1] for key in keys]
