"""How many tokens of a sequence are cached, for repeated questions while it is computed.

Keeps the digests of every sequence's full blocks, so that each is computed once. Changes nothing in
the cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvcache.base.arguments import (
    as_bool,
    as_int,
    as_integers,
    as_number,
    check_hashable,
    check_kind,
    check_methods,
)
from kvcache.base.errors import BlockError, ConfigurationError, RequestError, shown
from kvcache.requests.hashing import BlockHash, RequestBlockHasher
from kvcache.requests.request import Request
from kvcache.requests.tokens import TokenIds, as_token_ids
from kvcache.sequences.allocator import PrefixCachingBlockAllocator
from kvcache.sequences.block import ExtraHash, extra_keys_of


class TrackedSequence(Protocol):
    """The interface of an engine's own sequence."""

    @property
    def seq_id(self) -> Hashable:
        """Identifies the sequence."""

    def get_token_ids(self) -> TokenIds:
        """Return prompt and output tokens."""

    def extra_hash(self) -> ExtraHash:
        """Return the extra hash with which its blocks were allocated."""

    def is_prefill(self) -> bool:
        """Return whether prompt tokens remain to be computed."""


AnySequence: TypeAlias = "TrackedSequence | Request"


@dataclass(slots=True)
class _Known:
    """Digests of the full blocks so far, and the last number of cached tokens."""

    digests: list[BlockHash] = field(default_factory=list)
    num_cached_tokens: int | None = None


class ComputedBlocksTracker:
    """Cached tokens per sequence. A sequence is tracked from its first question on."""

    def __init__(
        self, allocator: PrefixCachingBlockAllocator, block_size: int, enable_caching: bool
    ) -> None:
        """Look up contents in `allocator`; without caching every answer is 0.

        Raises:
            ConfigurationError: the block size is no positive integer, or an argument of another
                type.
        """
        check_kind("allocator", allocator, PrefixCachingBlockAllocator, ConfigurationError)
        self._allocator = allocator
        self._block_size = as_int("block_size", block_size, 1, error=ConfigurationError)
        self._enable_caching = as_bool("enable_caching", enable_caching, ConfigurationError)
        self._known: dict[Hashable, _Known] = {}

    def get_num_cached_tokens(self, seq: AnySequence) -> int:
        """Return how many leading tokens of `seq`, in full blocks, are cached and computed.

        The answer stays the same while the sequence's prompt is being computed: what the sequence
        caches itself meanwhile is no hit.

        Raises:
            RequestError: the sequence has fewer tokens than before, a value is not a token id, or
                `seq` is neither a request nor a sequence.
        """
        _check_sequence(seq)
        if not self._enable_caching:
            return 0
        if isinstance(seq, Request):
            seq_id: Hashable = seq.request_id
            is_prefill = seq.num_computed_tokens < seq.num_prompt_tokens
        else:
            seq_id, is_prefill = seq.seq_id, seq.is_prefill()
        known = self._known.get(seq_id, _Known())
        new = self._new_digests(seq, known.digests)
        self._known[seq_id] = known
        known.digests += new
        if known.num_cached_tokens is None or not is_prefill:
            found = self._allocator.find_cached_blocks_prefix(known.digests)
            known.num_cached_tokens = len(found) * self._block_size
        return known.num_cached_tokens

    def remove_seq(self, seq_id: Hashable) -> None:
        """Forget a sequence; no effect if it is unknown."""
        check_hashable("seq_id", seq_id, RequestError)
        self._known.pop(seq_id, None)

    def _new_digests(self, seq: AnySequence, known: list[BlockHash]) -> list[BlockHash]:
        """Return the digests of the full blocks after the known ones."""
        size = self._block_size
        if isinstance(seq, Request):
            seq_id: Hashable = seq.request_id
            tokens = seq.all_token_ids
        else:
            seq_id = seq.seq_id
            tokens = as_token_ids(seq.get_token_ids(), f"sequence {shown(seq_id)}: token id")
        num_new = len(tokens) // size - len(known)
        if num_new < 0:
            raise RequestError(
                f"sequence {shown(seq_id)} has {len(tokens)} tokens and had {len(known)} full "
                f"blocks of {size}: remove it before its tokens are cut"
            )
        if not num_new:
            return []
        usual = self._allocator.hasher
        if isinstance(seq, Request):
            return RequestBlockHasher(size, usual.hash_fn, usual.none_hash)(seq, known)
        new = tokens[len(known) * size : (len(known) + num_new) * size]
        return usual.hash_fn.chain(
            known[-1] if known else usual.none_hash,
            new.astype("<i4", copy=False).tobytes(),
            size,
            num_new,
            extra_keys_of(seq.extra_hash()),
        )


def _check_sequence(seq: AnySequence) -> None:
    if not isinstance(seq, Request):
        check_methods("seq", seq, ("get_token_ids", "extra_hash", "is_prefill"), RequestError)
        if not hasattr(seq, "seq_id"):
            raise RequestError(f"seq is {shown(seq)}: pass an object with seq_id")
        check_hashable("seq_id", seq.seq_id, RequestError)


class LastAccessBlocksTracker:
    """The last access of each running sequence, in whatever unit the caller counts time."""

    def __init__(self, allocator: PrefixCachingBlockAllocator) -> None:
        """Track no sequence yet; accesses are passed to blocks of `allocator`.

        Raises ConfigurationError for another object.
        """
        check_kind("allocator", allocator, PrefixCachingBlockAllocator, ConfigurationError)
        self._allocator = allocator
        self._last_access: dict[Hashable, float | None] = {}

    def add_seq(self, seq_id: Hashable) -> None:
        """Start tracking a sequence; raises RequestError if it is tracked already."""
        check_hashable("seq_id", seq_id, RequestError)
        if seq_id in self._last_access:
            raise RequestError(f"sequence {shown(seq_id)} is tracked already: remove it first")
        self._last_access[seq_id] = None

    def remove_seq(self, seq_id: Hashable) -> None:
        """Stop tracking a sequence; raises RequestError if it is not tracked."""
        self._require_tracked(seq_id)
        del self._last_access[seq_id]

    def update_last_access(self, seq_id: Hashable, time: float) -> None:
        """Record an access.

        Raises RequestError if the sequence is not tracked, or `time` is not a finite number.
        """
        self._require_tracked(seq_id)
        time = as_number("time", time, error=RequestError)
        self._last_access[seq_id] = time

    def update_seq_blocks_last_access(self, seq_id: Hashable, block_ids: Sequence[int]) -> None:
        """Pass the sequence's last access on to its blocks; no effect before its first access.

        Raises:
            RequestError: the sequence is not tracked.
            BlockError: a block is unknown, or free and empty.
        """
        self._require_tracked(seq_id)
        block_ids = as_integers("block_ids", block_ids, error=BlockError).tolist()
        time = self._last_access[seq_id]
        if time is not None:
            self._allocator.mark_blocks_as_accessed(block_ids, time)

    def _require_tracked(self, seq_id: Hashable) -> None:
        check_hashable("seq_id", seq_id, RequestError)
        if seq_id not in self._last_access:
            raise RequestError(f"sequence {shown(seq_id)} is not tracked: add it first")
