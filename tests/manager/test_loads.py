"""External prefixes: blocks for them, hittable when their bytes are complete."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvcache.base.errors import RequestError
from kvcache.core import Reservation
from kvcache.manager import KVCacheManager
from kvcache.protocol.commands import Copy, Label
from kvcache.requests.request import Request
from tests.audits import Audits
from tests.manager.managers_under_test import (
    CHUNKED,
    CHUNKED_HYBRID,
    FULL,
    HYBRID,
    STATES,
    STATES_HYBRID,
    THREE_KINDS,
    WINDOW,
    Shape,
    make_manager,
)
from tests.manager.steps import Engine, new

SHAPES = (FULL, WINDOW, HYBRID, THREE_KINDS, CHUNKED, CHUNKED_HYBRID, STATES, STATES_HYBRID)
TOKENS = list(range(100, 149))


def request_of(tokens: list[int], name: str = "asks") -> Request:
    return Request(name, tokens)


def labels(manager: KVCacheManager) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Block, group, digest and parent of every label among the commands."""
    for command in manager.take_commands():
        if isinstance(command, Label):
            count = len(command.block_ids)
            for i in range(count):
                size = len(command.digests) // count
                yield (
                    int(command.block_ids[i]),
                    int(command.groups[i]),
                    command.digests[i * size : (i + 1) * size],
                    command.parent_digests[i * size : (i + 1) * size],
                )


def hit_tokens(manager: KVCacheManager, tokens: list[int]) -> int:
    return manager.get_computed_blocks(request_of(tokens, "looks"))[1]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_was_loaded_is_hit_and_labelled_as_if_it_had_been_computed(shape: Shape) -> None:
    wanted = 44 if shape is CHUNKED else 48  # at the end of a chunk, nothing before it is needed
    tokens = TOKENS[: wanted + 1]
    manager = make_manager(shape)
    num_free = manager.statistics().core.num_free_blocks
    load = manager.tiers.loads.begin(request_of(tokens), wanted)
    assert load.num_tokens == wanted
    assert load.num_device_tokens == (40 if shape is CHUNKED else 0)
    assert hit_tokens(manager, tokens) == load.num_device_tokens
    assert list(labels(manager)) == []
    manager.check()

    manager.tiers.loads.finish(load.load_id)
    assert hit_tokens(manager, tokens) == wanted
    told = list(labels(manager))
    ids = [int(i) for ids in load.block_ids for i in ids]
    assert sorted(block_id for block_id, *_ in told) == sorted(ids)

    other = make_manager(shape)
    computed = request_of(tokens)
    other.allocate_slots(computed, wanted)
    expected = {(group, digest, parent) for _, group, digest, parent in labels(other)}
    assert {(group, digest, parent) for _, group, digest, parent in told} <= expected

    manager.tiers.loads.release(load.load_id)
    manager.check()
    assert manager.statistics().core.num_free_blocks == num_free
    assert hit_tokens(manager, tokens) == wanted


def test_only_what_the_device_does_not_have_is_loaded() -> None:
    manager = make_manager(HYBRID)
    first = request_of(TOKENS[:20], "first")
    manager.allocate_slots(first, 20)
    manager.free(first)
    load = manager.tiers.loads.begin(request_of(TOKENS), 48)
    assert load.num_device_tokens == 20
    assert load.columns[0].tolist() == list(range(5, 12))
    assert load.columns[1].tolist() == [10, 11]  # read by a window of 9 after 48 tokens


def test_an_abandoned_load_leaves_nothing() -> None:
    manager = make_manager(HYBRID)
    before = manager.statistics().core
    load = manager.tiers.loads.begin(request_of(TOKENS), 24)
    manager.tiers.loads.release(load.load_id)
    manager.check()
    assert manager.statistics().core.num_free_blocks == before.num_free_blocks
    assert manager.statistics().core.num_cached_blocks == 0
    assert hit_tokens(manager, TOKENS) == 0
    assert len(manager.tiers.loads) == 0


def test_without_room_or_while_draining_nothing_is_begun() -> None:
    manager = make_manager(FULL, 10)
    assert manager.tiers.loads.begin(request_of(TOKENS), 40) is None
    assert manager.tiers.loads.begin(request_of(TOKENS), 36) is not None
    manager.reset_prefix_cache(drain=True)
    assert manager.is_draining
    assert manager.tiers.loads.begin(request_of(TOKENS[:5]), 4) is None


def test_a_drain_outlives_a_load_and_keeps_nothing_of_it() -> None:
    manager = make_manager(FULL)
    load = manager.tiers.loads.begin(request_of(TOKENS), 48)
    assert load is not None
    assert not manager.reset_prefix_cache(drain=True)
    manager.tiers.loads.finish(load.load_id)
    manager.tiers.loads.release(load.load_id)
    assert manager.reset_prefix_cache(drain=True)
    assert manager.model_epoch == 1
    manager.check()


def test_a_load_with_a_tail_is_handed_over_where_there_is_room_and_else_stays() -> None:
    manager = make_manager(FULL, 10)
    loads = manager.tiers.loads
    request = request_of(TOKENS[:30])
    load = loads.begin(request, 22, has_tail=True)
    assert load.columns[0].tolist() == list(range(6))
    assert loads.num_held_tokens(request, 0) == 0
    loads.finish(load.load_id)
    assert loads.num_held_tokens(request, 20) == 22
    assert loads.num_held_tokens(request, 22) == 0
    assert loads.num_held_tokens(request_of(TOKENS[:30]), 20) == 0
    assert hit_tokens(manager, TOKENS) == 20

    stand_in = f"\x00load {load.load_id}"
    before = manager.get_block_ids(stand_in), manager.statistics()
    assert not loads.hand_over(request, Reservation(22, 40, 30))
    assert (manager.get_block_ids(stand_in), manager.statistics()) == before
    assert not any(manager.get_block_ids("asks"))
    manager.check()
    assert loads.num_held_tokens(request, 20) == 22
    assert loads.hand_over(request, Reservation(22, 30, 30))
    (ids,) = manager.get_block_ids(request.request_id)
    assert ids[:6] == load.block_ids[0].tolist()
    assert len(ids) == 8
    assert not [c for c in manager.take_commands() if isinstance(c, Copy)]
    assert loads.was_taken(load.load_id)
    assert loads.num_held_tokens(request, 20) == 0
    with pytest.raises(RequestError, match="no load holds tokens for request asks"):
        loads.hand_over(request, Reservation(22, 30, 30))
    loads.release(load.load_id)
    manager.check()
    assert manager.statistics().core.num_free_blocks == 1


def test_a_tail_that_is_not_taken_is_free_again() -> None:
    manager = make_manager(FULL)
    loads = manager.tiers.loads
    request = request_of(TOKENS[:22])
    request.append_output_token_ids(TOKENS[22:30])
    load = loads.begin(request, 22, has_tail=True)
    loads.finish(load.load_id)
    request.truncate_tokens(22)  # its last token is always computed: the load is of no use
    assert loads.num_held_tokens(request, 20) == 0
    loads.release(load.load_id)
    assert loads.num_held_tokens(request, 0) == 0
    manager.check()
    statistics = manager.statistics().core
    assert statistics.num_free_blocks == statistics.num_blocks
    assert hit_tokens(manager, TOKENS) == 20
    assert manager.statistics().core.num_cached_blocks == 5


def test_wrong_numbers_are_refused_and_change_nothing() -> None:
    manager = make_manager(CHUNKED_HYBRID)
    before = manager.dump_state()
    with pytest.raises(RequestError, match=r"blocks of \[8, 4, 8\], 20 of them cannot be loaded"):
        manager.tiers.loads.begin(request_of(TOKENS), 20)
    with pytest.raises(RequestError, match="load 7 is not known"):
        manager.tiers.loads.finish(7)
    with pytest.raises(RequestError, match="load 7 is not known"):
        manager.tiers.loads.release(7)
    assert manager.dump_state() == before
    load = manager.tiers.loads.begin(request_of(TOKENS), 16)
    manager.tiers.loads.finish(load.load_id)
    with pytest.raises(RequestError, match="is finished already"):
        manager.tiers.loads.finish(load.load_id)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.seeds(3)
def test_loads_among_running_requests_keep_counts_right(shape: Shape, seed: int) -> None:
    """Random loads between steps: consistent state, and hits only of finished loads."""
    dice = random.Random(f"loads {seed} {shape.name}")
    manager = make_manager(shape, 48)
    engine = Engine(manager)
    size = max(group.block_size for group in shape.groups)
    families = [[dice.randrange(50) for _ in range(60)] for _ in range(3)]
    audits = Audits(f"{shape.name} {seed}", manager.check)
    loading: dict[int, tuple[list[int], int]] = {}
    held: list[int] = []
    running: list[str] = []
    for number in range(120):
        action = dice.choice(("new", "finish", "load", "end", "abandon", "release"))
        tokens = dice.choice(families)[: dice.randrange(2, 60)]
        if action == "new":
            result = engine.step(new=(new(f"r{number}", tokens),))
            engine.step(completed_step=engine.next_step - 1)
            if result.admitted_slots[0] >= 0:
                running.append(f"r{number}")
        elif action == "finish" and running:
            engine.step(finished=(running.pop(dice.randrange(len(running))),))
        elif action == "load" and len(tokens) > size:
            wanted = dice.randrange(1, len(tokens) // size + 1) * size
            load = manager.tiers.loads.begin(request_of(tokens), wanted)
            if load is not None:
                loading[load.load_id] = (tokens, wanted)
        elif action == "end" and loading:
            load_id = dice.choice(list(loading))
            tokens, wanted = loading.pop(load_id)
            manager.tiers.loads.finish(load_id)
            held.append(load_id)
            assert hit_tokens(manager, [*tokens[:wanted], 7]) >= wanted
        elif action == "abandon" and loading:
            load_id = dice.choice(list(loading))
            del loading[load_id]
            manager.tiers.loads.release(load_id)
        elif action == "release" and held:
            manager.tiers.loads.release(held.pop(dice.randrange(len(held))))
        audits.perhaps()
    for load_id in [*loading, *held]:
        manager.tiers.loads.release(load_id)
    engine.step(finished=tuple(running))
    manager.check()
    statistics = manager.statistics().core
    assert statistics.num_free_blocks == statistics.num_blocks
