"""Preemption by swap, on a real manager and a real tier: kept blocks, and their return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import InvariantError
from kvcache.coordinator.job_table import Job, JobTable
from kvcache.coordinator.offloading import Offloading
from kvcache.coordinator.partial_block_swap import MAX_HOST_SHARE
from kvcache.coordinator.parts import OffloadParts
from kvcache.coordinator.settings import OffloadSettings, SwapRule, SwapWhen
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.core import OffloadAnswer
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.keys import GROUP_BYTES, OffloadKey
from kvcache.offload.options import TierOptions
from kvcache.offload.registry import make_tier
from kvcache.offload.specs import HOST_MEDIUM
from kvcache.protocol.commands import Command, Load, Store, Unlabel
from kvcache.protocol.messages import FailedForward
from kvcache.protocol.step import NO_SLOT, Fork, StepResult
from kvcache.requests.request import Request
from tests.manager.managers_under_test import (
    CHUNKED,
    CHUNKED_HYBRID,
    FULL,
    HYBRID,
    THREE_KINDS,
    WINDOW,
    Shape,
    make_config,
    make_manager,
)
from tests.manager.steps import Engine, new, resume, row

SHAPES = (FULL, WINDOW, HYBRID, THREE_KINDS, CHUNKED, CHUNKED_HYBRID)
TOKENS = list(range(100, 140))
ALWAYS = SwapRule(SwapWhen.ALWAYS)


class Bench:
    """A manager with a host tier, an engine, and one rank that reports the ends of its copies.

    `device` and `host` are the rank's bytes: the writer, group and column of each block.
    """

    def __init__(
        self,
        shape: Shape = FULL,
        *,
        rule: SwapRule = ALWAYS,
        num_blocks: int = 64,
        num_host_blocks: int = 64,
        blocks_per_slot: int = 1,
        min_load_tokens: int = 1,
        **settings: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.manager = make_manager(shape, num_blocks, clock=self.clock, **settings)
        finder = TierHitFinder(
            make_config(shape, num_blocks), 4, use_eagle=settings.get("use_eagle", False)
        )
        host = TierOptions(HOST_MEDIUM, num_host_blocks, blocks_per_slot)
        parts = OffloadParts(
            OffloadSettings(min_load_tokens, swap=rule),
            finder,
            lambda new_job_id: TierHierarchy(make_tier(host), None, new_job_id),
        )
        self.jobs = JobTable(1)
        self.offloading = Offloading(parts, self.manager, self.jobs, self.clock)
        self.engine = Engine(self.manager)
        self.device: dict[int, tuple[str, int, int]] = {}
        self.host: dict[int, tuple[str, int, int]] = {}
        self.running: list[Store | Load] = []
        self.told: list[Command] = []

    def step(self, *rows: Any, **rest: Any) -> StepResult:
        """Serve a step and send its commands; its forward writes nothing by itself."""
        request = self.engine.request(*rows, **rest)
        result = self.manager.step(request)
        self.engine.next_step += 1
        self.send(self.offloading.commands(self.manager.take_commands(), request, result))
        return result

    def send(self, told: list[Command]) -> None:
        self.told = told
        self.running += [c for c in told if isinstance(c, (Store, Load))]
        for job in (c for c in told if isinstance(c, Store)):
            for block, slot in zip(job.sources.tolist(), job.destinations.tolist(), strict=True):
                self.host[slot] = self.device.get(block, ("unwritten", 0, 0))
        self.manager.check()
        self.offloading.check()

    def write(self, name: str) -> None:
        """Let the forwards of a request write all blocks of its tables."""
        for group, table in enumerate(self.manager.get_block_ids(name)):
            for column, block in enumerate(table):
                self.device[block] = (name, group, column)

    def end_jobs(self, *, ok: bool = True) -> None:
        """Let every copy end, and send the consequences."""
        ended, self.running = self.running, []
        for job in ended:
            failures = [] if ok else [FailedForward(0, 0, "no")]
            if isinstance(job, Load) and ok:
                pairs = zip(job.sources.tolist(), job.destinations.tolist(), strict=True)
                self.device.update({block: self.host[slot] for slot, block in pairs})
            self.offloading.on_ended(Job(job.job_id, failures=failures))
        self.send(self.offloading.commands(self.manager.take_commands()))

    def run(self, name: str = "r", tokens: Sequence[int] = TOKENS[:30], **rest: Any) -> int:
        """Admit a request, compute all of it, and complete the step."""
        result = self.step(new=(new(name, tokens, **rest),))
        self.write(name)
        self.step(completed_step=self.engine.next_step - 1)
        return int(result.admitted_slots[0])

    def decode(self, slot: int, count: int = 1) -> None:
        """Append tokens to a row, one by one, each step completed before the next."""
        for _ in range(count):
            self.step(row(slot, [7]), completed_step=self.engine.next_step - 1)

    def preempt(self, name: str = "r", **rest: Any) -> list[Store]:
        """Preempt by swap after complete steps; return the stores of unhashed blocks."""
        how = {"completed_step": self.engine.next_step - 1, "preempted_swap": (name,), **rest}
        self.step(**how)
        private = self.offloading._tails._being_read
        return [c for c in self.told if isinstance(c, Store) and c.job_id in private]

    def resume(self, name: str = "r", num_tries: int = 4) -> int | None:
        """Resume a request as often as it must wait; return its hit, None without room."""
        for _ in range(num_tries):
            done = self.engine.next_step - 1
            result = self.step(resumed=(resume(name),), completed_step=done)
            if result.admitted_slots[0] != NO_SLOT:
                return int(result.num_hit_tokens[0])
            if result.no_room:
                return None
            self.end_jobs()
        raise AssertionError(f"{name} waits forever: {self.offloading.statistics()}")

    def wait_for_load(self, name: str = "r") -> None:
        """Resume a request until a load for it runs."""
        while not any(isinstance(job, Load) for job in self.running):
            done = self.engine.next_step - 1
            result = self.step(resumed=(resume(name),), completed_step=done)
            assert result.waiting_for_load == (name,)

    @property
    def num_tail_blocks(self) -> int:
        """Blocks in host memory without a content hash."""
        return len(self._tail_keys())

    def forget_tails(self) -> None:
        """Drop them, as for other content that needs the room."""
        self.offloading.tiers.forget(self._tail_keys())

    def _tail_keys(self) -> list[OffloadKey]:
        content = len(self.manager.tiers.none_hash) + GROUP_BYTES
        keys = self.offloading.tiers.host.slots.present_keys()
        return [key for key in keys if len(key) != content]


def swapped(**options: Any) -> Bench:
    """A bench whose request of 30 tokens was preempted, with its tail in host memory."""
    bench = Bench(**options)
    bench.run()
    bench.preempt()
    bench.end_jobs()
    return bench


@pytest.mark.parametrize("is_evicted", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_request_goes_on_where_it_was_with_its_own_blocks(shape: Shape, is_evicted: bool) -> None:
    bench = Bench(shape)
    slot = bench.run(tokens=TOKENS[:29])
    bench.decode(slot, 6)  # the last of 35 tokens is always computed again
    bench.write("r")
    assert len(bench.preempt()) == 1
    bench.end_jobs()
    assert not any(bench.manager.get_block_ids("r"))
    if is_evicted:
        bench.manager.evict_blocks(range(1, 64))
    assert bench.resume() == 34
    for group, table in enumerate(bench.manager.get_block_ids("r")):
        kept = {column: bench.device[block] for column, block in enumerate(table) if block}
        size = shape.groups[group].block_size
        assert all(kept[c] == ("r", group, c) for c in kept if c * size < 34)
        assert max(kept) >= 34 // size
    statistics = bench.offloading.statistics()
    assert (statistics.num_swapped_out, statistics.num_swapped_in) == (1, 1)
    assert statistics.num_swap_saved_tokens == 34 % max(g.block_size for g in shape.groups)
    assert bench.num_tail_blocks == 0
    bench.step(finished=("r",), completed_step=bench.engine.next_step - 1)
    bench.step(completed_step=bench.engine.next_step - 1)
    core_figures = bench.manager.statistics().core
    assert core_figures.num_free_blocks == core_figures.num_blocks


@pytest.mark.parametrize(("shape", "num_read"), [(FULL, (8,)), (HYBRID, (8, 3))])
def test_of_a_request_without_hashes_all_is_kept_that_is_read(
    shape: Shape, num_read: tuple[int, ...]
) -> None:
    bench = Bench(shape, num_host_blocks=128)
    bench.run(tokens=TOKENS[:30], delay_cache_blocks=True)
    (store,) = bench.preempt()
    assert len(store.sources) == sum(num_read)
    bench.end_jobs()
    assert bench.resume() == 29  # the last token is always computed
    for group, table in enumerate(bench.manager.get_block_ids("r")):
        first = 8 - num_read[group]
        assert table[:first] == [0] * first
        written = [bench.device[block] for block in table[first:]]
        assert written == [("r", group, column) for column in range(first, 8)]
    assert bench.offloading.statistics().num_swap_saved_tokens == 29


def test_a_tail_is_worth_waiting_for_however_short_it_is() -> None:
    bench = swapped(min_load_tokens=16)
    assert bench.resume() == 29


def test_a_tail_is_for_its_request_only() -> None:
    bench = swapped()
    other = Request("r", TOKENS[:30])
    bench.manager.get_computed_blocks(other)  # it has a hasher now
    assert bench.offloading.look_up(other, 28).answer is OffloadAnswer.MISS


def test_where_the_tail_is_gone_what_has_a_hash_is_loaded_alone() -> None:
    bench = swapped()
    bench.manager.evict_blocks(range(1, 64))
    bench.engine.step(resumed=(resume("r"),), completed_step=bench.engine.next_step - 1)
    bench.forget_tails()  # between the look-up, which has found it, and the load
    bench.send(bench.offloading.commands(bench.manager.take_commands()))
    assert bench.resume() == 28


def test_a_tail_that_finds_room_for_a_part_is_not_kept_at_all() -> None:
    bench = Bench(num_host_blocks=16)
    bench.run("other", list(range(60)))
    assert len(bench.running) == 1  # fifteen blocks of sixteen are being written
    bench.run(tokens=TOKENS[:6], delay_cache_blocks=True)
    num_jobs = len(bench.jobs)
    assert bench.preempt() == []
    assert len(bench.jobs) == num_jobs
    assert len(bench.offloading.tiers.transfers) == len(bench.running)
    assert bench.num_tail_blocks == 0


def test_whatever_takes_less_time_is_done() -> None:
    rule = SwapRule(
        SwapWhen.AUTO,
        prefill_tokens_per_s=100.0,
        transfer_bytes_per_s=1000.0,
        block_bytes=50,
    )
    assert rule.is_cheaper(num_tokens=11, num_blocks=1)  # 0.11 s against 0.1 s
    assert not rule.is_cheaper(num_tokens=10, num_blocks=1)
    assert not rule.is_cheaper(num_tokens=15, num_blocks=2)
    for when, is_swapped in ((SwapWhen.NEVER, False), (SwapWhen.AUTO, False), (ALWAYS.when, True)):
        bench = Bench(rule=SwapRule(when, block_bytes=10**9))
        bench.run()
        assert bool(bench.preempt()) is is_swapped
        bench.end_jobs()
        assert bench.resume() == (29 if is_swapped else 28)


def test_who_is_preempted_to_be_recomputed_or_reads_no_cache_is_not_swapped() -> None:
    bench = Bench()
    bench.run()
    assert bench.preempt("r", preempted_swap=(), preempted_recompute=("r",)) == []
    bench.run("all", TOKENS[10:33], skip_reading_prefix_cache=True)
    assert bench.preempt("all") == []
    assert bench.num_tail_blocks == 0


def test_with_a_draft_model_nothing_is_swapped() -> None:
    bench = Bench(use_eagle=True)
    bench.run()
    assert bench.preempt() == []


def test_only_tokens_of_complete_steps_are_kept() -> None:
    bench = Bench()
    slot = bench.run(tokens=TOKENS[:28])
    bench.decode(slot)
    done = bench.engine.next_step - 1  # with it 29 tokens are computed
    bench.step(row(slot, [7]), completed_step=done)
    bench.step(row(slot, [7]), completed_step=done)
    assert len(bench.preempt(completed_step=done)) == 1
    bench.end_jobs()
    assert bench.resume() == 29


def test_of_a_request_that_is_new_in_a_step_under_way_nothing_is_kept() -> None:
    bench = Bench()
    bench.step(new=(new("r", TOKENS[:30]),))
    assert bench.preempt(completed_step=-1) == []


def test_a_failed_step_takes_tokens_back_but_not_the_tail() -> None:
    bench = Bench()
    slot = bench.run(tokens=TOKENS[:29])
    bench.step(row(slot, [7]), completed_step=bench.engine.next_step - 1)
    failing = bench.engine.next_step - 1
    bench.step(row(slot, [7]), completed_step=failing - 1)
    assert len(bench.preempt(completed_step=failing - 1)) == 1
    bench.end_jobs()
    bench.step(failed_step=failing, completed_step=failing - 1)
    request = bench.manager.get_request("r")
    assert request.num_tokens == 29
    # Its last token is computed in any case: there is no use in the tail.
    result = bench.step(resumed=(resume("r"),))
    assert result.num_hit_tokens.tolist() == [28]
    assert bench.num_tail_blocks == 0


@pytest.mark.parametrize("what_fails", ["store", "load", "content", "time"])
def test_what_cannot_come_back_is_computed_again(what_fails: str) -> None:
    bench = Bench(rule=SwapRule(SwapWhen.ALWAYS, hold_s=60.0))
    bench.run()
    bench.preempt()
    bench.end_jobs(ok=what_fails != "store")
    if what_fails == "content":
        bench.forget_tails()
    if what_fails == "time":
        bench.clock.advance(61.0)
        bench.offloading.on_tick()
        assert bench.num_tail_blocks == 0
    if what_fails == "load":
        bench.wait_for_load()
        bench.end_jobs(ok=False)
    assert bench.resume() == 28
    assert bench.offloading.statistics().num_swapped_in == 0
    assert bench.num_tail_blocks == 0


def test_a_store_that_ends_late_brings_nothing_back() -> None:
    bench = Bench()
    bench.run()
    bench.end_jobs()
    bench.preempt()
    bench.clock.advance(31.0)
    bench.offloading.on_tick()
    result = bench.step(resumed=(resume("r"),), completed_step=bench.engine.next_step - 1)
    assert result.num_hit_tokens.tolist() == [28]
    bench.end_jobs()
    assert bench.num_tail_blocks == 0
    bench.offloading.check()


@pytest.mark.parametrize("how", ["finish", "client", "reset"])
def test_a_request_that_ends_leaves_nothing_in_host_memory(how: str) -> None:
    bench = swapped()
    assert bench.num_tail_blocks == 1
    if how == "finish":
        bench.step(finished=("r",))
    elif how == "client":
        bench.manager.release_client(bench.engine.client_id)
    else:
        assert bench.manager.reset_prefix_cache()
        bench.send(bench.offloading.commands(bench.manager.take_commands()))
    assert bench.num_tail_blocks == 0
    if how == "reset":
        assert len(bench.offloading._tails) == 0
        result = bench.step(resumed=(resume("r"),))
        assert result.num_hit_tokens.tolist() == [0]


def test_a_tail_that_is_being_loaded_when_its_request_finishes_goes_when_the_load_ends() -> None:
    bench = swapped()
    bench.wait_for_load()
    bench.step(finished=("r",))
    bench.end_jobs()
    assert bench.num_tail_blocks == 0
    assert len(bench.manager.tiers.loads) == 0
    assert len(bench.offloading.tiers.transfers) == 0


def test_a_tail_whose_request_has_ended_does_not_count() -> None:
    bench = swapped()
    bench.wait_for_load()
    bench.end_jobs()
    assert len(bench.manager.tiers.loads) == 1
    bench.step(finished=("r",))
    assert len(bench.manager.tiers.loads) == 0
    assert bench.offloading.statistics().num_swapped_in == 0


@pytest.mark.parametrize("ok", [True, False], ids=["stored", "failed"])
@pytest.mark.parametrize(("blocks_per_slot", "num_tokens"), [(1, 6), (4, 3)])
def test_no_more_than_a_share_of_host_memory_holds_tails_and_failed_stores_none(
    blocks_per_slot: int, num_tokens: int, ok: bool
) -> None:
    slots = 4 * MAX_HOST_SHARE
    bench = Bench(num_blocks=128, num_host_blocks=slots, blocks_per_slot=blocks_per_slot)
    for number in range(6):
        bench.run(f"r{number}", [number, *TOKENS[: num_tokens - 1]])
        assert len(bench.preempt(f"r{number}")) == int(not ok or number < 4)
        bench.end_jobs(ok=ok)
    assert bench.num_tail_blocks == (4 if ok else 0)
    assert bench.offloading.statistics().num_swapped_out == (4 if ok else 6)


def test_two_tails_that_keep_each_other_out_are_given_up() -> None:
    bench = Bench(num_blocks=17, num_host_blocks=128)
    for name, first in (("a", 0), ("c", 5000)):
        bench.step(new=(new(name, range(first, first + 60), 29),))
        bench.write(name)
        bench.step(completed_step=bench.engine.next_step - 1)
    bench.end_jobs()
    bench.step(completed_step=bench.engine.next_step - 1, preempted_swap=("a", "c"))
    bench.end_jobs()
    assert len(bench.offloading._tails) == 2
    for _ in range(20):
        wanted = (resume("a", 8), resume("c", 8))
        result = bench.step(resumed=wanted, completed_step=bench.engine.next_step - 1)
        if (result.admitted_slots != NO_SLOT).any():
            return
        bench.end_jobs()
        bench.clock.advance(1.0)
        bench.offloading.on_tick()
    pytest.fail("neither was let in")


def test_blocks_that_wait_to_be_copied_are_not_stored() -> None:
    bench = Bench()
    slot = bench.run(tokens=TOKENS[:30])
    done = bench.engine.next_step - 1
    bench.step(forks=(Fork("r", "child"),), completed_step=done)
    bench.decode(slot)  # a block of its own, with a copy that this step's forward begins with
    under_way = bench.engine.next_step - 1
    assert bench.preempt(completed_step=under_way - 1) == []
    bench.resume()
    bench.decode(int(bench.manager.slot_of("r") or 0))
    assert len(bench.preempt()) == 1  # the copy is made


def test_ranks_wait_before_a_block_that_is_still_stored_is_written() -> None:
    bench = Bench(num_blocks=20)
    bench.run(tokens=TOKENS[:30])
    bench.end_jobs()
    (store,) = bench.preempt(new=(new("other", TOKENS[20:23]),))
    taken = bench.manager.get_block_ids("other")[0]
    assert taken == store.sources.tolist()  # a block without content goes first
    unlabels = [c.block_ids.tolist() for c in bench.told if isinstance(c, Unlabel)]
    assert unlabels == [taken]
    assert bench.told.index(store) < next(
        i for i, c in enumerate(bench.told) if isinstance(c, Unlabel)
    )
    bench.end_jobs()
    bench.step(finished=("other",))
    bench.step(new=(new("third", TOKENS[22:25]),))
    assert bench.manager.get_block_ids("third")[0] == taken
    assert not [c for c in bench.told if isinstance(c, Unlabel)]


def test_a_tail_without_a_request_is_noticed() -> None:
    bench = swapped()
    bench.offloading._tails._tails.clear()
    with pytest.raises(InvariantError, match="1 of them of none of the 0 requests"):
        bench.offloading.check()
