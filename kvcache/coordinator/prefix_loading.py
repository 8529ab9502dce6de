"""Requests that wait until a longer prefix of theirs has come up from the tiers.

Between the look-up of a request, which finds that tiers hold more than the device, and the load
that makes it a hit on the device. A wish is one request's: found, fetched to the host where the
disk has it, loaded into blocks of a placeholder request, and kept until the request was let in.
What goes wrong, or takes too long, is computed: who was disappointed once does not wait again.

    look_up ▶ WANTED ─▶ FETCHING ─▶ LOADING ─▶ LOADED ─▶ (request admitted) ▶ gone
                 └───────────┴───────────┴──▶ GIVEN_UP ─▶ (request admitted) ▶ gone

A load is said to workers only when no step from before can read the blocks it writes any more.
A request that was swapped out wishes for its tail, too: all of it or, where some of it is gone, for
what any request of its content would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import InvariantError
from kvcache.coordinator.partial_block_swap import PartialBlockSwap, SwappedTail
from kvcache.coordinator.recorded_tiers import RecordedLoads
from kvcache.coordinator.tier_hits import BoolArray, TierHitFinder
from kvcache.coordinator.tier_tenants import NOTHING_LOADED, LoadedTokens, count_for_tenant
from kvcache.core import OffloadAnswer, OffloadHit
from kvcache.manager.loads import PrefixLoad
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.hits import Place
from kvcache.offload.keys import OffloadKey, pack_keys
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import Command, Fetch, Load
from kvcache.requests.request import Request

MISS = OffloadHit(OffloadAnswer.MISS)
RETRY = OffloadHit(OffloadAnswer.RETRY)

MAX_WISHES = 256
"""Requests that may wait at once; others are computed."""

READY_PLACES = (Place.HOST, Place.DISK)
PENDING_PLACES = (Place.HOST_PENDING, Place.DISK_PENDING)

MAX_FETCHES = 2
"""Fetches for one wish: what is evicted from the host meanwhile may be fetched once more."""


class _Stage(Enum):
    WANTED = "wanted"
    FETCHING = "fetching"
    LOADING = "loading"
    LOADED = "loaded"
    GIVEN_UP = "given up"


@dataclass(eq=False)
class _Wish:
    """What one request waits for, or no longer waits for. `until_s` is when it is forgotten."""

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

    def is_of(self, request: Request) -> bool:
        """Whether another object is the same request, asked for again."""
        mine = self.request
        return mine is request or (
            mine.namespace == request.namespace
            and mine.mm_hashes == request.mm_hashes
            and np.array_equal(mine.all_token_ids, request.all_token_ids)
        )


class PrefixLoading:
    """All wishes of one epoch. Its owner sends the commands and hands in how jobs ended."""

    def __init__(
        self,
        finder: TierHitFinder,
        tiers: TierHierarchy,
        loads: RecordedLoads,
        tails: PartialBlockSwap,
        cancel_job: Callable[[int], None],
        *,
        min_load_tokens: int,
        hold_s: float,
        wait_s: float,
        num_spare_blocks: int = 0,
    ) -> None:
        """Load prefixes by `loads` where at least `min_load_tokens` come from the tiers.

        `cancel_job` ends jobs that no rank was told of. What was loaded is held for a request for
        `hold_s` at most, and a request waits `wait_s`. While requests run, `num_spare_blocks` stay
        free for them.
        """
        self._finder = finder
        self._tiers = tiers
        self._loads = loads
        self._tails = tails
        self._cancel_job = cancel_job
        self._min_load_tokens = min_load_tokens
        self._hold_s = hold_s
        self._wait_s = wait_s
        self._num_spare_blocks = num_spare_blocks
        self._wishes: dict[str, _Wish] = {}
        self._wanted: list[_Wish] = []
        self._parked: list[_Wish] = []
        self._unsaid: list[tuple[int, Command]] = []
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
            self._loads.may_be_written(load_id) for load_id, _ in self._unsaid
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a load."""
        waits = (_Stage.WANTED, _Stage.FETCHING, _Stage.LOADING)
        return sum(wish.stage in waits for wish in self._wishes.values())

    def look_up(self, request: Request, num_device_tokens: int, now_s: float) -> OffloadHit:
        """Say whether the request shall wait; begin to wish for what the tiers have of it."""
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
        wish = _Wish(
            request,
            _Stage.WANTED,
            now_s + self._wait_s,
            num_device_tokens,
            hit.num_tokens,
            hit.keys,
        )
        return self._want(wish)

    def _look_up_tail(
        self, request: Request, tail: SwappedTail, num_device_tokens: int, now_s: float
    ) -> OffloadHit | None:
        """Wish for a tail and all before it; None if some of it is gone."""
        before = self._finder.keys_between(
            request, tail.num_tokens, num_device_tokens, tail.first_token
        )
        keys = [*before, *tail.keys]
        places = self._tiers.locate(keys)
        if not _is_coming(places).all():
            return None
        if not _is_ready(places).all():
            return OffloadHit(OffloadAnswer.HIT_PENDING, tail.num_tokens - num_device_tokens)
        wish = _Wish(
            request,
            _Stage.WANTED,
            now_s + self._wait_s,
            num_device_tokens,
            tail.num_tokens,
            keys,
            tail=tail,
        )
        return self._want(wish)

    def _want(self, wish: _Wish) -> OffloadHit:
        """Begin to wish; the request is to wait."""
        self._wishes[wish.request.request_id] = wish
        self._wanted.append(wish)
        return OffloadHit(OffloadAnswer.HIT_PENDING, wish.num_tokens - wish.num_device_tokens)

    def advance(self, now_s: float) -> list[Command]:
        """Begin fetches and loads that can begin now; return what every rank has to do."""
        wanted, self._wanted = self._wanted, []
        commands: list[Command] = []
        unsaid, self._unsaid = self._unsaid, []
        for load_id, command in unsaid:
            if self._loads.may_be_written(load_id):
                commands.append(command)
            else:
                self._unsaid.append((load_id, command))
        for wish in wanted:
            if wish.stage is _Stage.WANTED:
                commands += self._begin(wish, now_s)
        return commands

    def on_fetched(self, job_id: int) -> None:
        """A fetch has ended, well or badly: look again at what is there now."""
        wish = self._by_job.pop(job_id, None)
        if wish is not None and wish.stage is _Stage.FETCHING:
            wish.stage = _Stage.WANTED
            self._wanted.append(wish)

    def on_loaded(self, job_id: int, now_s: float, *, is_ok: bool) -> None:
        """Every rank has reported a load: cache its blocks, or give them back."""
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
        wish.stage, wish.until_s = _Stage.LOADED, now_s + self._hold_s

    def on_overdue(self, job_id: int, now_s: float) -> None:
        """A job takes too long: its request waits no more. Blocks stay until every rank reports."""
        wish = self._by_job.get(job_id)
        if wish is None:
            return
        if wish.stage is _Stage.LOADING and wish.load is not None:
            self._desert(wish, wish.load)
        self._give_up(wish, now_s)

    def on_admitted(self, request: Request | None, num_hit_tokens: int) -> None:
        """The request runs: forget what it wished for, and count what it asked for and hit."""
        if request is not None:
            wish = self._wishes.get(request.request_id)
            loaded = NOTHING_LOADED if wish is None else wish.loaded
            count_for_tenant(self._tiers, request, num_hit_tokens, loaded)
            self.on_gone(request.request_id)

    def on_gone(self, request_id: str) -> None:
        """The request runs, or will never come: forget what it wished for, and its tail."""
        self._tails.forget(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        wish = self._wishes.pop(request_id, None)
        if wish is None:
            return
        if wish.stage is _Stage.LOADED and wish.load is not None:
            if wish.tail is not None and self._loads.was_taken(wish.load.load_id):
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
                    # It found no room beside what others hold: loaded again and again, two requests
                    # could keep each other out. What is cached can be evicted, a held tail cannot.
                    self._tails.forget(request_id)
                self._forget(request_id)
            elif wish.stage is _Stage.LOADING:
                self.on_overdue(wish.job_id, now_s)
            else:
                self._give_up(wish, now_s)

    def _begin(self, wish: _Wish, now_s: float) -> list[Command]:
        if any(key in self._loading for key in wish.keys):
            self._parked.append(wish)  # what another request has loaded is a hit for this one too
            return []
        wish.num_device_tokens = self._loads.num_device_tokens(wish.request)
        least = self._min_load_tokens if wish.tail is None else 1
        if wish.num_tokens - wish.num_device_tokens < least:
            wish.stage, wish.until_s = _Stage.LOADED, now_s + self._hold_s
            return []
        if (self._tiers.locate(wish.keys) == Place.DISK).any() and wish.num_fetches < MAX_FETCHES:
            fetch = self._tiers.plan_fetch(wish.keys, now_s)
            if fetch is not None:
                wish.stage, wish.job_id = _Stage.FETCHING, fetch.job_id
                wish.num_fetches += 1
                wish.num_fetched += len(fetch.keys)
                self._by_job[fetch.job_id] = wish
                packed = pack_keys(fetch.keys, len(fetch.keys[0]))
                return [Fetch(fetch.job_id, FILE_MEDIUM, packed, fetch.destinations)]
        load = self._take_blocks(wish)
        if load is None:
            return self._give_up(wish, now_s)
        keys = self._keys_of(wish, load)
        job = self._tiers.plan_load(keys, now_s) if keys else None
        if job is None or len(job.keys) < len(keys):
            # The device has lost what the look-up counted on.
            self._loads.release(load.load_id)
            if job is not None:
                self._tiers.loaded(job.job_id, ok=True)
                self._cancel_job(job.job_id)
            return self._give_up(wish, now_s)
        wish.stage, wish.job_id, wish.load, wish.keys = _Stage.LOADING, job.job_id, load, keys
        self._by_job[job.job_id] = wish
        self._loading.update(dict.fromkeys(keys, job.job_id))
        destinations: Int32Array = np.concatenate(load.block_ids)
        command = Load(job.job_id, HOST_MEDIUM, job.sources, destinations)
        self._unsaid.append((load.load_id, command))
        return []

    def _take_blocks(self, wish: _Wish) -> PrefixLoad | None:
        """Begin a load of what host memory has of a wish; None if that is too little, or no room.

        What the host has no room for stays on disk: a shorter prefix may do.
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
        """Return the key of what goes into each block of a load."""
        keys: list[OffloadKey] = []
        for group, columns in enumerate(load.columns):
            private = [None if wish.tail is None else wish.tail.key_at(group, c) for c in columns]
            shared = [c for c, key in zip(columns.tolist(), private, strict=True) if key is None]
            keys += self._finder.keys_of(wish.request, group, shared)
            keys += [key for key in private if key is not None]
        return keys

    def _desert(self, wish: _Wish, load: PrefixLoad) -> None:
        """No request waits for a load any more: end it, or let it end if ranks were told of it."""
        job_id = wish.job_id
        del self._by_job[job_id]
        kept = [(load_id, command) for load_id, command in self._unsaid if load_id != load.load_id]
        if len(kept) == len(self._unsaid):
            self._orphans[job_id] = load
            return
        self._unsaid = kept
        self._forget_keys(job_id)
        self._tiers.loaded(job_id, ok=True)
        self._loads.release(load.load_id)
        self._cancel_job(job_id)

    def _forget_keys(self, job_id: int) -> None:
        """A load is over: those who waited for the same keys may go on."""
        for key in [key for key, loading in self._loading.items() if loading == job_id]:
            del self._loading[key]
        self._wanted += self._parked
        self._parked = []

    def _give_up(self, wish: _Wish, now_s: float) -> list[Command]:
        self.num_given_up += 1
        wish.stage, wish.load, wish.until_s = _Stage.GIVEN_UP, None, now_s + self._hold_s
        return []


class _Places:
    """Where keys are, and whether any of them is on its way or not known yet."""

    def __init__(self, tiers: TierHierarchy) -> None:
        self._tiers = tiers
        self.has_pending = False
        self.has_unknown = False

    def locate(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.uint8]:
        """Return the places of `keys`."""
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
