"""A coordinator that begins over ranks with labels: kept blocks, and awaited clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.errors import ClusterError
from kvcache.coordinator import Phase
from kvcache.coordinator.membership import EPOCH_EVENTS
from kvcache.coordinator.remote_calls import pack_values
from kvcache.protocol.commands import Fence, Reset, Unlabel
from kvcache.protocol.labels import BlockLabel
from kvcache.protocol.messages import (
    Acknowledge,
    Attached,
    Call,
    ClientStep,
    CollectLabels,
    Detach,
    Detached,
    Granted,
    Heartbeat,
    LabelReport,
    Outgoing,
    StepCommands,
    Unattached,
)
from kvcache.protocol.state_store import MemoryStateStore, SmallState
from kvcache.protocol.step import NewRequest, StepRequest, StepResult
from kvcache.protocol.wire import decode, encode
from kvcache.requests.hashing import get_hash_fn, get_request_block_hasher
from kvcache.requests.request import Request
from kvcache.requests.request_content import DEFAULT_NAMESPACE, namespace_name
from tests.protocol.scenario import random_scenario
from tests.protocol.simulation import simulate
from tests.protocol.test_coordinator import NUM_BLOCKS, Bench, BrokenStore, label_report, only

PROMPT = tuple(range(100, 117))


def saved_state(epoch: int, *, owner: str = "n", **changes: Any) -> SmallState:
    """The state that is saved when `epoch` is taken, with the end of its event numbers."""
    return SmallState(epoch, next_event_chunk=(epoch + 1) * EPOCH_EVENTS, owner=owner, **changes)


def chain(tokens: tuple[int, ...] = PROMPT, first_block: int = 5) -> list[BlockLabel]:
    """Return the labels of a prompt's full blocks, in consecutive blocks."""
    hasher = get_request_block_hasher(4, get_hash_fn("sha256"))
    request = Request("r", list(tokens), block_hasher=hasher)
    parents = [hasher.none_hash, *request.block_hashes]
    return [
        BlockLabel(
            first_block + i,
            0,
            -1,
            digest,
            parents[i],
            tokens[4 * i : 4 * i + 4],
            namespace_bytes(),
            b"",
        )
        for i, digest in enumerate(request.block_hashes)
    ]


def namespace_bytes() -> bytes:
    """Return the name of the namespace of requests without LoRA, salt and tenant."""
    return namespace_name(DEFAULT_NAMESPACE)


def saved() -> MemoryStateStore:
    """Return the saved state of an earlier coordinator."""
    return MemoryStateStore(SmallState())


def granted(bench: Bench) -> list[Outgoing]:
    """Let both ranks grant the epoch, without labels yet."""
    bench.coordinator.start()
    out: list[Outgoing] = []
    for rank in (0, 1):
        bench.hello(rank)
    for rank in (0, 1):
        message = Granted("n", bench.processes[rank], rank, bench.coordinator.epoch)
        out += bench.coordinator.on_worker_message(rank, message)
    return out


def begin(bench: Bench) -> None:
    for rank in (0, 1):
        bench.applied(rank, 1)
    assert only(bench.attach(), Attached)


def hit_of(bench: Bench, tokens: tuple[int, ...] = PROMPT) -> int:
    out = bench.step(1, new=(NewRequest("again", int32_array(tokens), 64),))
    (result,) = only(out, StepResult)
    return int(result.num_hit_tokens[0])


def first_commands(out: list[Outgoing]) -> tuple[Any, ...]:
    (sent,) = only(out, StepCommands)
    assert sent.seq == 1
    return sent.commands


def test_all_ranks_are_asked_when_all_have_granted() -> None:
    out = granted(Bench(saved()))
    assert only(out, CollectLabels) == [CollectLabels("n", 1, 0)] * 2


def test_what_all_ranks_hold_is_hit() -> None:
    bench = Bench(saved())
    granted(bench)
    assert bench.labels(0, *chain()) == []
    assert first_commands(bench.labels(1, *chain())) == ()
    assert bench.coordinator.phase is Phase.RUNNING
    statistics = bench.coordinator.statistics()
    assert (statistics.num_kept_blocks, statistics.cold_reason) == (4, "")
    begin(bench)
    assert hit_of(bench) == 16
    bench.coordinator.check()


def test_what_one_rank_does_not_hold_is_withdrawn_everywhere_with_all_behind_it() -> None:
    bench = Bench(saved())
    granted(bench)
    labels = chain()
    bench.labels(0, *labels)
    (unlabel,) = first_commands(bench.labels(1, *labels[:1], *labels[2:]))
    assert isinstance(unlabel, Unlabel)
    assert unlabel.block_ids.tolist() == [6, 7, 8]
    begin(bench)
    assert hit_of(bench) == 4


def test_a_block_that_ranks_know_by_different_contents_is_withdrawn() -> None:
    labels = chain()
    other = chain(tuple(range(200, 217)))
    bench = Bench(saved())
    granted(bench)
    bench.labels(0, *labels)
    bench.labels(1, *labels[:3], other[3])
    assert bench.coordinator.statistics().num_kept_blocks == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"version": 9},
            "labels of rank 1 have version 9, this package reads version 1: run the same release "
            "everywhere",
        ),
        (
            {"layout_fingerprint": "other"},
            "labels of rank 1 are about other bytes: their layout is other, layout was expected",
        ),
        (
            {"model_epoch": 3},
            "labels of rank 1 are about other bytes: their model epoch is 3, 0 was expected",
        ),
        (
            {"num_blocks": 12, "end_block": 12},
            "labels of rank 1 are about other bytes: their number of blocks is 12, 24 was expected",
        ),
        (
            {"checksums": b"torn"},
            "labels of rank 1: 4 checksum bytes for 4 blocks, expected 8 each",
        ),
        ({"first_block": 0, "end_block": 0}, "labels of rank 1 for blocks 0 to 0 of 24"),
        ({"end_block": 7}, "labels of rank 1 for blocks 5 to 8, asked were 0 to 6"),
    ],
)
def test_labels_about_other_bytes_make_the_epoch_begin_cold(
    changes: dict[str, Any], reason: str
) -> None:
    bench = Bench(saved(), layout_fingerprints=("layout", "layout"))
    granted(bench)
    bench.labels(0, *chain())
    assert first_commands(bench.labels(1, *chain(), **changes)) == (Reset(0),)
    statistics = bench.coordinator.statistics()
    assert (statistics.num_kept_blocks, statistics.cold_reason) == (0, reason)
    begin(bench)
    assert hit_of(bench) == 0


def test_a_saved_model_epoch_above_that_of_the_ranks_makes_the_epoch_begin_cold() -> None:
    bench = Bench(MemoryStateStore(SmallState(epoch=3, model_epoch=2)))
    granted(bench)
    out = bench.labels(0, *chain())
    assert first_commands(out) == (Reset(2),)


def test_what_ranks_hold_is_not_used_where_no_state_was_saved() -> None:
    bench = Bench(MemoryStateStore())
    granted(bench)
    bench.labels(0, *chain())
    assert first_commands(bench.labels(1, *chain())) == (Reset(1),)
    assert bench.coordinator.statistics().cold_reason == (
        "no state was saved, so that it is not known which weights are loaded"
    )
    saved = bench.store.load()
    assert saved == saved_state(1, model_epoch=1)


def test_a_coordinator_that_ends_before_it_has_settled_the_model_epoch_leaves_it_unknown() -> None:
    store = MemoryStateStore()
    granted(Bench(store))
    assert store.load() == saved_state(1, knows_model_epoch=False)
    bench = Bench(store)
    granted(bench)
    bench.labels(0, *chain())
    assert first_commands(bench.labels(1, *chain())) == (Reset(1),)


def test_a_coordinator_whose_successor_has_begun_cannot_change_the_model_epoch() -> None:
    store = MemoryStateStore()
    old = Bench(store).run()
    Bench(store, "new").coordinator.start()
    call = Call("c", 1, 1, -1, "reset_prefix_cache", pack_values({"drain": True}))
    (away,) = only(old.coordinator.on_client_message(call), Unattached)
    assert old.coordinator.phase is Phase.SUPERSEDED
    assert "another coordinator has begun, this one no longer saves anything" in away.reason
    assert store.load() == saved_state(2, owner="new")


def test_a_coordinator_whose_successor_has_begun_takes_no_other_epoch() -> None:
    store = MemoryStateStore()
    old = Bench(store).run()
    Bench(store, "new").coordinator.start()
    old.coordinator.on_worker_lost(0, "p", "killed")
    assert old.coordinator.phase is Phase.SUPERSEDED
    assert store.load() == saved_state(2, owner="new")


def test_a_save_that_was_answered_with_an_error_but_happened_is_our_own() -> None:
    class Unsure(MemoryStateStore):
        is_unsure = False

        def save(self, state: SmallState, replaces: SmallState | None) -> None:
            super().save(state, replaces)
            if self.is_unsure:
                raise ClusterError("no answer came")

    store = Unsure(SmallState())
    bench = Bench(store).run()
    store.is_unsure = True
    bench.coordinator.on_worker_lost(1, "q", "killed")
    assert "the state of the cluster cannot be saved: no answer came" in bench.coordinator.problem()
    store.is_unsure = False
    bench.clock.advance(1.0)
    bench.coordinator.on_tick()
    assert (bench.coordinator.phase, bench.coordinator.epoch) == (Phase.FENCING, 2)
    assert bench.coordinator.problem() == ""


def test_a_rank_that_lives_is_heard_while_no_epoch_can_be_saved() -> None:
    store = BrokenStore(SmallState())
    bench = Bench(store, worker_silence_s=5.0).run()
    store.is_broken = True
    bench.coordinator.on_worker_lost(1, "q", "killed")
    bench.clock.advance(6.0)
    bench.coordinator.on_worker_message(0, Heartbeat("n", "p", 0, 1, 1))
    assert "rank 0" not in bench.coordinator.problem()
    assert bench.coordinator.problem().startswith("the state of the cluster cannot be saved")


def test_a_rank_that_lives_but_never_tells_its_labels_makes_the_epoch_begin_cold() -> None:
    bench = Bench(saved(), worker_silence_s=5.0, labels_s=15.0)
    granted(bench)
    bench.labels(0, *chain())
    out: list[Outgoing] = []
    for _ in range(20):
        bench.clock.advance(1.0)
        bench.coordinator.on_worker_message(1, Heartbeat("n", "q", 1, 1, 0))
        out += bench.coordinator.on_tick()
    assert only(out, StepCommands)[0].commands == (Reset(0),)
    reason = bench.coordinator.statistics().cold_reason
    assert reason.startswith("rank 1 has not sent its labels for 15.0 s") or "16.0 s" in reason


def test_one_rank_that_names_a_client_twice_does_not_speak_for_the_other() -> None:
    bench = Bench(saved())
    granted(bench)
    bench.labels(0, *chain(), client_steps=(ClientStep("c", 7), ClientStep("c", 7)))
    bench.labels(1, *chain())
    assert attach(bench, "c").applied_step == 0


def test_a_client_that_did_not_return_is_fenced_and_not_awaited_again() -> None:
    bench = returning(ClientStep("c", 7), ClientStep("gone", 7), reattach_s=3.0)
    attach(bench, "c")
    bench.clock.advance(3.1)
    (sent,) = only(bench.coordinator.on_tick(), StepCommands)
    assert sent.commands == (Fence("gone"),)


def test_a_client_that_says_goodbye_instead_is_not_waited_for_and_fenced() -> None:
    bench = returning(ClientStep("c", 7), ClientStep("gone", 7), reattach_s=1000.0)
    attach(bench, "c")
    assert only(bench.step(8, "c"), StepResult) == []
    out = bench.coordinator.on_client_message(Detach("gone", 1))
    assert only(out, Detached) == [Detached("gone", bench.coordinator.epoch)]
    fence, *_ = only(out, StepCommands)
    assert fence.commands == (Fence("gone"),)
    assert [result.client_id for result in only(out, StepResult)] == ["c"]


def test_a_client_that_says_goodbye_before_the_labels_are_there_is_not_waited_for() -> None:
    bench = Bench(saved(), reattach_s=1000.0)
    granted(bench)
    bench.coordinator.on_client_message(Detach("gone", 1))
    for rank in (0, 1):
        bench.labels(rank, *chain(), client_steps=(ClientStep("c", 7), ClientStep("gone", 7)))
    for rank in (0, 1):
        bench.applied(rank, 1)
    assert bench.coordinator.statistics().waiting_for_clients == ("c",)
    attach(bench, "c")
    assert only(bench.step(8, "c"), StepResult)


def test_labels_come_in_pieces_and_lost_ones_are_asked_for_again() -> None:
    bench = Bench(saved())
    granted(bench)
    bench.labels(1, *chain())
    first, second = chain()[:2], chain()[2:]
    for pieces in (first, second):
        bench.clock.advance(1.0)
        (again,) = only(bench.coordinator.on_tick(), CollectLabels)
        start = 0 if pieces is first else 7
        assert again.first_block == start
        end = 7 if pieces is first else NUM_BLOCKS
        out = bench.labels(0, *pieces, first_block=start, end_block=end)
        # A repeat changes nothing.
        if pieces is first:
            assert only(out, CollectLabels) == [CollectLabels("n", 1, 7)]
            assert bench.labels(0, *pieces, first_block=start, end_block=end) == []
    assert bench.coordinator.statistics().num_kept_blocks == 4


def test_labels_of_another_process_or_epoch_are_not_taken() -> None:
    bench = Bench(saved())
    granted(bench)
    for changes in ({"incarnation": "ghost"}, {"epoch": 9}, {"nonce": "other"}):
        bench.labels(0, *chain(), **changes)
    bench.labels(1)
    assert bench.coordinator.phase is Phase.COLLECTING
    bench.labels(0)
    assert bench.coordinator.phase is Phase.RUNNING


def test_a_rank_that_does_not_tell_is_named() -> None:
    bench = Bench(saved(), worker_silence_s=5.0)
    granted(bench)
    bench.labels(0)
    bench.clock.advance(6.0)
    assert "rank 1 has" in bench.coordinator.problem()
    (away,) = only(bench.attach(), Unattached)
    assert "waiting for the labels of ranks [1]" in away.reason


def test_a_rank_that_is_lost_while_it_is_asked_begins_another_epoch() -> None:
    bench = Bench(saved())
    granted(bench)
    bench.labels(0, *chain())
    bench.coordinator.on_worker_lost(1, "q", "killed")
    assert bench.coordinator.phase is Phase.FENCING
    bench.processes[1] = "q2"
    bench.hello(1)
    for rank in (0, 1):
        bench.granted(rank)
    # The new process holds nothing, so nothing is kept.
    statistics = bench.coordinator.statistics()
    assert (bench.coordinator.phase, statistics.num_kept_blocks) == (Phase.RUNNING, 0)


# --- clients of the epoch before


def returning(*clients: ClientStep, **changes: Any) -> Bench:
    bench = Bench(saved(), **changes)
    granted(bench)
    for rank in (0, 1):
        bench.labels(rank, *chain(), client_steps=clients)
    for rank in (0, 1):
        bench.applied(rank, 1)
    return bench


def attach(bench: Bench, client_id: str, next_step: int = 8) -> Attached:
    (attached,) = only(bench.attach(client_id, next_step), Attached)
    return attached


def test_a_client_is_told_how_far_every_rank_had_come() -> None:
    bench = Bench(saved())
    granted(bench)
    bench.labels(0, *chain(), client_steps=(ClientStep("c", 7), ClientStep("d", 2)))
    bench.labels(1, *chain(), client_steps=(ClientStep("c", 6),))
    assert attach(bench, "c").applied_step == 6
    assert attach(bench, "d").applied_step == 0


def test_no_step_runs_before_the_clients_of_the_epoch_before_are_back() -> None:
    bench = returning(ClientStep("c", 7), ClientStep("d", 7))
    attach(bench, "c")
    attach(bench, "new", 1)
    assert only(bench.step(8, "c"), StepResult) == []
    assert only(bench.step(1, "new"), StepResult) == []
    assert bench.coordinator.statistics().waiting_for_clients == ("d",)
    attach(bench, "d")
    assert only(bench.coordinator.on_tick(), StepResult) == []
    out = bench.step(8, "d")
    assert sorted(r.client_id for r in only(out, StepResult)) == ["c", "d", "new"]
    assert bench.coordinator.statistics().waiting_for_clients == ()


def test_a_client_that_has_nothing_to_ask_is_not_waited_for() -> None:
    bench = returning(ClientStep("c", 7), ClientStep("d", 7))
    attach(bench, "c")
    attach(bench, "d")
    bench.step(8, "c")
    out = bench.coordinator.on_client_message(Acknowledge("d", 1, 7))
    assert [r.client_id for r in only(out, StepResult)] == ["c"]


def test_a_client_that_does_not_come_back_is_waited_for_no_longer_than_configured() -> None:
    bench = returning(ClientStep("c", 7), ClientStep("gone", 7), reattach_s=3.0)
    attach(bench, "c")
    bench.step(8, "c")
    bench.clock.advance(2.9)
    assert only(bench.coordinator.on_tick(), StepResult) == []
    bench.clock.advance(0.2)
    assert [r.client_id for r in only(bench.coordinator.on_tick(), StepResult)] == ["c"]


def test_after_a_cold_start_no_client_is_awaited() -> None:
    bench = Bench(saved())
    granted(bench)
    for rank in (0, 1):
        bench.labels(rank, client_steps=(ClientStep("c", 7), ClientStep("d", 7)))
        bench.applied(rank, 1)
    attach(bench, "c")
    assert only(bench.step(8, "c"), StepResult)


def test_what_one_client_comes_back_for_is_not_taken_by_another_one() -> None:
    # 23 blocks, 4 of them cached for "d": "c" would take every block there is.
    bench = returning(ClientStep("c", 7), ClientStep("d", 7))
    greedy = NewRequest("greedy", int32_array(range(1000, 1060)), 64)
    more = NewRequest("more", int32_array(range(2000, 2028)), 64)
    attach(bench, "c")
    attach(bench, "d")
    bench.step(8, "c", new=(greedy, more))
    out = bench.step(8, "d", new=(NewRequest("back", int32_array(PROMPT), 64),))
    by_client = {result.client_id: result for result in only(out, StepResult)}
    assert by_client["c"].no_room == ("more",)
    assert by_client["d"].num_hit_tokens.tolist() == [16]
    bench.coordinator.check()


def test_a_request_that_returns_with_other_tokens_gets_their_blocks() -> None:
    bench = returning(ClientStep("c", 7))
    attach(bench, "c")
    changed = (*PROMPT[:9], 7, *PROMPT[10:])
    out = bench.step(8, "c", new=(NewRequest("r", int32_array(changed), 64),))
    (result,) = only(out, StepResult)
    assert result.num_hit_tokens.tolist() == [8]


def test_held_blocks_come_free_when_the_first_step_is_refused() -> None:
    bench = returning(ClientStep("c", 7))
    attach(bench, "c")
    wrong = StepRequest(
        "c",
        8,
        1,
        new=(NewRequest("r", int32_array(PROMPT), 64), NewRequest("r", int32_array(PROMPT), 64)),
    )
    (result,) = only(bench.coordinator.on_client_message(wrong), StepResult)
    assert result.error.endswith("request r is resumed or new twice: name it once")
    manager = bench.coordinator.manager
    assert len(manager.holds) == 0
    assert manager.statistics().core.num_free_blocks == NUM_BLOCKS - 1


# --- whole clusters


def test_schedules_with_restarts_keep_what_was_cached() -> None:
    num_kept = num_resumed = 0
    for seed in range(8):
        scenario = replace(random_scenario(seed), num_restarts=2, num_worker_losses=0)
        cluster = simulate(scenario)
        num_kept += cluster.num_kept_blocks
        num_resumed += sum(engine.num_voided for engine in cluster.engines.values())
    assert num_kept > 50
    assert num_resumed > 5


def test_a_report_of_labels_survives_the_wire() -> None:
    report = label_report(0, "p", 1, chain(), NUM_BLOCKS)
    read = decode(encode(replace(report, client_steps=(ClientStep("c", 2**40),))))
    assert isinstance(read, LabelReport)
    assert read.labels.block_ids.tolist() == [5, 6, 7, 8]
    assert read.labels.digests == report.labels.digests
    assert read.client_steps == (ClientStep("c", 2**40),)
