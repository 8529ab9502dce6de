"""Cache events as the payload that routers read: msgpack, field names and values theirs.

Stands behind the event sink: a batch of `CacheEvent`s becomes one payload. Refuses to filter,
number or send: which groups and media are published, and when, is the publisher's choice.

    payload   [time, [event, ...], data parallel rank]
    event     {"type": "BlockStored", "block_hashes": [...], ...}       encoding "map"
              ["BlockStored", [...], ...]                               encoding "array"

Lists of integers make up nearly all of a payload. They are written as arrays of fixed-width msgpack
integers straight from numpy, which every decoder reads as the same numbers; everything else is
packed by msgpack.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvcache.arrays import Int32Array
from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from kvcache.errors import ConfigurationError, InvalidInputError, shown
from kvcache.hashing import BlockHash
from kvcache.specs import KVCacheGroupSpec, KVCacheSpec

Encoding: TypeAlias = Literal["map", "array"]
Hashes: TypeAlias = NDArray[np.uint64]

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

_NUM_ALWAYS: Final = {"BlockStored": 7, "BlockRemoved": 2}
"""How many keys of each event are there even when they hold nothing."""

_NO_HASH: Final = 0
_STAND_IN: Final = 1
"""What a digest whose low 64 bits are zero is called: routers read zero as no hash."""

_NIL: Final = b"\xc0"
_UINT32: Final = np.dtype([("code", "u1"), ("value", ">u4")])
_UINT64: Final = np.dtype([("code", "u1"), ("value", ">u8")])


class EventCodec:
    """Encodes the events of one data-parallel rank. Holds nothing but what it is told once."""

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

    def encode(self, time_s: float, events: Sequence[CacheEvent]) -> bytes:
        """Return one payload; no events make a heartbeat. Changes nothing.

        Args:
            time_s: when the batch was made, in seconds since 1970.
            events: parents before children, as a core emits them.

        Raises:
            InvalidInputError: an event of a group or medium that does not exist, or whose tokens
                do not fill its blocks.
        """
        parts: list[bytes] = []
        for event in events:
            if isinstance(event, BlocksStored):
                parts += self._stored(event)
            elif isinstance(event, BlocksRemoved):
                parts.append(self._removed(event))
            elif isinstance(event, AllBlocksCleared):
                parts.append(self._event("AllBlocksCleared", (), ()))
            else:
                raise InvalidInputError(f"{shown(event)} is no cache event: pass those of a core")
        head = self._packer.pack_array_header(3) + self._pack(float(time_s))
        return b"".join([head, self._packer.pack_array_header(len(parts)), *parts, self._rank])

    def _stored(self, event: BlocksStored) -> list[bytes]:
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
            parent = _packed_uint64(short_hashes([event.parent_digest]))
        keys = event.extra_keys if any(event.extra_keys) else ()
        namespace = event.namespace
        lora = None if namespace.lora is None else json.loads(namespace.lora)[0]
        parts, start = [], 0
        for end in _ends_before_repeats(hashes):
            tokens = event.token_ids[start * event.block_size : end * event.block_size]
            values = (
                self._list(_packed_uint64(hashes[start:end]), end - start),
                parent,
                self._list(_packed_tokens(tokens), len(tokens)),
                self._pack(event.block_size),
                _NIL,
                self._medium(event.medium),
                self._pack(lora),
                self._pack([_untagged(key) for key in keys[start:end]]) if keys else _NIL,
                *fields,
                self._pack("LOCAL"),
                self._pack(namespace.salt),
            )
            parts.append(self._event("BlockStored", STORED_KEYS, values))
            parent, start = _packed_uint64(hashes[end - 1 : end]), end
        return parts

    def _removed(self, event: BlocksRemoved) -> bytes:
        """Encode what was removed, every hash once."""
        group_index, *_ = self._fields_of(event.group)
        hashes = short_hashes(event.digests)
        if not _are_distinct(hashes):
            hashes = np.array(list(dict.fromkeys(hashes.tolist())), np.uint64)
        values = (
            self._list(_packed_uint64(hashes), len(hashes)),
            self._medium(event.medium),
            group_index,
            _NIL,
        )
        return self._event("BlockRemoved", REMOVED_KEYS, values)

    def _event(self, tag: str, keys: Sequence[str], values: Sequence[bytes]) -> bytes:
        """Return one event from packed values; optional ones that hold nothing are left out."""
        always = _NUM_ALWAYS.get(tag, 0)
        if not self._is_map:
            count = len(values)
            while count > always and values[count - 1] == _NIL:
                count -= 1
            header = self._packer.pack_array_header(count + 1)
            return b"".join([header, self._pack(tag), *values[:count]])
        present = [
            (key, value)
            for index, (key, value) in enumerate(zip(keys, values, strict=True))
            if index < always or value != _NIL
        ]
        header = self._packer.pack_map_header(len(present) + 1)
        packed = [part for key, value in present for part in (self._pack(key), value)]
        return b"".join([header, self._pack("type"), self._pack(tag), *packed])

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

    def _list(self, packed: bytes, count: int) -> bytes:
        header: bytes = self._packer.pack_array_header(count)
        return header + packed

    def _medium(self, medium: str) -> bytes:
        if medium not in MEDIA:
            raise InvalidInputError(
                f"event of medium {shown(medium)}: there are {', '.join(map(repr, MEDIA))}"
            )
        packed: bytes = self._pack(MEDIA[medium])
        return packed


def short_hashes(digests: Sequence[BlockHash]) -> Hashes:
    """Return the low 64 bits of each digest, shape `(n,)`, never zero.

    Raises:
        InvalidInputError: digests of differing lengths, or no multiple of 8 bytes long.
    """
    if not digests:
        return np.empty(0, np.uint64)
    joined = b"".join(digests)
    size = len(digests[0])
    if size % 8 or not size or len(joined) != size * len(digests):
        raise InvalidInputError(
            f"{len(digests)} digests of {len(joined)} bytes, the first of {size}: digests of one "
            "event come from one algorithm and are whole 64-bit words"
        )
    words = np.frombuffer(joined, ">u8").reshape(len(digests), -1)
    hashes: Hashes = words[:, -1].astype(np.uint64)
    hashes[hashes == _NO_HASH] = _STAND_IN
    return hashes


def _ends_before_repeats(hashes: Hashes) -> list[int]:
    """Return where to cut so that no part holds a hash twice; nearly always at the end only."""
    if _are_distinct(hashes):
        return [len(hashes)]
    ends: list[int] = []
    seen: set[int] = set()
    for index, value in enumerate(hashes.tolist()):
        if value in seen:
            ends.append(index)
            seen.clear()
        seen.add(value)
    return [*ends, len(hashes)]


def _are_distinct(hashes: Hashes) -> bool:
    ordered = np.sort(hashes)
    return not (ordered[1:] == ordered[:-1]).any()


def _packed_uint64(values: Hashes) -> bytes:
    """Return values as msgpack integers of 64 bits, one behind the other."""
    packed = np.empty(len(values), _UINT64)
    packed["code"] = 0xCF
    packed["value"] = values
    return packed.tobytes()


def _packed_tokens(tokens: Int32Array) -> bytes:
    """Return token ids as msgpack integers of 32 bits, one behind the other."""
    packed = np.empty(len(tokens), _UINT32)
    packed["code"] = 0xCE
    packed["value"] = tokens
    return packed.tobytes()


def _untagged(keys: tuple[tuple[str | int, ...], ...] | None) -> list[object] | None:
    """Return a block's extra keys as routers read them: names and salts bare, items as pairs."""
    if keys is None:
        return None
    return [list(key[1:]) if key[0] == "mm" else key[1] for key in keys]
