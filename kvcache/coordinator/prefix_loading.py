"""Requests that wait until the tiers have loaded a longer prefix.

A look-up may find that tiers hold more of a request than the device. Then a *wish* of the request
is fetched to host memory if it is on disk, loaded into blocks of a placeholder request, and kept
until the request is admitted. If a load fails or takes too long, the tokens are computed; a request
waits only once. A prefetch is the wish of a request that may never come: once loaded, its blocks
are cached, unused, and can be evicted.

    look_up ▶ WANTED ─▶ FETCHING ─▶ LOADING ─▶ LOADED ─▶ (request admitted) ▶ gone
                 └───────────┴───────────┴──▶ GIVEN_UP ─▶ (request admitted) ▶ gone

A load is sent to workers only when no earlier step can still read the blocks that it writes. A
request that was swapped out also wishes for its tail: all of it or, if some of it is gone, for the
prefix that any request of its content would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import BoolArray, Int32Array
from kvcache.base.errors import InvariantError
from kvcache.coordinator.job_table import JobTable
from kvcache.coordinator.partial_block_swap import PartialBlockSwap, SwappedTail
from kvcache.coordinator.parts import OffloadParts
from kvcache.coordinator.step_recorder import RecordedLoads
from kvcache.coordinator.tier_hits import NOTHING_LOADED, LoadedTokens, count_for_tenant
from kvcache.core import OffloadAnswer, OffloadHit
from kvcache.manager.loads import PrefixLoad
from kvcache.offload.hierarchy import Place, TierHierarchy
from kvcache.offload.keys import OffloadKey, pack_keys
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import Fetch, Load
from kvcache.requests.request import Request

MISS = OffloadHit(OffloadAnswer.MISS)
RETRY = OffloadHit(OffloadAnswer.RETRY)

MAX_WISHES = 256
"""Most requests that wait at a time; others are computed."""

MAX_PREFETCHES = 64
"""Most of these that are prefetches."""

READY_PLACES = (Place.HOST, Place.DISK)
PENDING_PLACES = (Place.HOST_PENDING, Place.DISK_PENDING)

MAX_FETCHES = 2
"""Most fetches for one wish: blocks evicted from the host meanwhile may be fetched once more."""


class _Stage(Enum):
    WANTED = "wanted"
    FETCHING = "fetching"
    LOADING = "loading"
    LOADED = "loaded"
    GIVEN_UP = "given up"


@dataclass(eq=False)
class _Wish:
    """What one request waits for, or no longer waits for. `until_s`: when it is forgotten."""

    request: Request
    stage: _Stage
    until_s: float
    num_device_tokens: int
    num_tokens: int
    keys: list[OffloadKey]
    job_id: int = 0
    num_fetches: int = 0
    num_fetched: int = 0
    loaded: LoadedTokens = NOTHING_LOADED
    load: PrefixLoad | None = None
    tail: SwappedTail | None = None
    is_prefetch: bool = False

    def is_of(self, request: Request) -> bool:
        """Return whether another object is the same request, sent again."""
        mine = self.request
        return mine is request or (
            mine.namespace == request.namespace
            and mine.mm_hashes == request.mm_hashes
            and np.array_equal(mine.all_token_ids, request.all_token_ids)
        )


class PrefixLoading:
    """All wishes of one epoch. The caller sends the commands and reports how jobs ended."""

    def __init__(
        self,
        parts: OffloadParts,
        tiers: TierHierarchy,
        loads: RecordedLoads,
        tails: PartialBlockSwap,
        jobs: JobTable,
        *,
        num_spare_blocks: int,
    ) -> None:
        """Load prefixes by `loads`, with the limits of the settings in `parts`.

        Jobs that were sent to no rank are cancelled in `jobs`. While requests run,
        `num_spare_blocks` stay free for them.
        """
        settings = parts.settings
        self._finder = parts.finder
        self._tiers = tiers
        self._loads = loads
        self._tails = tails
        self._jobs = jobs
        self._min_load_tokens = max(1, settings.min_load_tokens)
        self._hold_s = settings.hold_s
        self._wait_s = settings.wait_s
        self._num_spare_blocks = num_spare_blocks
        self._wishes: dict[str, _Wish] = {}
        self._wanted: list[_Wish] = []
        self._parked: list[_Wish] = []
        self._unsaid: list[tuple[int, Load]] = []
        self._by_job: dict[int, _Wish] = {}
        self._loading: dict[OffloadKey, int] = {}
        self._orphans: dict[int, PrefixLoad] = {}
        self.num_loaded_tokens = 0
        self.num_fetched_tokens = 0
        self.num_given_up = 0

    @property
    def has_work(self) -> bool:
        """Whether `advance` may have something to do."""
        return bool(self._wanted) or any(
            self._loads.loads.may_be_written(load_id) for load_id, _ in self._unsaid
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a load."""
        waits = (_Stage.WANTED, _Stage.FETCHING, _Stage.LOADING)
        return sum(w.stage in waits and not w.is_prefetch for w in self._wishes.values())

    def look_up(self, request: Request, num_device_tokens: int, now_s: float) -> OffloadHit:
        """Return whether the request must wait; begin to load its prefix."""
        wish = self._wishes.get(request.request_id)
        if wish is not None:
            if not wish.is_of(request) or wish.stage in (_Stage.LOADED, _Stage.GIVEN_UP):
                return MISS
            return OffloadHit(OffloadAnswer.HIT_PENDING, wish.num_tokens - num_device_tokens)
        if len(self._wishes) >= MAX_WISHES:
            return MISS
        tail = self._tails.of(request)
        if tail is not None and num_device_tokens < tail.num_tokens < request.num_tokens:
            answer = self._look_up_tail(request, tail, num_device_tokens, now_s)
            if answer is not None:
                return answer
        if request.num_tokens - 1 - num_device_tokens < self._min_load_tokens:
            return MISS
        places = _Places(self._tiers)
        hit = self._finder.find(request, num_device_tokens, places.locate, _is_ready)
        num_ready = 0 if hit is None else hit.num_tokens
        if places.has_pending:
            more = self._finder.find(request, num_device_tokens, places.locate, _is_coming)
            if more is not None and more.num_tokens > num_ready:
                return OffloadHit(OffloadAnswer.HIT_PENDING, more.num_tokens - num_device_tokens)
        if hit is None:
            return RETRY if places.has_unknown else MISS
        if hit.num_tokens - num_device_tokens < self._min_load_tokens:
            return MISS
        until_s = now_s + self._wait_s
        return self._want(
            _Wish(request, _Stage.WANTED, until_s, num_device_tokens, hit.num_tokens, hit.keys)
        )

    def prefetch(self, request: Request, num_device_tokens: int, now_s: float) -> OffloadHit:
        """Begin to load a prefix ahead of its requests; `request` has one token more, and an id
        that only this prefix has. Return whether it is being loaded, by this call or an earlier
        one."""
        request_id = request.request_id
        if request_id not in self._wishes:
            num_prefetches = sum(wish.is_prefetch for wish in self._wishes.values())
            if num_prefetches >= MAX_PREFETCHES:
                return MISS
        answer = self.look_up(request, num_device_tokens, now_s)
        wish = self._wishes.get(request_id)
        if wish is None:
            return MISS  # it is still being stored: ask later
        wish.is_prefetch = True
        return answer

    def _look_up_tail(
        self, request: Request, tail: SwappedTail, num_device_tokens: int, now_s: float
    ) -> OffloadHit | None:
        """Wish for a tail and all blocks before it; None if some of it is gone."""
        before = self._finder.keys_between(
            request, tail.num_tokens, num_device_tokens, tail.first_token
        )
        keys = [*before, *tail.keys]
        places = self._tiers.locate(keys)
        if not _is_coming(places).all():
            return None
        if not _is_ready(places).all():
            return OffloadHit(OffloadAnswer.HIT_PENDING, tail.num_tokens - num_device_tokens)
        until_s = now_s + self._wait_s
        wish = _Wish(request, _Stage.WANTED, until_s, num_device_tokens, tail.num_tokens, keys)
        wish.tail = tail
        return self._want(wish)

    def _want(self, wish: _Wish) -> OffloadHit:
        """Add a wish; its request waits."""
        self._wishes[wish.request.request_id] = wish
        self._wanted.append(wish)
        return OffloadHit(OffloadAnswer.HIT_PENDING, wish.num_tokens - wish.num_device_tokens)

    def advance(self, now_s: float) -> list[Fetch | Load]:
        """Begin fetches and loads that are possible now; return the commands for all ranks."""
        wanted, self._wanted = self._wanted, []
        commands: list[Fetch | Load] = []
        unsaid, self._unsaid = self._unsaid, []
        for load_id, command in unsaid:
            if self._loads.loads.may_be_written(load_id):
                commands.append(command)
            else:
                self._unsaid.append((load_id, command))
        for wish in wanted:
            if wish.stage is _Stage.WANTED:
                commands += self._begin(wish, now_s)
        return commands

    def on_fetched(self, job_id: int) -> None:
        """Record the end of a fetch, successful or not: look up again."""
        wish = self._by_job.pop(job_id, None)
        if wish is not None and wish.stage is _Stage.FETCHING:
            wish.stage = _Stage.WANTED
            self._wanted.append(wish)

    def on_loaded(self, job_id: int, now_s: float, *, is_ok: bool) -> None:
        """Record that every rank has reported a load: cache its blocks, or free them."""
        self._forget_keys(job_id)
        orphan = self._orphans.pop(job_id, None)
        if orphan is not None:
            self._loads.release(orphan.load_id)
            return
        wish = self._by_job.pop(job_id)
        load = wish.load
        if load is None:
            raise InvariantError(f"load job {job_id} ends for a wish without blocks")
        if not is_ok:
            self._loads.release(load.load_id)
            self._give_up(wish, now_s)
            return
        self._loads.finish(load.load_id)
        num_tokens = load.num_tokens - load.num_device_tokens
        self.num_loaded_tokens += num_tokens
        num_fetched = num_tokens * min(wish.num_fetched, len(wish.keys)) // len(wish.keys)
        self.num_fetched_tokens += num_fetched
        wish.loaded = LoadedTokens(num_tokens, num_fetched)
        self._loaded(wish, now_s)

    def _loaded(self, wish: _Wish, now_s: float) -> None:
        """Hold the prefix until its request has come; a prefetch has no request that waits."""
        wish.stage, wish.until_s = _Stage.LOADED, now_s + self._hold_s
        if wish.is_prefetch:
            self._forget(wish.request.request_id)

    def on_overdue(self, job_id: int, now_s: float) -> None:
        """Stop the wait for an overdue job. Its blocks stay until the reports arrive."""
        wish = self._by_job.get(job_id)
        if wish is None:
            return
        if wish.stage is _Stage.LOADING and wish.load is not None:
            self._desert(wish, wish.load)
        self._give_up(wish, now_s)

    def on_admitted(self, request: Request | None, num_hit_tokens: int) -> None:
        """Forget the wish of a request that runs; count its queried tokens and hits."""
        if request is not None:
            wish = self._wishes.get(request.request_id)
            loaded = NOTHING_LOADED if wish is None else wish.loaded
            count_for_tenant(self._tiers, request, num_hit_tokens, loaded)
            self.on_gone(request.request_id)

    def on_gone(self, request_id: str) -> None:
        """Forget the wish and the tail of a request that runs, or will never come."""
        self._tails.forget(request_id)
        self._forget(request_id)

    def clear(self) -> None:
        """Forget all wishes, because the cache is emptied. Loads that were sent end as usual."""
        for request_id in list(self._wishes):
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        wish = self._wishes.pop(request_id, None)
        if wish is None:
            return
        if wish.stage is _Stage.LOADED and wish.load is not None:
            if wish.tail is not None and self._loads.loads.was_taken(wish.load.load_id):
                self._tails.came_back(wish.tail)
            self._loads.release(wish.load.load_id)
        elif wish.stage is _Stage.LOADING and wish.load is not None:
            self._desert(wish, wish.load)
        wish.stage = _Stage.GIVEN_UP

    def expire(self, now_s: float) -> None:
        """Forget wishes whose requests have not come for too long."""
        late = [r for r, wish in self._wishes.items() if wish.until_s <= now_s]
        for request_id in late:
            wish = self._wishes[request_id]
            if wish.stage in (_Stage.LOADED, _Stage.GIVEN_UP):
                if wish.stage is _Stage.LOADED and wish.tail is not None:
                    # It found no room because others hold blocks: loading again and again, two
                    # requests could keep each other out. Cached blocks can be evicted, a held tail
                    # cannot.
                    self._tails.forget(request_id)
                self._forget(request_id)
            elif wish.stage is _Stage.LOADING:
                self.on_overdue(wish.job_id, now_s)
            else:
                self._give_up(wish, now_s)

    def _begin(self, wish: _Wish, now_s: float) -> list[Fetch | Load]:
        if any(key in self._loading for key in wish.keys):
            self._parked.append(wish)  # a load of another request is a hit for it, too
            return []
        wish.num_device_tokens = self._loads.loads.num_device_tokens(wish.request)
        least = self._min_load_tokens if wish.tail is None else 1
        if wish.num_tokens - wish.num_device_tokens < least:
            self._loaded(wish, now_s)
            return []
        if (self._tiers.locate(wish.keys) == Place.DISK).any() and wish.num_fetches < MAX_FETCHES:
            fetch = self._tiers.plan_fetch(wish.keys, now_s)
            if fetch is not None:
                wish.stage, wish.job_id = _Stage.FETCHING, fetch.job_id
                wish.num_fetches += 1
                wish.num_fetched += len(fetch.keys)
                self._by_job[fetch.job_id] = wish
                packed = pack_keys(fetch.keys, len(fetch.keys[0]))
                return [Fetch(fetch.job_id, FILE_MEDIUM, packed, fetch.addresses)]
        load = self._take_blocks(wish)
        if load is None:
            return self._give_up(wish, now_s)
        keys = self._keys_of(wish, load)
        job = self._tiers.plan_load(keys, now_s) if keys else None
        if job is None or len(job.keys) < len(keys):
            # The device has lost blocks that the look-up counted on.
            self._loads.release(load.load_id)
            if job is not None:
                self._tiers.end(job.job_id, ok=True)
                self._jobs.cancel(job.job_id)
            return self._give_up(wish, now_s)
        wish.stage, wish.job_id, wish.load, wish.keys = _Stage.LOADING, job.job_id, load, keys
        self._by_job[job.job_id] = wish
        self._loading.update(dict.fromkeys(keys, job.job_id))
        destinations: Int32Array = np.concatenate(load.block_ids)
        command = Load(job.job_id, HOST_MEDIUM, job.addresses, destinations)
        self._unsaid.append((load.load_id, command))
        return []

    def _take_blocks(self, wish: _Wish) -> PrefixLoad | None:
        """Begin a load of the part of a wish in host memory; None if it is too short, or no room.

        If the rest does not fit into host memory, it stays on disk: a shorter prefix may do.
        """
        if wish.tail is not None and not _is_in_host(self._tiers.locate(wish.keys)).all():
            wish.tail = None
        if wish.tail is not None:
            num_tokens = wish.tail.num_tokens
        else:
            there, before = self._tiers.locate, wish.num_device_tokens
            hit = self._finder.find(wish.request, before, there, _is_in_host)
            if hit is None or hit.num_tokens - before < self._min_load_tokens:
                return None
            num_tokens = hit.num_tokens
        return self._loads.begin(
            wish.request, num_tokens, self._num_spare_blocks, has_tail=wish.tail is not None
        )

    def _keys_of(self, wish: _Wish, load: PrefixLoad) -> list[OffloadKey]:
        """Return the key of the content of each block of a load."""
        keys: list[OffloadKey] = []
        for group, columns in enumerate(load.columns):
            private = [None if wish.tail is None else wish.tail.key_at(group, c) for c in columns]
            shared = [c for c, key in zip(columns.tolist(), private, strict=True) if key is None]
            keys += self._finder.keys_of(wish.request, group, shared)
            keys += [key for key in private if key is not None]
        return keys

    def _desert(self, wish: _Wish, load: PrefixLoad) -> None:
        """End a load that no request waits for; if it was sent to ranks, when they have
        reported."""
        job_id = wish.job_id
        del self._by_job[job_id]
        kept = [(load_id, command) for load_id, command in self._unsaid if load_id != load.load_id]
        if len(kept) == len(self._unsaid):
            self._orphans[job_id] = load
            return
        self._unsaid = kept
        self._forget_keys(job_id)
        self._tiers.end(job_id, ok=True)
        self._loads.release(load.load_id)
        self._jobs.cancel(job_id)

    def _forget_keys(self, job_id: int) -> None:
        """Let requests that waited for the keys of a finished load continue."""
        for key in [key for key, loading in self._loading.items() if loading == job_id]:
            del self._loading[key]
        self._wanted += self._parked
        self._parked = []

    def _give_up(self, wish: _Wish, now_s: float) -> list[Fetch | Load]:
        self.num_given_up += 1
        wish.stage, wish.load, wish.until_s = _Stage.GIVEN_UP, None, now_s + self._hold_s
        return []


class _Places:
    """Where keys are, and whether any of them is in transit or unknown."""

    def __init__(self, tiers: TierHierarchy) -> None:
        self._tiers = tiers
        self.has_pending = False
        self.has_unknown = False

    def locate(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.uint8]:
        places = self._tiers.locate(keys)
        self.has_pending |= bool(_is_pending(places).any())
        self.has_unknown |= bool((places == Place.UNKNOWN).any())
        return places


def _is_in_host(places: npt.NDArray[np.uint8]) -> BoolArray:
    found: BoolArray = places == Place.HOST
    return found


def _is_ready(places: npt.NDArray[np.uint8]) -> BoolArray:
    return np.isin(places, READY_PLACES)


def _is_pending(places: npt.NDArray[np.uint8]) -> BoolArray:
    return np.isin(places, PENDING_PLACES)


def _is_coming(places: npt.NDArray[np.uint8]) -> BoolArray:
    return _is_ready(places) | _is_pending(places)
