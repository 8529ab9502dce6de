"""The cache as a whole: pins and their time, resets, drains, eviction by hand, events."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from kvcache.base.arrays import Int32Array
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import BlockError, PinLimitError, RequestError
from kvcache.core import (
    AllBlocksCleared,
    BlocksStored,
    CacheEvent,
    OffloadAnswer,
    OffloadHit,
    OffloadHooks,
)
from kvcache.core.eviction import PolicyOrder
from kvcache.manager import KVCacheManager
from kvcache.protocol.commands import Reset
from kvcache.requests.request import Request
from tests.manager.managers_under_test import FULL, HYBRID, Shape, make_manager
from tests.manager.steps import Engine, new, resume, row


def cache(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    """Leave the full blocks of a finished request in the cache."""
    request = Request(name, tokens, model_epoch=manager.model_epoch)
    found, num_hit = manager.get_computed_blocks(request)
    blocks = manager.allocate_slots(request, len(tokens) - num_hit, num_hit, found)
    assert blocks is not None
    manager.free(request)


def hit(manager: KVCacheManager, tokens: list[int]) -> int:
    probe = Request("probe", [*tokens, 0], model_epoch=manager.model_epoch)
    return manager.get_computed_blocks(probe)[1]


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda s: s.name)
def test_a_pinned_prefix_survives_pressure_until_its_time_is_over(shape: Shape) -> None:
    clock = VirtualClock()
    manager = make_manager(shape, num_blocks=33, clock=clock)
    prefix = list(range(16))
    cache(manager, "a", prefix)
    pin = manager.pin_prefix(prefix, ttl_s=10.0)
    assert (pin.num_tokens, pin.expires_at_s) == (16, 10.0)
    for i in range(20):
        cache(manager, f"b{i}", [100 + i] * 24)
    assert hit(manager, prefix) == 16
    clock.advance(9.5)
    assert hit(manager, prefix) == 16
    assert manager.statistics().num_pins == 1
    clock.advance(0.5)
    manager.step(Engine(manager).request())
    assert manager.statistics().num_pins == 0
    assert manager.usage == 0.0
    for i in range(20):
        cache(manager, f"c{i}", [200 + i] * 24)
    assert hit(manager, prefix) == 0
    assert manager.unpin_prefix(pin) is False
    manager.check()


def test_unpinning_ends_a_pin_once() -> None:
    manager = make_manager()
    cache(manager, "a", [1] * 9)
    first, second = (manager.pin_prefix([1] * 9, 5.0) for _ in range(2))
    assert (first.num_tokens, first.num_blocks) == (8, 2)
    assert manager.unpin_prefix(first) is True
    assert manager.unpin_prefix(first) is False
    assert manager.statistics().core.num_pinned_blocks == 2
    assert manager.unpin_prefix(second) is True
    assert manager.statistics().core.num_pinned_blocks == 0
    manager.check()


def test_pins_beyond_their_share_are_refused_with_numbers() -> None:
    manager = make_manager(num_blocks=21, max_pin_share=0.25)
    cache(manager, "a", [1] * 12)
    cache(manager, "b", [2] * 12)
    manager.pin_prefix([1] * 12, 5.0)
    manager.pin_prefix([1] * 12, 5.0)
    before = manager.dump_state()
    with pytest.raises(PinLimitError) as raised:
        manager.pin_prefix([2] * 12, 5.0)
    assert str(raised.value) == (
        "pinning 12 tokens needs 3 more blocks, 3 of at most 5 are pinned: unpin a prefix, wait "
        "until one runs out, or raise max_pin_share"
    )
    assert manager.dump_state() == before


def test_only_what_is_cached_is_pinned() -> None:
    manager = make_manager()
    cache(manager, "a", [1] * 9)
    assert manager.pin_prefix([1] * 9 + [2] * 9, 5.0).num_tokens == 8
    assert manager.pin_prefix([3] * 9, 5.0).num_tokens == 0
    assert manager.pin_prefix([1] * 9, 5.0, cache_salt="salt").num_tokens == 0
    manager.check()


def test_a_reset_is_refused_while_blocks_are_in_use(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(log_stats=True)
    engine = Engine(manager)
    cache(manager, "a", [1] * 9)
    engine.step(new=(new("r1", [1] * 9),))
    with caplog.at_level(logging.WARNING):
        assert manager.reset_prefix_cache() is False
    assert caplog.messages == [
        "the prefix cache is not reset: 3 blocks are in use by running requests (1): let them end, "
        "or reset with drain=True"
    ]
    assert manager.statistics().num_blocks_refusing_reset == 3
    assert hit(manager, [1] * 8) == 8
    engine.step(finished=("r1",))
    manager.make_prefix_cache_stats()
    assert manager.reset_prefix_cache() is True
    assert hit(manager, [1] * 8) == 0
    assert manager.model_epoch == 0
    stats = manager.make_prefix_cache_stats()
    assert stats is not None and stats.reset
    assert Reset(0) in manager.take_commands()


def test_a_refused_reset_names_pins_holds_loads_and_copies_that_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = make_manager(has_workers=True)
    parent = Request("parent", list(range(6)))
    manager.allocate_slots(parent, 6)
    parent.num_computed_tokens = 6
    child = Request("child", [*range(6), 7])
    manager.take_commands()
    manager.fork(parent, child)
    manager.allocate_slots(child, 1)  # copies the last block, and both go before that is done
    manager.free(parent)
    manager.free(child)
    assert not manager.reset_prefix_cache()
    manager.pin_prefix([*range(4)], 5.0)
    manager.holds.hold("client", [new("back", [*range(5)])])
    manager.tiers.loads.begin(Request("waiting", [9] * 9), 8)
    assert not manager.reset_prefix_cache()
    copies = "copies for forks that wait for the next step (2)"
    assert [message.split(" by ")[1] for message in caplog.messages] == [
        f"{copies}: let them end, or reset with drain=True",
        "pins (1), loads from tiers (1), prefixes held for clients that come back (1), "
        f"{copies}: let them end, or reset with drain=True",
    ]


def test_a_drain_ends_hits_at_once_and_the_epoch_when_the_last_block_is_free() -> None:
    manager = make_manager(enable_kv_cache_events=True)
    engine = Engine(manager)
    cache(manager, "a", [1] * 9)
    pin = manager.pin_prefix([1] * 8, 1000.0)
    engine.step(new=(new("r1", [1] * 9), new("r2", [2] * 9)))
    engine.step(preempted_recompute=("r2",), completed_step=1)
    assert manager.reset_prefix_cache(drain=True) is False
    assert manager.is_draining
    assert manager.unpin_prefix(pin) is False
    assert hit(manager, [1] * 8) == 0
    engine.step(row(0, [5]), completed_step=2)
    assert manager.model_epoch == 0
    manager.take_events()
    engine.step(finished=("r1",), completed_step=3)
    assert not manager.is_draining
    assert manager.model_epoch == 1
    assert manager.take_events() == [AllBlocksCleared()]
    assert Reset(1) in manager.take_commands()
    result = engine.step(resumed=(resume("r2"),), completed_step=4)
    assert result.num_hit_tokens.tolist() == [0]
    held = manager.get_request("r2")
    assert (held.namespace.model_epoch, held.num_preemptions) == (1, 1)
    assert hit(manager, [2] * 8) == 0
    engine.step(completed_step=5)
    assert hit(manager, [2] * 8) == 8


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda s: s.name)
def test_new_weights_empty_the_cache_at_once_and_no_request_has_to_end(shape: Shape) -> None:
    manager = make_manager(shape, has_workers=True, enable_kv_cache_events=True)
    engine = Engine(manager)
    tokens = list(range(24))
    cache(manager, "cached", [100 + i for i in range(16)])
    manager.pin_prefix([100 + i for i in range(16)], ttl_s=1e9)
    slot = int(engine.step(new=(new("runs", tokens),)).admitted_slots[0])
    held = manager.get_block_ids("runs")
    manager.take_commands(), manager.take_events()
    assert manager.begin_model_epoch() == manager.model_epoch == 1
    assert manager.take_commands()[-1] == Reset(1)
    assert AllBlocksCleared() in manager.take_events()
    assert manager.statistics().num_pins == manager.statistics().core.num_cached_blocks == 0
    assert manager.get_block_ids("runs") == held
    assert hit(manager, [100 + i for i in range(16)]) == hit(manager, tokens) == 0
    # The old request fills blocks, the new one caches its own, in the same step.
    rows = [row(slot, [5 + i for i in range(16)], 16)]
    engine.step(*rows, new=(new("later", tokens),), completed_step=1)
    engine.step(finished=("runs", "later"), completed_step=2)
    assert hit(manager, tokens) == 24
    assert hit(manager, [*tokens, *range(5, 21)]) == 24
    manager.check()


@pytest.mark.parametrize("is_preempted_before", [True, False])
def test_a_request_that_is_resumed_with_new_weights_is_computed_again(
    is_preempted_before: bool,
) -> None:
    manager = make_manager(FULL)
    engine = Engine(manager)
    tokens = list(range(24))
    engine.step(new=(new("a", tokens),))
    if is_preempted_before:
        engine.step(preempted_recompute=("a",), completed_step=1)
    manager.begin_model_epoch()
    if not is_preempted_before:
        engine.step(preempted_recompute=("a",), completed_step=1)
    result = engine.step(resumed=(resume("a"),))
    assert (result.num_hit_tokens.tolist(), result.num_scheduled_tokens.tolist()) == ([0], [24])
    request = manager.get_request("a")
    assert (request.namespace.model_epoch, request.num_preemptions) == (1, 1)
    engine.step(completed_step=3)
    assert hit(manager, tokens) == 24


def test_a_hit_from_before_a_drain_is_refused() -> None:
    manager = make_manager(FULL)
    manager.allocate_slots(Request("runs", [1] * 13), 13)
    request = Request("a", [1] * 13)
    blocks, num_tokens = manager.get_computed_blocks(request)
    assert num_tokens == 12
    assert not manager.reset_prefix_cache(drain=True)
    with pytest.raises(RequestError, match="the cache has changed"):
        manager.allocate_slots(request, 1, num_tokens, blocks)
    assert manager.get_block_ids("a") == ([],)
    manager.check()


def test_new_weights_end_a_drain() -> None:
    manager = make_manager(FULL)
    engine = Engine(manager)
    engine.step(new=(new("a", list(range(24))),))
    assert manager.reset_prefix_cache(drain=True) is False
    assert manager.begin_model_epoch() == 1
    assert not manager.is_draining
    engine.step(finished=("a",), completed_step=1)
    assert manager.model_epoch == 1
    cache(manager, "b", list(range(24)))
    assert hit(manager, list(range(24))) == 24


def test_a_drain_of_an_idle_cache_is_done_at_once() -> None:
    manager = make_manager()
    cache(manager, "a", [1] * 9)
    assert manager.reset_prefix_cache(drain=True) is True
    assert (manager.model_epoch, manager.is_draining) == (1, False)
    assert hit(manager, [1] * 8) == 0
    cache(manager, "b", [1] * 9)
    assert hit(manager, [1] * 8) == 8


def test_evicting_a_block_forgets_what_continues_it() -> None:
    manager = make_manager()
    request = Request("a", [1] * 13)
    manager.allocate_slots(request, 13)
    second = manager.get_block_ids("a")[0][1]
    manager.evict_blocks([second])
    assert hit(manager, [1] * 12) == 4
    with pytest.raises(BlockError):
        manager.evict_blocks([64])
    manager.check()


def test_events_are_kept_only_when_asked_for() -> None:
    silent, loud = make_manager(), make_manager(enable_kv_cache_events=True)
    for manager in (silent, loud):
        cache(manager, "a", [1] * 9)
    assert silent.take_events() == []
    (event,) = loud.take_events()
    assert isinstance(event, BlocksStored)
    assert len(event.digests) == 2
    assert loud.take_events() == []


class SlowTiers(OffloadHooks):
    """Tiers whose answer is set by the test."""

    def __init__(self) -> None:
        self.answer = OffloadAnswer.RETRY
        self.finished: list[str] = []

    def look_up(self, request: Request, num_device_tokens: int) -> OffloadHit:
        return OffloadHit(self.answer, 4)

    def on_request_finished(self, request_id: str) -> None:
        self.finished.append(request_id)


def test_a_sink_that_raises_misses_events_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        def emit(self, event: object) -> None:
            raise RuntimeError("no room for events")

    def played(**options: object) -> tuple[KVCacheManager, list[CacheEvent]]:
        manager = make_manager(FULL, num_blocks=9, enable_kv_cache_events=True, **options)
        for i in range(6):
            cache(manager, f"r{i}", [i] * 24)
            manager.check()
        manager.reset_prefix_cache()
        return manager, manager.take_events()

    (whole, expected), (broken, events) = played(), played(event_sink=Broken())
    assert broken.dump_state() == whole.dump_state()
    assert list(map(type, events)) == list(map(type, expected))
    lines = [record for record in caplog.records if "the event sink raised" in record.message]
    assert 1 <= len(lines) < len(events)
    assert lines[0].exc_info is not None


class BrokenTiers:
    """Tiers whose hooks all raise, or return invalid answers."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer

    def look_up(self, request: Request, num_device_tokens: int) -> Any:
        if self.answer is None:
            raise RuntimeError("no look-ups")
        return self.answer

    def on_eviction_candidates(self, group: int, block_ids: object) -> None:
        raise RuntimeError("no evictions")

    def on_sealed(self, group: int, block_ids: object) -> None:
        raise RuntimeError("no seals")

    def on_request_finished(self, request_id: str) -> None:
        raise RuntimeError("no ends")


@pytest.mark.parametrize("answer", [None, "a hit", OffloadHit("hit")], ids=repr)  # type: ignore[arg-type]
def test_hooks_that_raise_or_answer_nonsense_change_nothing(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    def played(hooks: Any) -> KVCacheManager:
        manager = make_manager(FULL, num_blocks=9, offload_hooks=hooks)
        engine = Engine(manager)
        for i in range(6):
            assert len(engine.step(new=(new(f"r{i}", [i] * 24),)).admitted_slots) == 1
            engine.step(finished=(f"r{i}",), completed_step=2 * i)
            manager.check()
        return manager

    assert played(BrokenTiers(answer)).dump_state() == played(None).dump_state()
    told = " ".join(caplog.messages)
    for words in (
        "look-up is a miss",
        "on_request_finished",
        "offload_hooks raised, error 1 of it",
    ):
        assert words in told
    assert len(caplog.records) < 12


def test_requests_wait_for_the_tiers_below_and_leave_no_trace() -> None:
    tiers = SlowTiers()
    manager = make_manager(offload_hooks=tiers)
    engine = Engine(manager)
    result = engine.step(new=(new("r1", [1] * 9),))
    assert (result.retry_later, result.admitted_slots.tolist()) == (("r1",), [-1])
    tiers.answer = OffloadAnswer.HIT_PENDING
    result = engine.step(new=(new("r1", [1] * 9),))
    assert (result.waiting_for_load, result.admitted_slots.tolist()) == (("r1",), [-1])
    assert manager.get_request("r1") is None
    tiers.answer = OffloadAnswer.MISS
    assert engine.step(new=(new("r1", [1] * 9),)).admitted_slots.tolist() == [0]
    engine.step(finished=("r1",))
    assert tiers.finished == ["r1"]


def test_without_workers_and_events_nothing_waits_to_be_taken() -> None:
    manager = make_manager(FULL, has_workers=False)
    engine = Engine(manager)
    for number in range(3):
        engine.step(new=(new(f"r{number}", range(9)),))
        engine.step(finished=(f"r{number}",), completed_step=2 * number + 1)
        assert manager.reset_prefix_cache()
    assert manager.take_commands() == []
    assert manager.take_events() == []


class Candidates(OffloadHooks):
    """Remembers the blocks that it was offered."""

    def __init__(self) -> None:
        self.offered: set[tuple[int, int]] = set()

    def look_up(self, request: Request, num_device_tokens: int) -> OffloadHit:
        return OffloadHit(OffloadAnswer.MISS)

    def on_eviction_candidates(self, group: int, block_ids: Int32Array) -> None:
        self.offered |= {(block, group) for block in block_ids.tolist()}


def sealed(manager: KVCacheManager) -> set[tuple[int, int, bytes]]:
    contents = manager.sealed_contents()
    size = len(contents.digests) // max(1, len(contents.block_ids))
    digests = [contents.digests[i * size : (i + 1) * size] for i in range(len(contents.block_ids))]
    return set(zip(contents.block_ids.tolist(), contents.groups.tolist(), digests, strict=True))


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_hooks_are_offered_each_sealed_block_before_it_is_evicted(policy: str) -> None:
    rng, hooks, num_lost = random.Random(5), Candidates(), 0
    manager = make_manager(HYBRID, num_blocks=40, offload_hooks=hooks, eviction_policy=policy)
    for i in range(80):
        before = sealed(manager)
        hooks.offered.clear()
        cache(manager, f"r{i}", [rng.randrange(4)] * 8 + [i] * rng.randrange(4, 40))
        lost = {(block, group) for block, group, _ in before - sealed(manager)}
        # A policy may choose a block that must stay, as others continue it.
        assert lost == hooks.offered if policy == "lru" else lost <= hooks.offered
        num_lost += len(lost)
    assert num_lost > 50


def test_hooks_are_not_offered_what_no_forward_has_computed() -> None:
    hooks = Candidates()
    manager = make_manager(FULL, num_blocks=9, offload_hooks=hooks)
    engine = Engine(manager)
    for i in range(8):
        engine.step(new=(new(f"r{i}", [i] * 24),))
        engine.step(finished=(f"r{i}",))
    assert manager.statistics().core.num_evictions > 8
    assert not hooks.offered


def test_an_error_of_an_eviction_in_the_middle_of_a_step_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled code asks the policy, and no error can pass it."""
    manager = make_manager(num_blocks=9, eviction_policy="arc")
    engine = Engine(manager)
    engine.step(new=(new("a", range(16)),))
    engine.step(finished=("a",), completed_step=1)

    def fail(*_: object) -> None:
        raise OSError("no such file")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="no such file"):
        broken.setattr(PolicyOrder, "_evict", fail)
        engine.step(new=(new("b", range(100, 132)),), completed_step=2)
