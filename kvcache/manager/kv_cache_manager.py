"""KVCacheManager: gives blocks to requests, by single calls or a whole step at a time.

The coordinator calls the manager, and the manager calls a core, which keeps the tables of blocks.
The manager knows requests, slots, steps, pins and statistics. It does not schedule: the engine
chooses which requests run and which are preempted, and the manager says which found no room.

    get_computed_blocks ─▶ allocate_slots ─▶ ... ─▶ free        one request, the caller's object
    step(StepRequest) ─▶ StepResult                             a whole step, the manager's objects

Calls and steps share one pool, but not requests: calls refuse to change requests of steps, and
steps those of calls. One owner, one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import mul

import numpy as np

from kvcache.base.arguments import (
    are_counts,
    as_bool,
    as_int,
    as_integers,
    as_number,
    as_text,
    as_tuple,
    check_kind,
    check_methods,
)
from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.clock import Clock, SystemClock
from kvcache.base.errors import BlockError, ConfigurationError, RequestError, shown
from kvcache.base.logs import CallbackErrors, get_logger
from kvcache.config.tenants import TenantsConfig
from kvcache.core import (
    CacheEvent,
    CacheHit,
    EventSink,
    NewestState,
    OffloadAnswer,
    OffloadHooks,
    Reservation,
    TableChange,
    new_tuple,
    patch_of,
)
from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.core.hits import stale_hit
from kvcache.manager.admission import Admission
from kvcache.manager.cache_blocks import KVCacheBlocks, blocks_of
from kvcache.manager.cache_control import CacheControl, PrefixHolds, named_by_prefix
from kvcache.manager.forks import require_continuation, seat_fork
from kvcache.manager.loads import PrefixLoads
from kvcache.manager.model_limits import ModelLimits
from kvcache.manager.pins import Pin
from kvcache.manager.request_table import CALLER, KnownRequest, RequestTable
from kvcache.manager.settings import ManagerSettings
from kvcache.manager.statistics import ManagerStatistics, PrefixCacheStats
from kvcache.manager.step_execution import StepExecutor
from kvcache.manager.step_ledger import StepLedger
from kvcache.manager.step_plan import StepPlanner
from kvcache.manager.tiers import GuardedHooks, TierLink
from kvcache.protocol.commands import EMPTY_PATCH, BlockTablePatch, Command
from kvcache.protocol.labels import LabelSet, SealedContents
from kvcache.protocol.step import StepRequest, StepResult, checked_step
from kvcache.requests.hashing import DEFAULT_HASH_SEED, get_hash_fn, get_request_block_hasher
from kvcache.requests.request import LoRARequest, Request, RequestView, TokenIds, check_request
from kvcache.specs import NULL_BLOCK_ID, KVCacheConfig

logger = get_logger(__name__)

COUNTS = (
    "num_new_tokens",
    "num_new_computed_tokens",
    "num_draft_tokens",
    "num_lookahead_tokens",
    "num_external_computed_tokens",
    "num_encoder_tokens",
)
"""The counts among the arguments of `allocate_slots`."""


HOOKS = ("look_up", "on_eviction_candidates", "on_sealed", "on_request_finished")
"""The methods that `offload_hooks` must have."""

MAX_UNFINISHED_STEPS = 256
"""Steps of one client that may be neither complete nor failed at the same time."""


class EventBuffer:
    """An `EventSink` that passes events on and can keep them."""

    def __init__(self, sink: EventSink | None, *, keeps_events: bool) -> None:
        """Pass events on to `sink`, if given; with `keeps_events` also keep them until taken."""
        self._sink = sink
        self._kept: list[CacheEvent] | None = [] if keeps_events else None
        self._errors = CallbackErrors(logger, "the event sink")

    def emit(self, event: CacheEvent) -> None:
        """Take one event. If the sink raises, it misses the event; the error is logged."""
        if self._kept is not None:
            self._kept.append(event)
        if self._sink is not None:
            try:
                self._sink.emit(event)
            except Exception:
                self._errors.note(
                    f"it has missed {type(event).__name__}: fix it, and reset the cache or make "
                    "a new manager to begin again"
                )

    def take(self) -> list[CacheEvent]:
        """Return the events kept since the last call, and drop them."""
        taken = self._kept or []
        if self._kept is not None:
            self._kept = []
        return taken


class KVCacheManager:
    """The KV cache of one engine: requests on top of one core."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        enable_caching: bool = True,
        caching_hash_algo: str = "sha256",
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        watermark: float = 0.0,
        eviction_policy: str = "lru",
        max_num_seqs: int = 256,
        max_pin_share: float = 0.5,
        hash_seed: str = DEFAULT_HASH_SEED,
        clock: Clock | None = None,
        offload_hooks: OffloadHooks | None = None,
        event_sink: EventSink | None = None,
        zero_new_blocks: bool = False,
        has_workers: bool = False,
        model_epoch: int = 0,
        merge_duplicates: bool = False,
        publish_all_groups: bool = False,
        tenants: TenantsConfig | None = None,
        core_factory: CoreFactory = FlatCore,
    ) -> None:
        """Make a manager with an empty cache.

        Args:
            kv_cache_config: the plan; `num_blocks` counts the null block.
            max_model_len: most tokens of a request.
            enable_caching: whether look-ups can hit.
            caching_hash_algo: name of the digest, see `get_hash_fn`.
            use_eagle: drop the last block of a hit, whose hidden states a draft head needs.
            log_stats: count look-ups for `make_prefix_cache_stats`.
            enable_kv_cache_events: keep events for `take_events`.
            watermark: share of the blocks that must stay free when a request joins running ones.
            eviction_policy: name of the policy that chooses the blocks to evict.
            max_num_seqs: number of slots: the most requests that can run at once.
            max_pin_share: largest share of the blocks that pins may hold.
            hash_seed: start of every digest chain.
            clock: times the pins; the system's clock by default.
            offload_hooks: the tiers below; none by default.
            event_sink: receives every event at once.
            zero_new_blocks: whether workers zero a block before a request gets it.
            has_workers: keep commands for workers until `take_commands`; by default there are none.
            model_epoch: generation of the loaded weights.
            merge_duplicates: once steps are complete, let requests that filled blocks with equal
                content share one; the statistics say how many blocks and bytes that saved.
            publish_all_groups: also publish groups that cannot be hit without full attention.
            tenants: guarantees and limits per tenant; none by default.

        Raises:
            ConfigurationError: a value is invalid; the message names it and the valid ones.
        """
        settings = ManagerSettings(
            kv_cache_config,
            max_model_len,
            enable_caching,
            caching_hash_algo,
            use_eagle,
            log_stats,
            enable_kv_cache_events,
            watermark,
            eviction_policy,
            max_num_seqs,
            max_pin_share,
            hash_seed,
            zero_new_blocks,
            has_workers,
            model_epoch,
            merge_duplicates,
            publish_all_groups,
            tenants,
        )
        clock = SystemClock() if clock is None else clock
        check_methods("clock", clock, ("now",), ConfigurationError)
        hooks = None
        if offload_hooks is not None:
            check_methods("offload_hooks", offload_hooks, HOOKS, ConfigurationError)
            hooks = GuardedHooks(offload_hooks)
        if event_sink is not None:
            check_methods("event_sink", event_sink, ("emit",), ConfigurationError)
        if not callable(core_factory):
            raise ConfigurationError(
                f"core_factory has to be a function that makes a core, not {shown(core_factory)}"
            )
        self._limits = limits = ModelLimits.of(kv_cache_config, settings.max_model_len)
        hash_fn = get_hash_fn(settings.caching_hash_algo)
        self._hasher = hasher = get_request_block_hasher(
            settings.hash_block_size, hash_fn, settings.hash_seed
        )
        self._events = EventBuffer(event_sink, keeps_events=settings.enable_kv_cache_events)
        self._table = table = RequestTable(settings.max_num_seqs, settings.hash_block_size)
        self._ledger = ledger = StepLedger()
        accounts = settings.tenant_ledger()
        is_heard = settings.enable_kv_cache_events or event_sink is not None
        made = settings.core_settings(hasher)
        made = replace(made, events=self._events if is_heard else None, offload=hooks)
        made = replace(made, slot_of=table.slot_of, tenants=accounts, clock=clock)
        self._core = core = core_factory(made)
        self._cache = core.cache
        self._admission = admission = Admission(table, limits, settings=settings, tenants=accounts)
        self.control = control = CacheControl(
            core, table, admission, clock, settings=settings, tenants=accounts
        )
        loads = PrefixLoads(core, control, hasher, ledger, table, settings=settings)
        self._block_sizes = settings.block_sizes
        self.tiers = TierLink(hooks, loads, self._events, self._block_sizes, hasher.none_hash)
        self.holds = PrefixHolds(core.cache, control, hasher)
        self._planner = StepPlanner(table, limits, MAX_UNFINISHED_STEPS, hasher)
        self._executor = StepExecutor(table, core, admission, self.tiers, limits)
        self._has_workers = settings.has_workers
        # By slot: per group the first column that workers do not know yet. Cleared by a patch.
        self._changed_columns: dict[int, list[int | None]] = {}
        self._nothing = (EMPTY_INT32,) * len(self._block_sizes)
        self._no_blocks = blocks_of(self._nothing, self._nothing)

    # A request, call by call.

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Return the longest prefix of the request that is cached, and its length in tokens.

        At most `num_tokens - 1` tokens: one is always computed. Changes statistics only. The blocks
        are not acquired: they are valid until the manager changes; `allocate_slots` checks that.

        Raises:
            RequestError: the request has another hasher or another model epoch.
        """
        if type(request) is not Request:
            check_kind("request", request, Request, RequestError)
        control = self.control
        if request.namespace.model_epoch != control.model_epoch or (
            request.block_hasher is not self._hasher
        ):
            self._prepare(request)
        if control.is_draining or control.pinned:
            control.refresh()
        hit = self._cache.look_up(request)
        if self._admission.counts:
            self._admission.record(request, hit.num_tokens)
        if not hit.num_tokens:
            return self._no_blocks, 0
        return blocks_of(hit.block_ids, self._nothing, hit), hit.num_tokens

    def allocate_slots(  # noqa: PLR0917 - the order of arguments is the field's
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_draft_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_external_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Give the request slots for more tokens, all or nothing; None if there is no room.

            | computed | new computed | external | new ....... [drafts] | lookahead |
            0          ▲ request.num_computed_tokens                    ▲ caching ends before drafts

        Blocks that the computed tokens have moved out of the window are freed first, even if the
        result is None. Full blocks become hittable, except those of draft or lookahead tokens, and
        none with `delay_cache_blocks`. A new request gets a slot as well. Afterwards the caller
        sets `request.num_computed_tokens`.

        Args:
            num_new_tokens: to be computed now, drafts included, external ones not.
            num_new_computed_tokens: as returned by `get_computed_blocks`.
            new_computed_blocks: the blocks of these tokens, as returned by `get_computed_blocks`.
            num_draft_tokens: how many of the new tokens are drafts.
            num_lookahead_tokens: slots beyond the new tokens.
            num_external_computed_tokens: tokens whose bytes come from elsewhere.
            num_encoder_tokens: allocated on admission; 0 where no group keeps encoder tokens.

        Returns:
            The blocks added to the request's tables, without adopted ones.

        Raises:
            RequestError: the counts contradict each other, the request, or its tenant's limit.
        """
        counts: tuple[int, ...] = (
            num_new_tokens,
            num_new_computed_tokens,
            num_draft_tokens,
            num_lookahead_tokens,
            num_external_computed_tokens,
            num_encoder_tokens,
        )
        if type(request) is not Request or not are_counts(counts):
            counts = checked_counts(request, *counts)
        num_new, num_adopted, num_drafts, num_ahead, num_external, num_encoder = counts
        if new_computed_blocks is not None and type(new_computed_blocks) is not KVCacheBlocks:
            check_kind("new_computed_blocks", new_computed_blocks, KVCacheBlocks, RequestError)
        if delay_cache_blocks is not False:
            delay_cache_blocks = as_bool("delay_cache_blocks", delay_cache_blocks, RequestError)
        table, control, limits = self._table, self.control, self._limits
        num_computed, num_tokens = request.num_computed_tokens, request.num_tokens
        start = num_computed + num_adopted + num_external
        end = start + num_new
        own_end = end - num_drafts
        is_odd = num_drafts or num_encoder or end == num_computed
        if is_odd or own_end > num_tokens or own_end > limits.max_model_len:
            _check_counts(request, counts, limits)
        known = table.known.get(request.request_id)
        if request.namespace.model_epoch != control.model_epoch or (
            request.block_hasher is not self._hasher
        ):
            self._prepare(request)
        if control.is_draining or control.pinned:
            control.refresh()
        newest = hit = None
        if known is not None:
            if known.request is not request or known.client_index != CALLER:
                table.owned_by_caller(request)
            if num_encoder or limits.state_groups:
                newest = self._newest_state(known, num_external, num_encoder)
        has_blocks = new_computed_blocks is not None and new_computed_blocks is not self._no_blocks
        if num_adopted or has_blocks:
            hit = self._adopted(request, known, num_adopted, new_computed_blocks)
        if known is None and not table.num_free_slots:
            if hit is not None and hit.num_tokens and self._cache.look_up(request) != hit:
                raise stale_hit(request, hit.num_tokens)
            return None
        has_watermark = known is None and self._admission.watermark_blocks
        num_spare = self._admission.num_spare_blocks if has_watermark else 0
        end = min(end + num_ahead, limits.max_model_len)
        num_cached = 0 if delay_cache_blocks else own_end
        changes = self._core.reserve(
            request,
            new_tuple(
                Reservation, (start, end, num_cached, num_spare, own_end, newest, num_encoder)
            ),
            hit,
        )
        if changes is None:
            self._admission.raise_if_never_fits(request, None if known is None else own_end)
            return None
        if known is None:
            known = table.admit(request, CALLER, own_end, num_encoder)
            if self._has_workers:
                self._changed_columns[known.slot] = [0] * len(self._block_sizes)
        else:
            table.note_own(known.slot, own_end)
            if self._has_workers:
                self._note_changed(known.slot, changes)
        known.num_draft_tokens = num_drafts
        return self._new_blocks(changes, num_cached) if changes else self._no_blocks

    def fork(self, parent_request: Request, child_request: Request) -> KVCacheBlocks | None:
        """Let the new `child_request` share every block that the parent has computed.

        The child begins with the parent's computed tokens (it may have more); it gets a slot and
        its `num_computed_tokens`. None, unchanged, if no slot is free. Afterwards both are ordinary
        requests. Before one of them writes a block that both share, `allocate_slots` gives it
        another one, and `take_commands` (with `has_workers`) returns the copy that every rank runs
        before that forward.

        Raises:
            RequestError: the parent has no blocks (unknown, preempted or swapped out) or too few,
                or the child is known already or does not continue it; nothing was changed.
        """
        check_request(parent_request)
        check_request(child_request)
        known = self._table.owned_by_caller(parent_request)
        if known is None or not known.is_running:
            raise RequestError(
                f"request {parent_request.request_id} is not known and cannot be forked: allocate "
                "slots for it first"
            )
        if child_request.request_id in self._table.known:
            raise RequestError(
                f"request {child_request.request_id} is to be forked from "
                f"{parent_request.request_id} but known already: use another id"
            )
        require_continuation(parent_request, child_request, self._limits.max_model_len)
        self._newest_state(known, 0, 0)
        child_request.attach_block_hasher(self._hasher)
        self.control.refresh()
        num_computed = parent_request.num_computed_tokens
        seated = seat_fork(self._table, self._core, known, child_request, num_computed)
        if seated is None:
            return None
        if self._has_workers:
            self._note_changed(seated[0].slot, seated[1])
        return KVCacheBlocks(self._core.block_ids(child_request.request_id))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make the request's full blocks up to `num_computed_tokens` hittable, if delayed before.

        Raises:
            RequestError: the request has no blocks, or fewer tokens.
        """
        check_request(request)
        what = f"request {request.request_id}: num_computed_tokens"
        num_computed_tokens = as_int(what, num_computed_tokens, error=RequestError)
        if self._table.owned_by_caller(request) is None:
            raise RequestError(
                f"request {request.request_id} has no blocks to cache: allocate slots for it first"
            )
        if num_computed_tokens > request.num_tokens:
            raise RequestError(
                f"request {request.request_id}: cannot cache {num_computed_tokens} tokens, it has "
                f"{request.num_tokens}: pass 0 to that number"
            )
        self._core.commit(request, num_computed_tokens)

    def free(self, request: Request) -> None:
        """Free the request's blocks, tail first, and forget it. No effect on an unknown request.

        Raises:
            RequestError: a step admitted it, or another object has its id.
        """
        if type(request) is not Request:
            check_request(request)
        known = self._table.known.get(request.request_id)
        if known is None:
            return
        if known.request is not request or known.client_index != CALLER:
            self._table.owned_by_caller(request)
        control = self.control
        if self._changed_columns:
            self._changed_columns.pop(known.slot, None)
        if request.hints or self.tiers.hooks is not None:
            self._executor.forget((known,))
        else:
            self._core.free(request)
            self._table.forget(known)
        if control.is_draining or control.pinned:
            control.refresh()

    def free_block_hashes(self, request: Request) -> None:
        """Make no further block of the request hittable; hittable blocks stay hittable."""
        check_request(request)
        if self._table.owned_by_caller(request) is not None:
            self._core.forget_hashes(request)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return copies of the request's block tables, one per group; empty if it has none."""
        return self._core.block_ids(_named(request_id))

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return the blocks of the request, one table per group; empty if it has none."""
        return KVCacheBlocks(self.get_block_ids(request_id))

    def create_empty_block_list(self) -> KVCacheBlocks:
        """Return an object without blocks, with all groups."""
        return self._no_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0.0 to 1.0."""
        return self._cache.usage()

    def get_num_common_prefix_blocks(
        self, request: Request, num_running_requests: int
    ) -> list[int]:
        """Return, per group, how many leading blocks all running requests share with this one."""
        check_kind("request", request, Request, RequestError)
        num_running = as_int("num_running_requests", num_running_requests, error=RequestError)
        return self._core.common_prefix_blocks(request.request_id, num_running)

    # A whole step.

    def step(self, request: StepRequest) -> StepResult:
        """Execute a scheduling step; `StepRequest` gives the order, `StepResult` the results.

        Preempted requests stay known, without slot and blocks. A resumed request hits the blocks
        that the tiers below kept; with `preempted_swap` and a rule for it, they keep every complete
        token. A step number that never reached the manager counts as complete once a later one
        does. `epoch` is copied into the result, whose `seq` is 0: the coordinator uses both.

        Raises:
            RequestError: the step contradicts the manager's state, or itself; nothing was changed.
            BacklogFullError: too many steps of the client are unfinished; nothing was changed.
        """
        request = checked_step(request)
        if not request.client_id:
            raise RequestError(f"step {request.step} names no client: set client_id")
        client = self._ledger.look_up(request.client_id)
        plan = self._planner.plan(request, client, self.control.model_epoch)
        self._ledger.keep(client, has_failed=plan.rollback is not None)
        control = self.control
        if control.is_draining or control.pinned:
            control.refresh()
        result = self._executor.execute(plan)
        if control.is_draining or control.pinned:
            control.refresh()
        return result

    def release_client(self, client_id: str) -> tuple[str, ...]:
        """Forget a client that is gone: void its unfinished steps and free its requests.

        Call it only when no rank can still run any of its steps. Returns the ids of the requests,
        none for an unknown client.
        """
        client = self._ledger.forget(as_text("client id", client_id, RequestError))
        if client is None:
            return ()
        self._core.fail_steps(client_id, client.completed_step + 1)
        gone = self._table.of_client(client.index)
        self._executor.forget(gone)
        self.control.refresh()
        return tuple(known.request.request_id for known in gone)

    def get_request(self, request_id: str) -> Request | None:
        """Return the request with all its tokens, or None. Valid until the next step.

        A request of calls is the caller's own object; a request of steps is a read-only view.
        """
        known = self._table.known.get(_named(request_id))
        request = self._table.up_to_date(request_id)
        if known is None or request is None or known.client_index == CALLER:
            return request
        return RequestView(request)

    def slot_of(self, request_id: str) -> int | None:
        """Return the slot of a running request; None if it is preempted or not known."""
        known = self._table.known.get(_named(request_id))
        return known.slot if known is not None and known.is_running else None

    def request_in_slot(self, slot: int) -> Request | None:
        """Return the request that runs in `slot`, as `get_request` does; None if it is free.

        Raises:
            RequestError: there is no such slot.
        """
        index = as_int("slot", slot, 0, self._table.num_slots - 1, RequestError)
        request = self._table.request_in(index)
        return None if request is None else self.get_request(request.request_id)

    # The cache as a whole.

    @property
    def model_epoch(self) -> int:
        """Generation of the model's weights; part of every namespace."""
        return self.control.model_epoch

    @property
    def is_draining(self) -> bool:
        """Whether a reset waits until no block is in use."""
        return self.control.is_draining

    def reset_prefix_cache(self, drain: bool = False) -> bool:
        """Empty the cache; return whether it is empty.

        While blocks are in use, the reset is refused: it returns False, and logs the users, which
        `statistics().users()` names too. With `drain` hits stop at once, pins are dropped, and
        running requests finish without being cached. When the last block is free, now or in a later
        call, the manager empties the cache and advances the model epoch. Call again to see whether
        that has happened.
        """
        is_done = self.control.reset(drain=as_bool("drain", drain, RequestError))
        if not is_done and not self.is_draining:
            logger.warning(
                "the prefix cache is not reset: %s: let them end, or reset with drain=True",
                self.statistics().users(),
            )
        return is_done

    def begin_model_epoch(self) -> int:
        """Note that the weights have changed; return the new model epoch.

        Nothing computed before is ever hit again, in any tier, and no request has to end. All
        cached blocks are free at once, pins end, and a drain ends. Running requests keep their
        blocks and cache nothing more; if they are preempted, all of their tokens are computed
        again. Call it after the last step of the old weights was sent, and send the next step only
        when every rank has the new ones. Per-request calls take new `Request` objects only with the
        new epoch.
        """
        return self.control.begin_model_epoch()

    def evict_blocks(self, block_ids: Sequence[int]) -> None:
        """Forget the contents of these blocks, and of cached blocks that continue them.

        Requests that have one of these blocks cache nothing more. Raises BlockError for an id that
        does not exist.
        """
        self._cache.evict(as_integers("block_ids", block_ids, error=BlockError).tolist())

    def pin_prefix(
        self,
        tokens: TokenIds,
        ttl_s: float,
        *,
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> Pin:
        """Protect the cached blocks of a prefix from eviction for `ttl_s` seconds.

        Only whole blocks that are cached now are pinned; the pin says how many tokens they hold.
        The pin ends by `unpin_prefix`, by a drain, or at the first call or step after its time.

        Raises:
            RequestError: there are no tokens, or `ttl_s` is not above 0.
            PinLimitError: pins would hold more than `max_pin_share` of the blocks.
        """
        limit_s = as_number("ttl_s", ttl_s, above=0, error=RequestError)
        self.control.refresh()
        return self.control.pin(self._prefix_request(tokens, lora, cache_salt, tenant), limit_s)

    def prefetch_prefix(
        self,
        tokens: TokenIds,
        *,
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> int:
        """Raise a prefix from the tiers to the device, ahead of a request that continues it.

        Returns how many tokens behind those cached on the device are being loaded. The load takes
        room as a request does; afterwards its blocks are cached, unused, and can be evicted. It
        begins when the steps sent before are complete: an idle engine reports them by empty steps.
        Repeat the call freely: a prefix is loaded once at a time. 0 if there is nothing to load,
        no room for another load, or no tier, and after a failed load for some time.

        Raises:
            RequestError: there are no tokens.
        """
        self.control.refresh()
        request = self._prefix_request(tokens, lora, cache_salt, tenant)
        if self.tiers.on_prefetch is None:
            return 0
        request = named_by_prefix(request)
        num_device_tokens = self._cache.look_up(request).num_tokens
        hit = self.tiers.on_prefetch(request, num_device_tokens)
        # Since an earlier call, requests may have cached more than it loads.
        return max(0, hit.num_tokens) if hit.answer is OffloadAnswer.HIT_PENDING else 0

    def unpin_prefix(self, pin: Pin) -> bool:
        """End a pin; False if it has ended already."""
        check_kind("pin", pin, Pin, RequestError)
        pin_id = as_int("pin_id", pin.pin_id, error=RequestError)
        self.control.refresh()
        return self.control.unpin(pin_id)

    def take_events(self) -> list[CacheEvent]:
        """Return the events since the last call; always empty without `enable_kv_cache_events`."""
        return self._events.take()

    def take_commands(self) -> list[Command]:
        """Return the commands for workers since the last call, in order.

        Table changes of per-request calls come last, as one patch. Those of a step are in its
        `StepResult` only.
        """
        commands = self.control.take_commands()
        patch = self._take_patch()
        return [*commands, patch] if len(patch.slots) else commands

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the counts since the last call and reset them; None without `log_stats`."""
        return self._admission.take_stats()

    # State.

    def statistics(self) -> ManagerStatistics:
        """Return frozen statistics."""
        return ManagerStatistics(
            self._core.statistics(),
            *self._table.counts(),
            num_free_slots=self._table.num_free_slots,
            num_pins=len(self.control.pinned),
            num_clients=len(self._ledger),
            num_unfinished_steps=self._ledger.num_unfinished_steps,
            num_steps=self._ledger.num_steps,
            num_failed_step_reports=self._ledger.num_failures,
            num_preemptions=self._table.num_preemptions,
            num_blocks_refusing_reset=self.control.num_blocks_refusing_reset,
            model_epoch=self.control.model_epoch,
            is_draining=self.control.is_draining,
            num_asked_tokens=self._admission.num_asked_tokens,
            num_hit_tokens=self._admission.num_hit_tokens,
            tenants=self._admission.tenant_statistics(),
            num_loads=len(self.tiers.loads),
            num_holds=len(self.holds),
        )

    def check(self) -> None:
        """Raise `InvariantError`, with the sum that fails, if the tables do not add up."""
        self._table.check(self._core.block_ids)
        self.control.check()
        self._core.check()

    def sealed_contents(self) -> SealedContents:
        """Return the content of every sealed block's label. Reads the whole cache."""
        return self._cache.sealed_contents()

    def dump_state(self) -> dict[str, object]:
        """Return the whole state as plain values, for comparisons."""
        return {
            "core": self._core.dump_state(),
            "requests": self._table.dump_state(self._core.block_ids),
            "cache": self.control.dump_state(),
            "clients": self._ledger.dump_state(),
            "statistics": self._admission.dump_state(),
        }

    def restore(self, labels: Sequence[LabelSet]) -> int:
        """Rebuild an empty cache from the labels of all ranks; return how many blocks it kept.

        Raises:
            RequestError: requests are known; nothing was changed.
        """
        sets = as_tuple("labels", labels, RequestError, LabelSet)
        num_running, num_preempted = self._table.counts()
        if num_running or num_preempted:
            raise RequestError(
                f"cannot restore: {num_running} requests run and {num_preempted} are preempted: "
                "restore a new manager"
            )
        return self._cache.restore(sets)

    # Helpers of per-request calls.

    def _prepare(self, request: Request) -> None:
        """Refuse a new request of another model epoch; give others this manager's hasher."""
        epoch = request.namespace.model_epoch
        if epoch != self.control.model_epoch and request.request_id not in self._table.known:
            raise RequestError(
                f"request {request.request_id} is of model epoch {epoch}, the weights are of "
                f"epoch {self.control.model_epoch}: create it with "
                "model_epoch=manager.model_epoch"
            )
        request.attach_block_hasher(self._hasher)

    def _prefix_request(
        self, tokens: TokenIds, lora: LoRARequest | None, salt: str | None, tenant: str | None
    ) -> Request:
        """Return a request for looking up a prefix. A look-up leaves the last token out, so the
        request has one token more."""
        request = Request(
            "pin",
            tokens,
            lora=lora,
            cache_salt=salt,
            block_hasher=self._hasher,
            tenant=tenant,
            model_epoch=self.control.model_epoch,
        )
        request.append_output_token_ids([0])
        return request

    def _newest_state(
        self, known: KnownRequest, num_external: int, num_encoder: int
    ) -> NewestState | None:
        """Return where a running request's last forward ended; None where no group keeps states.

        Raises:
            RequestError: the request's counts contradict its last slots or its encoder tokens.
        """
        request = known.request
        if num_encoder not in (0, known.num_encoder_tokens):
            raise RequestError(
                f"request {request.request_id} was admitted with {known.num_encoder_tokens} "
                f"encoder tokens, not {num_encoder}: pass that number or 0"
            )
        if not self._limits.state_groups:
            return None
        num_computed = request.num_computed_tokens
        if num_external:
            return NewestState(num_computed + num_external, 0)
        num_own = self._table.num_own(known.slot)
        num_accepted = num_computed - num_own
        if not 0 <= num_accepted <= known.num_draft_tokens:
            raise RequestError(
                f"request {request.request_id} has {num_computed} computed tokens, but its last "
                f"slots were for {num_own} and {known.num_draft_tokens} drafts, and states are "
                "written over: count what was computed, or free it and begin again"
            )
        return NewestState(num_own, num_accepted)

    def _adopted(
        self,
        request: Request,
        known: KnownRequest | None,
        num_tokens: int,
        blocks: KVCacheBlocks | None,
    ) -> CacheHit | None:
        """Return the hit that a call passes, if any. The core refuses one that no look-up finds."""
        if known is None and blocks is not None:
            hit = blocks.found
            if hit is not None and hit.num_tokens == num_tokens:
                return hit
        if not num_tokens and not blocks:
            return None
        if known is not None:
            raise RequestError(
                f"request {request.request_id} has blocks already and cannot adopt "
                f"{num_tokens} computed tokens: pass new_computed_blocks on the first call only"
            )
        hit = CacheHit(() if blocks is None else blocks.id_arrays, num_tokens)
        covered = [*map(mul, map(len, hit.block_ids), self._block_sizes)]
        if not len(hit.block_ids) == len(self._block_sizes) == covered.count(num_tokens):
            raise RequestError(
                f"request {request.request_id}: new_computed_blocks cover {covered} tokens of "
                f"the groups, num_new_computed_tokens is {num_tokens}: pass both as "
                "get_computed_blocks returned them"
            )
        return hit

    def _note_changed(self, slot: int, changes: Sequence[TableChange]) -> None:
        """Remember for workers from which column on each table has changed."""
        columns = self._changed_columns.get(slot)
        if columns is None:
            columns = self._changed_columns[slot] = [None] * len(self._block_sizes)
        for change in changes:
            first = columns[change.group]
            if first is None or change.first_index < first:
                columns[change.group] = change.first_index

    def _take_patch(self) -> BlockTablePatch:
        """Return the table changes of all calls since the last patch."""
        if not self._changed_columns:
            return EMPTY_PATCH
        changes = []
        for slot, columns in self._changed_columns.items():
            request = self._table.request_in(slot)
            if request is None:
                continue
            for group, ids in enumerate(self._core.block_ids(request.request_id)):
                first = columns[group]
                if first is not None and first < len(ids):
                    changes.append((slot, TableChange(group, first, int32_array(ids[first:]))))
        self._changed_columns.clear()
        return patch_of(changes)

    def _new_blocks(self, changes: Sequence[TableChange], num_cached: int) -> KVCacheBlocks:
        """Return what entered the tables."""
        if len(changes) == 1 == len(self._nothing) and not self._limits.state_groups:
            _, first, entered = changes[0]
            num_hashed = num_cached // self._block_sizes[0] - first
            return blocks_of((entered,), (entered[num_hashed:] if num_hashed > 0 else entered,))
        new, unhashed = list(self._nothing), list(self._nothing)
        for group, first, entered in changes:
            if group in self._limits.state_groups:
                without = self._unhashed_states(num_cached, group, first, entered)
            else:
                num_hashed = num_cached // self._block_sizes[group] - first
                without = entered[num_hashed:] if num_hashed > 0 else entered
            if len(new[group]):
                entered = np.concatenate((new[group], entered))  # noqa: PLW2901
                without = np.concatenate((unhashed[group], without))
            new[group], unhashed[group] = entered, without
        return blocks_of(tuple(new), tuple(unhashed))

    def _unhashed_states(
        self, num_cached: int, group: int, first_index: int, block_ids: Int32Array
    ) -> Int32Array:
        """Return the states, from column `first_index` on, whose content has no hash."""
        size = self._block_sizes[group]
        num_full = num_cached // size
        has_none = block_ids != NULL_BLOCK_ID
        # Only a state at the very end of the cached tokens has a hash.
        hashed = num_full - 1 - first_index
        if num_cached == num_full * size and 0 <= hashed < len(block_ids):
            has_none[hashed] = False
        unhashed: Int32Array = block_ids[has_none]
        return unhashed


def checked_counts(request: Request, *counts: int) -> tuple[int, ...]:
    """Return the counts of an `allocate_slots` call as plain integers, in the order of `COUNTS`.

    Raises:
        RequestError: one is no integer of at least 0, or `request` is not a request that its caller
            may change.
    """
    check_request(request)
    if are_counts(counts):
        return counts
    return tuple(
        [
            as_int(f"request {request.request_id}: {name}", count, error=RequestError)
            for name, count in zip(COUNTS, counts, strict=True)
        ]
    )


def _check_counts(request: Request, counts: Sequence[int], limits: ModelLimits) -> None:
    """Refuse counts that contradict each other, the request or the limits."""
    request_id = request.request_id
    num_new, num_adopted, num_drafts, _, num_external, num_encoder = counts
    if num_encoder:
        limits.require_encoder_tokens(request_id, num_encoder)
    if num_drafts:
        limits.require_drafts(request_id, num_drafts)
    adopted = num_adopted + num_external
    if num_new + adopted == 0:
        raise RequestError(
            f"request {request_id}: no new tokens and none to adopt: pass num_new_tokens of at "
            "least 1"
        )
    if num_drafts > num_new:
        raise RequestError(
            f"request {request_id}: {num_drafts} draft tokens of {num_new} new ones: drafts are "
            "part of num_new_tokens"
        )
    end = request.num_computed_tokens + adopted + num_new - num_drafts
    if end > request.num_tokens:
        raise RequestError(
            f"request {request_id}: {request.num_computed_tokens} computed, {adopted} adopted and "
            f"{num_new - num_drafts} new tokens make {end}, but it has {request.num_tokens} "
            "tokens: append the tokens first, or pass fewer"
        )
    if end > limits.max_model_len:
        raise RequestError(
            f"request {request_id}: {end} tokens, the model takes {limits.max_model_len}: finish "
            "the request"
        )


def _named(request_id: str) -> str:
    """Return the id of a request, known or not; raises RequestError if it is no text."""
    return as_text("request id", request_id, RequestError, may_be_empty=True)
