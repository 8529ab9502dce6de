"""Translates a core's events to those of routers: usable groups, and vLLM's names.

A group that routers cannot use is left out unless all are requested: routers assume that every
stored block can be hit by itself, which holds only for full attention.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import numpy as np

from kvcache.base.arguments import as_tuple
from kvcache.base.errors import ConfigurationError, InvalidInputError, shown
from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from kvcache.events.wire_events import (
    ClearedEvent,
    Hashes,
    RemovedEvent,
    RouterKey,
    StoredEvent,
    WireEvent,
)
from kvcache.requests.digests import PackedDigests
from kvcache.requests.hashing import BlockHash
from kvcache.specs import KVCacheGroupSpec

_WORD_BYTES: Final = 8
_NO_HASH: Final = 0
_STAND_IN: Final = 1
"""Replaces a hash of zero, which routers read as no hash."""


def short_hashes(digests: Sequence[BlockHash]) -> Hashes:
    """Return the low 64 bits of each digest, shape `(n,)`, never zero.

    Packed digests are read in place: no object is made per block.

    Raises:
        InvalidInputError: digests of differing lengths, or no multiple of 8 bytes long.
    """
    if not digests:
        return np.empty(0, np.uint64)
    if isinstance(digests, PackedDigests):
        joined, size = digests.data, digests.digest_bytes
    else:
        joined, size = b"".join(digests), len(digests[0])
    if size % _WORD_BYTES or not size or len(joined) != size * len(digests):
        raise InvalidInputError(
            f"{len(digests)} digests of {len(joined)} bytes, the first of {size}: digests of one "
            "event come from one algorithm and are whole 64-bit words"
        )
    words = np.frombuffer(joined, ">u8")
    hashes: Hashes = words[size // _WORD_BYTES - 1 :: size // _WORD_BYTES].astype(np.uint64)
    if np.count_nonzero(hashes) != len(hashes):
        hashes[hashes == _NO_HASH] = _STAND_IN
    return hashes


def _short_hashes_of(several: Sequence[Sequence[BlockHash]]) -> list[Hashes]:
    """Do `short_hashes` for several sequences, usually at once."""
    packed = [each for each in several if isinstance(each, PackedDigests)]
    sizes = {each.digest_bytes for each in packed}
    if len(packed) < len(several) or len(sizes) != 1:
        return [short_hashes(each) for each in several]
    joined = short_hashes(PackedDigests(b"".join([each.data for each in packed]), *sizes))
    ends = [*accumulate(map(len, packed), initial=0)]
    return [joined[start:end] for start, end in pairwise(ends)]


def short_hash(digest: BlockHash) -> int:
    """Return the low 64 bits of one digest, never zero.

    Raises:
        InvalidInputError: the digest is no multiple of 8 bytes long.
    """
    if len(digest) % _WORD_BYTES or not digest:
        raise InvalidInputError(f"a digest of {len(digest)} bytes: digests are whole 64-bit words")
    return int.from_bytes(digest[-_WORD_BYTES:], "big") or _STAND_IN


def are_distinct(hashes: Hashes) -> bool:
    if len(hashes) < 2:
        return True
    ordered = np.sort(hashes)
    return not (ordered[1:] == ordered[:-1]).any()


def ends_before_repeats(hashes: Hashes) -> list[int]:
    """Return where to cut so that no part has a hash twice."""
    ends: list[int] = []
    seen: set[int] = set()
    for index, value in enumerate(hashes.tolist()):
        if value in seen:
            ends.append(index)
            seen.clear()
        seen.add(value)
    return [*ends, len(hashes)]


PublishedGroups: TypeAlias = Literal["usable", "all"]

MEDIA: Final = MappingProxyType({"device": "GPU", "host": "CPU", "storage": "STORAGE"})
"""The routers' names of the media."""

SPEC_KINDS: Final = MappingProxyType(
    {
        "full": "full_attention",
        "mla": "mla_attention",
        "sliding_window": "sliding_window",
        "chunked_local": "chunked_local_attention",
        "mamba": "mamba",
        "cross": "cross_attention",
    }
)
"""The routers' names of the attention kinds; others are sent under their own."""

_USABLE_KINDS: Final = ("full", "mla")
_CHAINED_KINDS: Final = frozenset(SPEC_KINDS[kind] for kind in _USABLE_KINDS)


@dataclass(frozen=True)
class GroupKind:
    """A group as routers see it: the kind of its attention, and its window if it has one."""

    kind: str
    sliding_window: int | None = None


def group_kinds(groups: Sequence[KVCacheGroupSpec]) -> tuple[GroupKind, ...]:
    """Return the routers' view of each group of a plan, in order."""
    return tuple(_kind_of(group) for group in groups)


def join_removals(events: Sequence[WireEvent]) -> list[WireEvent]:
    """Return `events` with adjacent removals from one medium merged."""
    found: list[WireEvent] = []
    for place, group in groupby(events, _removed_from):
        run = list(group)
        if place is None or len(run) < 2:
            found += run
            continue
        hashes = np.concatenate(
            [each.block_hashes for each in run if isinstance(each, RemovedEvent)]
        )
        if not are_distinct(hashes):
            hashes = np.array(list(dict.fromkeys(hashes.tolist())), np.uint64)
        found.append(RemovedEvent(hashes, *place))
    return found


def drop_void_removals(events: Sequence[WireEvent]) -> list[WireEvent]:
    """Return `events` without removals of blocks that a clear before has removed already."""
    found: list[WireEvent] = []
    stored: dict[tuple[str, int], set[int]] | None = None
    for event in events:
        if isinstance(event, ClearedEvent):
            stored = {}
        elif stored is not None:
            since = stored.setdefault((event.medium, event.group_idx), set())
            hashes = event.block_hashes.tolist()
            if isinstance(event, StoredEvent):
                since.update(hashes)
            else:
                there = [value for value in hashes if value in since]
                since.difference_update(there)
                if there:
                    rest = np.array(there, np.uint64)
                    found.append(RemovedEvent(rest, event.medium, event.group_idx))
                continue
        found.append(event)
    return found


def needs_parent(event: StoredEvent) -> bool:
    """Return whether an event may come before its parent, so that routers would drop it.

    The device stores parents first by itself; windows and states are found without their parents.
    """
    return event.medium != MEDIA["device"] and event.spec_kind in _CHAINED_KINDS


def usable_group(kinds: Sequence[GroupKind]) -> int | None:
    """Return the first group of full attention, the one that routers can use, or None."""
    return next((i for i, kind in enumerate(kinds) if kind.kind in _USABLE_KINDS), None)


def require_published_groups(value: object) -> None:
    """Raise ConfigurationError unless `value` is a choice of groups."""
    if not isinstance(value, str) or value not in ("usable", "all"):
        raise ConfigurationError(
            f"publish_groups {shown(value)}: choose 'usable', or 'all' for consumers that tell "
            "groups apart"
        )


class EventTranslator:
    """Translates the events of one cache. Stateless between events."""

    def __init__(
        self, kinds: Sequence[GroupKind], *, publish_groups: PublishedGroups = "all"
    ) -> None:
        """Translate events of groups of these `kinds`, by index.

        `publish_groups`: "all" keeps every group under its own index; "usable" keeps only the
        first group of full attention, as group 0.

        Raises:
            ConfigurationError: an unknown choice of groups.
        """
        require_published_groups(publish_groups)
        self._kinds = tuple(kinds)
        self._names: list[int | None] = [*range(len(kinds))]
        if publish_groups == "usable":
            usable = usable_group(kinds)
            self._names = [0 if group == usable else None for group in range(len(kinds))]

    def translate(self, events: Sequence[CacheEvent]) -> list[WireEvent]:
        """Return the events for routers, in order.

        Raises:
            InvalidInputError: an event of an unknown group or medium, or whose tokens do not fill
                its blocks.
        """
        found: list[WireEvent] = []
        events = as_tuple("events", events)
        named = [each for each in events if isinstance(each, (BlocksStored, BlocksRemoved))]
        hashes = iter(_short_hashes_of([each.digests for each in named]))
        for event in events:
            if isinstance(event, BlocksStored):
                found += self._stored(event, next(hashes))
            elif isinstance(event, BlocksRemoved):
                found += self._removed(event, next(hashes))
            elif isinstance(event, AllBlocksCleared):
                found.append(ClearedEvent())
            else:
                raise InvalidInputError(
                    f"{shown(event)} is not a cache event: pass a core's events"
                )
        return found

    def _stored(self, event: BlocksStored, hashes: Hashes) -> Sequence[StoredEvent]:
        """Return one event, or several if two blocks have the same hash."""
        name = self._name_of(event.group)
        if name is None:
            return ()
        if len(event.token_ids) != len(hashes) * event.block_size or not len(hashes):
            raise InvalidInputError(
                f"{len(event.token_ids)} tokens for {len(hashes)} stored blocks of "
                f"{event.block_size} tokens: a stored event states all tokens of full blocks"
            )
        lora = event.namespace.lora
        kind = self._kinds[event.group]
        whole = StoredEvent(
            hashes,
            None if event.parent_digest is None else short_hash(event.parent_digest),
            event.token_ids,
            event.block_size,
            _medium(event.medium),
            None if lora is None else json.loads(lora)[0],
            tuple(map(_untagged, event.extra_keys)) if any(event.extra_keys) else (),
            name,
            SPEC_KINDS.get(kind.kind, kind.kind),
            kind.sliding_window,
            event.namespace.salt,
        )
        if are_distinct(hashes):
            return (whole,)
        ends = ends_before_repeats(hashes)
        return [whole.part(start, end) for start, end in pairwise((0, *ends))]

    def _removed(self, event: BlocksRemoved, hashes: Hashes) -> Sequence[RemovedEvent]:
        """Return an event with every hash once."""
        name = self._name_of(event.group)
        if name is None:
            return ()
        if not are_distinct(hashes):
            hashes = np.array(list(dict.fromkeys(hashes.tolist())), np.uint64)
        return (RemovedEvent(hashes, _medium(event.medium), name),)

    def _name_of(self, group: int) -> int | None:
        """Return the number under which a group is published; None if it is not."""
        if not 0 <= group < len(self._names):
            raise InvalidInputError(
                f"event of KV cache group {group}: there are groups 0 to {len(self._names) - 1}"
            )
        return self._names[group]


def _removed_from(event: WireEvent) -> tuple[str, int] | None:
    return (event.medium, event.group_idx) if isinstance(event, RemovedEvent) else None


def _medium(medium: str) -> str:
    if medium not in MEDIA:
        raise InvalidInputError(
            f"event of medium {shown(medium)}: there are {', '.join(map(repr, MEDIA))}"
        )
    return MEDIA[medium]


def _kind_of(group: KVCacheGroupSpec) -> GroupKind:
    spec = group.kv_cache_spec
    window = spec.to_dict()["sliding_window"] if spec.kind == "sliding_window" else None
    return GroupKind(spec.kind, window if isinstance(window, int) else None)


def _untagged(keys: tuple[tuple[str | int, ...], ...] | None) -> tuple[RouterKey, ...] | None:
    """Return a block's extra keys as routers read them: names and salts as text, items as pairs."""
    if keys is None:
        return None
    return tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)
