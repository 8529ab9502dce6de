"""Encodes cache events as routers read them: msgpack, with vLLM's field names.

A batch of translated events becomes one payload. The publisher chooses groups, media and numbers.

    payload   [time, [event, ...], data parallel rank]
    event     {"type": "BlockStored", "block_hashes": [...], ...}       encoding "map"
              ["BlockStored", [...], ...]                               encoding "array"

Most of a payload is lists of integers. numpy writes them, and they are copied once,
into the payload; no object is made per packed digest. msgpack packs everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from struct import Struct
from typing import Any, Final, Literal, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvcache.base.arguments import as_int, as_number, as_tuple
from kvcache.base.errors import ConfigurationError, shown
from kvcache.core import CacheEvent
from kvcache.events.translation import MEDIA, EventTranslator, group_kinds
from kvcache.events.wire_events import MAX_RANK, ClearedEvent, RemovedEvent, StoredEvent, WireEvent
from kvcache.specs import KVCacheGroupSpec

_TOKEN: Final = np.dtype([("code", "u1"), ("value", ">u4")])
_HASH: Final = np.dtype([("code", "u1"), ("value", ">u8")])
_MAX_KEPT: Final = 1 << 20
"""Integers for which memory is kept between payloads."""

PackedArray = tuple[bytes, memoryview]
"""A msgpack array: its header, and its integers one behind the other."""

Encoding: TypeAlias = Literal["map", "array"]
Value: TypeAlias = bytes | PackedArray
"""A packed value: whole, or header and body of an array."""
Parts: TypeAlias = list[bytes | memoryview]

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

NUM_ALWAYS: Final = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}
"""How many keys of each event are always there, even if they are empty."""

_NIL: Final = b"\xc0"
_PLACE: Final = b"\xc1"
"""Marks where values are inserted: msgpack never uses this byte, and no constant contains it."""
_MAX_FRAMES: Final = 64
_Frame: TypeAlias = tuple[bytes, bytes, bytes, bytes]
_UINT64: Final = Struct(">BQ")
_UINT64_CODE: Final = 0xCF


def require_encoding(value: object) -> None:
    """Raise ConfigurationError unless `value` names an encoding."""
    if not isinstance(value, str) or value not in ("map", "array"):
        raise ConfigurationError(
            f"event encoding {shown(value)}: choose 'map', or 'array' for consumers that read "
            "positions"
        )


class EventCodec:
    """Encodes the events of one data-parallel rank. Between payloads it remembers only the constant
    parts of the last events."""

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
                were built before maps.

        Raises:
            ConfigurationError: a rank that subscribers cannot read, or an unknown encoding.
        """
        groups = as_tuple("groups", groups, ConfigurationError, KVCacheGroupSpec)
        rank = as_int("data_parallel_rank", data_parallel_rank, 0, MAX_RANK, ConfigurationError)
        require_encoding(encoding)
        self._packer = msgpack.Packer()
        self._pack = self._packer.pack
        self._translator = EventTranslator(group_kinds(groups))
        self._rank = self._pack(rank)
        self._is_map = encoding == "map"
        self._hashes, self._tokens = _Room(_HASH, 0xCF), _Room(_TOKEN, 0xCE)
        words = {"type", *NUM_ALWAYS, *STORED_KEYS, *REMOVED_KEYS, *MEDIA.values(), "LOCAL"}
        self._words: dict[str, bytes] = {word: self._pack(word) for word in words}
        self._frames: dict[tuple[str | int | None, ...], _Frame] = {}

    def encode(self, time_s: float, events: Sequence[CacheEvent]) -> bytes:
        """Return one payload; no events make a heartbeat. Changes nothing.

        Args:
            time_s: when the batch was made, in seconds since 1970.
            events: parents before children, as a core emits them.

        Raises:
            InvalidInputError: an event of an unknown group or medium, or whose tokens do not fill
                its blocks.
        """
        time_s = as_number("time_s", time_s)
        return self.encode_wire(time_s, self._translator.translate(events))

    def encode_wire(self, time_s: float, events: Sequence[WireEvent]) -> bytes:
        """Return one payload of translated events; no events make a heartbeat."""
        time_s = as_number("time_s", time_s)
        events = as_tuple("events", events, kind=(StoredEvent, RemovedEvent, ClearedEvent))
        stored = [event for event in events if isinstance(event, StoredEvent)]
        named = [event for event in events if not isinstance(event, ClearedEvent)]
        hashes = iter(self._hashes.put([event.block_hashes for event in named]))
        # From unsigned to unsigned, numpy only swaps bytes, which is twice as fast.
        tokens = iter(self._tokens.put([event.token_ids.view(np.uint32) for event in stored]))
        parts: Parts = []
        for event in events:
            if isinstance(event, StoredEvent):
                self._put_stored(event, next(hashes), next(tokens), parts)
            elif isinstance(event, RemovedEvent):
                self._put_removed(event, next(hashes), parts)
            else:
                self._put("AllBlocksCleared", (), (), parts)
        head = self._packer.pack_array_header(3) + self._pack(time_s)
        return b"".join([head, self._packer.pack_array_header(len(events)), *parts, self._rank])

    def _put_stored(
        self, event: StoredEvent, hashes: PackedArray, tokens: PackedArray, parts: Parts
    ) -> None:
        head, before_parent, before_tokens, tail = self._frame_of(event)
        parent = _NIL
        if event.parent_block_hash is not None:
            parent = _UINT64.pack(_UINT64_CODE, event.parent_block_hash)
        parts += (head, *hashes, before_parent, parent, before_tokens, *tokens, tail)

    def _frame_of(self, event: StoredEvent) -> _Frame:
        """Return the constant parts around a stored event's hashes, parent and tokens.

        Most events are short and of a few kinds: a cached frame saves half of the time.
        """
        if event.extra_keys:
            return self._new_frame(event)
        kind = (
            event.block_size,
            event.medium,
            event.lora_name,
            event.group_idx,
            event.spec_kind,
            event.sliding_window,
            event.cache_salt,
        )
        frame = self._frames.get(kind)
        if frame is None:
            if len(self._frames) >= _MAX_FRAMES:
                self._frames.clear()
            frame = self._frames[kind] = self._new_frame(event)
        return frame

    def _new_frame(self, event: StoredEvent) -> _Frame:
        pack = self._pack
        values = (
            _PLACE,
            _PLACE,
            _PLACE,
            pack(event.block_size),
            _NIL,
            self._word(event.medium),
            pack(event.lora_name),
            pack(event.extra_keys) if event.extra_keys else _NIL,
            pack(event.group_idx),
            pack(event.spec_kind),
            pack(event.sliding_window),
            self._words["LOCAL"],
            pack(event.cache_salt),
        )
        parts: Parts = []
        self._put("BlockStored", STORED_KEYS, values, parts)
        head, before_parent, before_tokens, tail = b"".join(parts).split(_PLACE, 3)
        return head, before_parent, before_tokens, tail

    def _put_removed(self, event: RemovedEvent, hashes: PackedArray, parts: Parts) -> None:
        values = (hashes, self._word(event.medium), self._pack(event.group_idx), _NIL)
        self._put("BlockRemoved", REMOVED_KEYS, values, parts)

    def _put(self, tag: str, keys: Sequence[str], values: Sequence[Value], parts: Parts) -> None:
        """Append one event of packed values, without empty optional ones."""
        always, words = NUM_ALWAYS[tag], self._words
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

    def _word(self, word: str) -> bytes:
        return self._words.get(word) or self._pack(word)


class _Room:
    """Writes arrays of integers of one width into memory that is kept between payloads.

    Every integer is written with the code of its full width, so that all of them have one size;
    every decoder reads them as the same numbers. The code before each is written only once.
    """

    def __init__(self, dtype: np.dtype[Any], code: int) -> None:
        self._dtype = dtype
        self._code = code
        self._room: NDArray[Any] = np.empty(0, dtype)
        self._header = msgpack.Packer().pack_array_header

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[PackedArray]:
        """Return the arrays packed, each of shape `(n,)`. They are valid until the next call."""
        counts = [len(array) for array in arrays]
        ends = [*accumulate(counts, initial=0)]
        if ends[-1] > len(self._room) or len(self._room) > _MAX_KEPT:
            self._room = np.empty(max(ends[-1], min(2 * len(self._room), _MAX_KEPT)), self._dtype)
            self._room["code"] = self._code
        if arrays:
            np.concatenate(arrays, out=self._room["value"][: ends[-1]], casting="unsafe")
        packed, header = self._room.data, self._header
        return [
            (header(count), packed[start : start + count])
            for count, start in zip(counts, ends, strict=False)
        ]
