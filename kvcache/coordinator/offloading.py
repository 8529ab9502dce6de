"""The tiers below the device at work: sealed blocks go down, requested prefixes come up.

The step server passes each step's commands before they are sent; the epoch state passes the results
of jobs. A store begins in the very message that seals a block, and the core does not know tiers.
Moves no bytes, and makes no step wait: a request whose prefix is in a tier is sent again.

    Label ──▶ BlockStoring ──▶ Store ──all ranks ok──▶ SealSlots    look_up ──▶ PrefixLoading
    Reset ──▶ everything is forgotten                               plan_spills ──▶ Spill
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvcache.base.arrays import EMPTY_INT32
from kvcache.base.clock import Clock
from kvcache.base.logs import get_logger
from kvcache.coordinator.block_storing import BlockStoring
from kvcache.coordinator.job_table import Job, JobTable
from kvcache.coordinator.label_collection import LabelQuestion
from kvcache.coordinator.partial_block_swap import PartialBlockSwap
from kvcache.coordinator.parts import OffloadParts
from kvcache.coordinator.prefix_loading import PrefixLoading
from kvcache.coordinator.settings import OffloadStatistics
from kvcache.coordinator.step_recorder import (
    Gone,
    LookedUp,
    RecordedLoads,
    StepRecorder,
    SwappedOut,
    Withdrawn,
)
from kvcache.coordinator.tier_adoption import TierAdoption
from kvcache.core import OffloadHit
from kvcache.manager import KVCacheManager
from kvcache.offload.events import cache_events
from kvcache.offload.jobs import JobKind
from kvcache.offload.keys import OffloadKey, pack_keys
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import (
    BlockTablePatch,
    Command,
    Copy,
    Discard,
    Label,
    Reset,
    SealSlots,
    Spill,
    Unlabel,
)
from kvcache.protocol.messages import LabelReport, Outgoing
from kvcache.protocol.step import NO_SLOT, StepRequest, StepResult
from kvcache.requests.hints import blocks_in
from kvcache.requests.request import Request

logger = get_logger(__name__)

MAX_DISCARDED_KEYS = 16384
"""Most files to remove that one message names; the others follow."""

SPARE_PART = 16
"""One in this many device blocks is left to running requests when prefixes are loaded."""


class Offloading:
    """The tiers of one epoch, as both hooks of its manager. One user, one thread.

    Records every call of a hook and its answer: a recording has what reaches the manager.
    """

    def __init__(
        self,
        parts: OffloadParts,
        manager: KVCacheManager,
        jobs: JobTable,
        clock: Clock,
        recorder: StepRecorder | None = None,
    ) -> None:
        """Serve a new `manager`; jobs are numbered by `jobs`. `recorder` gets every change of the
        manager."""
        settings = parts.settings
        self._recorder = recorder or StepRecorder()
        self._link = link = manager.tiers
        self._loads = loads = RecordedLoads(link.loads, self._recorder)
        self.tiers = tiers = parts.make_tiers(jobs.open)
        self._manager = manager
        self._clock = clock
        num_blocks = manager.statistics().core.num_blocks
        self._tails = PartialBlockSwap(
            parts, tiers, link.loads, jobs, digest_bytes=len(link.none_hash)
        )
        self._loading = PrefixLoading(
            parts, tiers, loads, self._tails, jobs, num_spare_blocks=num_blocks // SPARE_PART
        )
        self.storing = BlockStoring(tiers, manager)
        self._to_discard: dict[OffloadKey, None] = {}
        self._pending: list[Command] = []
        self._adoption: TierAdoption | None = None
        self._adoption_s = settings.adoption_s
        self._num_adopted = 0
        self._num_failed = 0
        self._last_failure = ""
        link.connect(self, self)
        link.on_hints, link.on_prefetch = self._follow_hints, self.prefetch
        self._finder = parts.finder

    # --- hooks of the manager

    def look_up(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """Return whether `request` must wait, because more of it is being loaded."""
        answer = self._loading.look_up(request, num_device_tokens, self._clock.now())
        self._recorder.record(LookedUp(request.request_id, num_device_tokens, answer))
        return answer

    def prefetch(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """Begin to load a prefix ahead of its requests; return whether it is being loaded."""
        answer = self._loading.prefetch(request, num_device_tokens, self._clock.now())
        self._recorder.record(LookedUp(request.request_id, num_device_tokens, answer))
        return answer

    def on_swap_out(
        self,
        request: Request,
        num_tokens: int,
        num_cached_tokens: int,
        block_ids: tuple[list[int], ...],
    ) -> None:
        """Store the blocks that only these tables hold, if the rule says so."""
        now_s = self._clock.now()
        store = self._tails.swap_out(request, num_tokens, num_cached_tokens, block_ids, now_s)
        if store is not None:
            self._pending.append(store)
        self._recorder.record(SwappedOut(request.request_id, num_tokens, num_cached_tokens))

    def on_request_finished(self, request_id: str) -> None:
        """Forget the request's wish."""
        self._loads.enter_call()
        try:
            self._loading.on_gone(request_id)
        finally:
            self._recorder.record(Gone(request_id, self._loads.leave_call()))

    def _follow_hints(self, request: Request) -> None:
        """Follow the hints of a request that ends, in every tier."""
        now_s = self._clock.now()
        for group, size in enumerate(self._link.block_sizes):
            num_blocks = request.num_tokens // size
            keys = self._finder.keys_of(request, group, range(num_blocks))
            for hint in request.hints:
                for tier in self.tiers:
                    tier.eviction.hint(keys, *blocks_in(hint, size, num_blocks), hint, now_s)

    # --- commands for all ranks

    @property
    def has_work(self) -> bool:
        """Whether `commands` would return some although no step has run."""
        return bool(
            self._pending
            or self.storing.may_store_more
            or self._to_discard
            or self.tiers.discards
            or self.tiers.has_spills
            or self._loading.has_work
        )

    def commands(
        self,
        taken: Sequence[Command],
        step: StepRequest | None = None,
        result: StepResult | None = None,
        *,
        is_confirmed: bool = True,
    ) -> list[Command]:
        """Return the commands to add to a message, after `taken`, the commands of the core.

        `step` and its `result` are passed if it was a step. Blocks that are labelled before their
        bytes are complete, as by per-request calls on their caller's word, are not `is_confirmed`:
        they are never stored.
        """
        now_s = self._clock.now()
        told, self._pending = self._pending, []
        self.follow(taken, is_confirmed=is_confirmed)
        if step is not None and result is not None:
            self._after_step(step, result, told, now_s)
        for command in taken:
            if isinstance(command, Label):
                told += self.storing.store(command.block_ids, now_s)
        if self.storing.may_store_more:
            told += self.storing.store_more(now_s)
        told += self._loading.advance(now_s)
        evicted = self._manager.take_commands()  # of blocks that loads have taken
        if evicted:
            self._recorder.record(Withdrawn((), evicted))
        self.follow(evicted)
        told += evicted
        told += self._announce(taken, result)
        spill = self.tiers.plan_spills(now_s)
        if spill is not None:
            for key in spill.keys:
                self._to_discard.pop(key, None)
        self._discard(told)
        if spill is not None:  # after discards, whose files make room
            packed = pack_keys(spill.keys, len(spill.keys[0]))
            told.append(Spill(spill.job_id, FILE_MEDIUM, spill.addresses, packed))
        self._emit()
        return told

    def on_ended(self, job: Job) -> bool:
        """Take the reports of all ranks; return whether it was a job of the tiers."""
        kind = self.tiers.transfers.kind_of(job.job_id)
        if kind is None:
            return False
        is_ok = not job.failures
        failed = set() if job.is_wholly_failed else job.block_ids
        if not is_ok:
            self._num_failed += 1
            self._last_failure = f"{kind.value}: " + "; ".join(
                f"rank {failure.rank}: {failure.detail}" for failure in job.failures
            )
            logger.warning("job %d of tiers failed: %s", job.job_id, self._last_failure)
        visible = self.tiers.end(job.job_id, is_ok, failed, job.lost_ids)
        match kind:
            case JobKind.STORE:
                self._tails.on_stored(job.job_id)
            case JobKind.FETCH:
                if job.has_unread:
                    self.tiers.disk_use.rest(self._last_failure, self._clock.now())
                self._loading.on_fetched(job.job_id)
            case JobKind.SPILL:
                self.storing.on_room()
            case JobKind.LOAD:
                self._loading.on_loaded(job.job_id, self._clock.now(), is_ok=is_ok)
        if len(visible):
            self._pending.append(SealSlots(HOST_MEDIUM, visible))
        self._emit()
        return True

    def open_transfer(self, job_id: int) -> tuple[JobKind, float] | None:
        """Return the kind of an open transfer and how many seconds it may take; None if the job is
        not one of the tiers."""
        kind = self.tiers.transfers.kind_of(job_id)
        return None if kind is None else (kind, self.tiers.options.deadlines.of(kind))

    def begin(self, question: LabelQuestion) -> list[Outgoing]:
        """Ask every rank for its tier contents from the previous epoch."""
        self._adoption = TierAdoption(self.tiers, question, self._adoption_s)
        return self._adoption.begin(self._clock.now())

    def on_labels(self, report: LabelReport) -> list[Outgoing]:
        """Take a rank's contents; request more."""
        if self._adoption is None:
            return []
        asked = self._adoption.on_report(report, self._clock.now())
        self._note_discards(self._adoption)
        self._emit()
        return asked

    def on_tick(self) -> list[Outgoing]:
        """Give up overdue jobs; repeat questions without an answer."""
        now_s = self._clock.now()
        asked: list[Outgoing] = []
        if self._adoption is not None:
            asked = self._adoption.on_tick(now_s)
            self._note_discards(self._adoption)
            if self._adoption.is_over:
                self._num_adopted += self._adoption.num_adopted
                self._adoption = None
        for late in self.tiers.expire(now_s):
            self._num_failed += 1
            self._last_failure = f"{late.kind.value} of {len(late.keys)} blocks takes too long"
            logger.warning("job %d of tiers is late: %s", late.job_id, self._last_failure)
            self._loading.on_overdue(late.job_id, now_s)
        self._loading.expire(now_s)
        self._tails.expire(now_s)
        self._emit()
        return asked

    def statistics(self) -> OffloadStatistics:
        return OffloadStatistics(
            self.tiers.statistics(),
            self._loading.num_waiting,
            self._loading.num_loaded_tokens,
            self._loading.num_fetched_tokens,
            self._loading.num_given_up,
            self._num_failed,
            self._last_failure,
            self._num_adopted,
            self._tails.num_swapped_out,
            self._tails.num_swapped_in,
            self._tails.num_saved_tokens,
        )

    def check(self) -> None:
        """Raise `InvariantError` if the state is inconsistent."""
        self.tiers.check()
        self._tails.check()

    # --- inside

    def _note_discards(self, adoption: TierAdoption) -> None:
        slots, keys = adoption.take_discards()
        self._to_discard.update(dict.fromkeys(keys))
        if len(slots):
            self._pending.append(Discard(HOST_MEDIUM, slots, b""))

    def follow(self, commands: Sequence[Command], *, is_confirmed: bool = True) -> None:
        """Follow the labels of blocks, and whether they are confirmed."""
        for command in commands:
            match command:
                case Label():
                    self.storing.on_labelled(command, is_confirmed=is_confirmed)
                case Unlabel():
                    self.storing.labels.withdraw(command.block_ids)
                case Copy():
                    ends = np.concatenate((command.sources, command.destinations))
                    self._tails.on_copies(ends)
                case Reset():
                    self.storing.labels.reset()
                    self.tiers.reset()
                    self._tails.clear()
                    self._loading.clear()
                    if self._adoption is not None:
                        self._adoption.forget()

    def _announce(self, taken: Sequence[Command], result: StepResult | None) -> list[Command]:
        """Make ranks wait before they write blocks without a label that a store still reads.

        Any other write is announced by the label's removal, or is not by a forward.
        """
        entered = [c.block_ids for c in taken if isinstance(c, BlockTablePatch)]
        if result is not None:
            entered.append(result.patches.block_ids)
        ids = self._tails.read_among(entered)
        ids = ids[~self.storing.labels.are_labelled(ids)]
        return [Unlabel(ids)] if len(ids) else []

    def _after_step(
        self, step: StepRequest, result: StepResult, told: list[Command], now_s: float
    ) -> None:
        """Touch the blocks that admitted requests hit or loaded."""
        names = [r.request_id for r in step.resumed] + [r.request_id for r in step.new]
        slots, hits = result.admitted_slots.tolist(), result.num_hit_tokens.tolist()
        for request_id, slot, num_hit_tokens in zip(names, slots, hits, strict=False):
            if slot != NO_SLOT:
                self._loading.on_admitted(self._manager.control.request(request_id), num_hit_tokens)
                if num_hit_tokens:
                    told += self.storing.restore(request_id, num_hit_tokens, now_s)

    def _discard(self, told: list[Command]) -> None:
        gone = self.tiers.discards.take()
        if len(gone.addresses):
            told.append(Discard(HOST_MEDIUM, gone.addresses, b""))
        self._to_discard.update(dict.fromkeys(gone.keys))
        if self._to_discard:
            keys = list(islice(self._to_discard, MAX_DISCARDED_KEYS))
            for key in keys:
                del self._to_discard[key]
            told.append(Discard(FILE_MEDIUM, EMPTY_INT32, pack_keys(keys, len(keys[0]))))

    def _emit(self) -> None:
        for event in self.tiers.take_events():
            for told in cache_events(event, self._link.block_sizes, self._link.none_hash):
                self._link.emit(told)
