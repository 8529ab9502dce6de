"""Preemption by swap: unhashed blocks of a preempted request go to host memory, and come back.

Sealed blocks are in the tiers anyway, by their content. The blocks after them (the partly filled
block; in models with several block sizes, all after the last common end of blocks) have no content
hash, and are stored under private keys. Such content is never sealed or spilled, and is dropped
when its room is needed; then the tokens are computed again. Does not load. An epoch begins without
tails.

    tokens  0 ........... first_token .. num_tokens .. | unfinished: computed again
            sealed: keys of content  │  tail: private keys

A store reads blocks that are already free, and that have no label whose removal would announce a
write. So this class learns when a request gets such a block during the read, and each rank waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.errors import InvariantError
from kvcache.coordinator.job_table import JobTable
from kvcache.coordinator.parts import OffloadParts
from kvcache.coordinator.settings import SwapWhen
from kvcache.manager.loads import PrefixLoads
from kvcache.manager.step_ledger import StepsUnderWay
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.keys import GROUP_BYTES, OffloadKey, make_offload_key
from kvcache.offload.specs import HOST_MEDIUM
from kvcache.protocol.commands import Store
from kvcache.requests.request import Request
from kvcache.specs import NULL_BLOCK_ID

MAX_HOST_SHARE = 4
"""One in this many slots of host memory may hold tails."""


@dataclass(frozen=True, eq=False)
class SwappedTail:
    """The tokens `[first_token, num_tokens)` of a preempted request, as blocks in host memory.

    `places` are (group, column) of each block in the request's tables, in the order of `keys`.
    """

    request: Request
    first_token: int
    num_tokens: int
    places: tuple[tuple[int, int], ...]
    keys: tuple[OffloadKey, ...]
    until_s: float

    def key_at(self, group: int, column: int) -> OffloadKey | None:
        """Return the key of a block of the tail; None for one before it."""
        place = group, column
        return self.keys[self.places.index(place)] if place in self.places else None


class PartialBlockSwap:
    """The tails of one epoch, by request. The caller sends the stores and reports their results."""

    def __init__(
        self,
        parts: OffloadParts,
        tiers: TierHierarchy,
        loads: PrefixLoads,
        jobs: JobTable,
        *,
        digest_bytes: int,
    ) -> None:
        """Start without tails. Jobs that were sent to no rank are cancelled in `jobs`."""
        finder, rule = parts.finder, parts.settings.swap
        self._rule = rule
        # With EAGLE, a hit's last block is computed again for the draft model: a tail never helps.
        # A state inside a block is overwritten in place: no tail has a copy of it.
        self._is_off = rule.when is SwapWhen.NEVER or finder.use_eagle or finder.has_states
        self._finder = finder
        self._tiers = tiers
        self._loads = loads
        self._jobs = jobs
        self._key_bytes = digest_bytes + 1  # longer than any digest: no content has such a key
        self._max_slots = tiers.host.options.num_slots // MAX_HOST_SHARE
        self._tails: dict[str, SwappedTail] = {}
        self._being_read: dict[int, Int32Array] = {}
        self._copied: list[tuple[Int32Array, StepsUnderWay]] = []
        self._num_keys = 0
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self.num_saved_tokens = 0

    def __len__(self) -> int:
        """Return how many requests have a tail."""
        return len(self._tails)

    def swap_out(
        self,
        request: Request,
        num_tokens: int,
        num_cached_tokens: int,
        block_ids: Sequence[Sequence[int]],
        now_s: float,
    ) -> Store | None:
        """Keep the blocks of the first `num_tokens` tokens that only these tables hold; return the
        store. None, with nothing kept, if the rule says no, a block's bytes may be incomplete, or
        there is no room. An earlier tail of the request is forgotten.
        """
        self.forget(request.request_id)
        if self._is_off or self._tiers.host.is_adopting:
            return None
        step = self._finder.alignment_tokens
        first_token = min(num_tokens, num_cached_tokens) // step * step
        places = self._finder.columns_between(num_tokens, first_token, num_tokens)
        ids = int32_array([block_ids[group][column] for group, column in places])
        if (
            not len(ids)
            or self._num_taken_slots() + self._num_slots_for(places) > self._max_slots
            or not self._rule.is_cheaper(num_tokens - first_token, len(ids))
            or (ids == NULL_BLOCK_ID).any()
            or self._are_copied(ids)
        ):
            return None
        keys = tuple(self._private_key(group) for group, _ in places)
        job = self._tiers.plan_store(keys, now_s, is_private=True, namespace=request.namespace)
        if job is None or len(job.keys) < len(keys):
            if job is not None:
                self._tiers.end(job.job_id, ok=False)
                self._jobs.cancel(job.job_id)
            return None
        until_s = now_s + self._rule.hold_s
        self._tails[request.request_id] = SwappedTail(
            request, first_token, num_tokens, tuple(places), keys, until_s
        )
        self._being_read[job.job_id] = ids
        self.num_swapped_out += 1
        return Store(job.job_id, HOST_MEDIUM, ids, job.addresses)

    def of(self, request: Request) -> SwappedTail | None:
        """Return the tail of this very request, whether or not it is still stored."""
        tail = self._tails.get(request.request_id)
        return tail if tail is not None and tail.request is request else None

    def came_back(self, tail: SwappedTail) -> None:
        """Count a request that continues from its tail."""
        self.num_swapped_in += 1
        self.num_saved_tokens += tail.num_tokens - tail.first_token

    def forget(self, request_id: str) -> None:
        """Drop the tail of a request."""
        tail = self._tails.pop(request_id, None)
        if tail is not None:
            self._tiers.forget(tail.keys)

    def clear(self) -> None:
        """Forget all tails, because the tiers are emptied."""
        self._tails.clear()

    def expire(self, now_s: float) -> None:
        """Drop tails that were kept for too long."""
        for request_id in [r for r, tail in self._tails.items() if tail.until_s <= now_s]:
            self.forget(request_id)

    def check(self) -> None:
        """Raise `InvariantError` if host memory keeps a tail for a request that would never load
        it."""
        private = self._key_bytes + GROUP_BYTES
        in_host = self._tiers.host.slots.present_keys()
        kept = {key for key in in_host if len(key) == private}
        known = {key for tail in self._tails.values() for key in tail.keys}
        if not kept <= known:
            raise InvariantError(
                f"host memory holds {len(kept)} blocks of tails, {len(kept - known)} of them of "
                f"none of the {len(self._tails)} requests that are swapped out"
            )

    # --- blocks that are read, or will be copied

    def on_stored(self, job_id: int) -> None:
        """Record that every rank has reported a store: it reads no block any more."""
        self._being_read.pop(job_id, None)

    def read_among(self, block_ids: Sequence[Int32Array]) -> Int32Array:
        """Return those of the blocks that a store reads, ascending: their next writer must wait."""
        if not self._being_read or not block_ids:
            return EMPTY_INT32
        read = np.concatenate(list(self._being_read.values()))
        return int32_array(np.intersect1d(read, np.concatenate(block_ids)))

    def on_copies(self, block_ids: Int32Array) -> None:
        """Record that the steps in flight begin with copies from or to these blocks.

        A store would make ranks copy at once, before forwards have written the content.
        """
        ledger = self._loads.ledger
        self._copied = [entry for entry in self._copied if not ledger.are_over(entry[1])]
        self._copied.append((block_ids, ledger.under_way()))

    def _num_taken_slots(self) -> int:
        """Return how many slots hold blocks of a tail, without those of failed stores and dropped
        tails."""
        keys = [key for tail in self._tails.values() for key in tail.keys]
        addresses = self._tiers.host.slots.addresses_of(keys)
        there = addresses[addresses >= 0]
        return len(np.unique(there // self._tiers.host.options.blocks_per_slot))

    def _num_slots_for(self, places: Sequence[tuple[int, int]]) -> int:
        """Return how many slots a tail takes: tails and groups share none."""
        size = self._tiers.host.options.blocks_per_slot
        groups = [group for group, _ in places]
        return sum(-(-groups.count(group) // size) for group in set(groups))

    def _are_copied(self, block_ids: Int32Array) -> bool:
        return any(
            np.isin(block_ids, copied).any() and not self._loads.ledger.are_over(steps)
            for copied, steps in self._copied
        )

    def _private_key(self, group: int) -> OffloadKey:
        """Return a key that no content and no other tail has."""
        self._num_keys += 1
        return make_offload_key(self._num_keys.to_bytes(self._key_bytes, "big"), group)
