"""Another coordinator, another process, an old client: which one is obeyed."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.base.errors import RequestError
from kvcache.coordinator import Coordinator, Phase
from kvcache.coordinator.membership import Membership
from kvcache.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Grant,
    Granted,
    Heartbeat,
    Hello,
    Refused,
    StepCommands,
    Unattached,
)
from kvcache.protocol.step import StepResult
from tests.protocol.network import NetworkFaults
from tests.protocol.scenario import Scenario
from tests.protocol.simulation import any_is_red, simulate
from tests.protocol.test_coordinator import Bench, new, only

ROUGH = NetworkFaults(
    dropped=0.1, duplicated=0.2, delayed=0.3, reordered=0.3, torn=0.02, max_delay_s=0.1
)


def scenario(seed: int, num_restarts: int = 2) -> Scenario:
    return Scenario(seed, num_requests=3, num_restarts=num_restarts, faults=ROUGH)


def test_another_coordinator_takes_the_workers_over_and_the_workload_ends() -> None:
    num_restarts = num_voided = 0
    for seed in range(12):
        cluster = simulate(scenario(seed))
        num_restarts += cluster.num_coordinators - 1
        num_voided += sum(engine.num_voided for engine in cluster.engines.values())
    assert num_restarts > 12
    assert num_voided > 12


def test_an_epoch_that_is_not_above_the_workers_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Membership, "on_refused", lambda self, refused, now_s: False)
    monkeypatch.setattr(Membership, "on_hello", lambda self, hello, now_s: False)
    assert any_is_red(map(scenario, range(60)))


def test_clients_that_trust_an_epoch_without_its_coordinator_turn_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Coordinator.on_client_message

    def forgetful(self: Coordinator, message: Any) -> Any:
        is_attach = isinstance(message, Attach)
        return real(self, Attach(message.client_id, message.next_step) if is_attach else message)

    monkeypatch.setattr(Coordinator, "on_client_message", forgetful)
    assert any_is_red(map(scenario, range(60)))


# --- message by message


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat("old", "p", 0, 7, 3),
        Ack("old", "p", 0, 7, 3),
        Granted("old", "p", 0, 7),
        Refused("old", "p", 0, 7, "epoch 5 is not above 7"),
    ],
)
def test_what_a_process_says_to_another_coordinator_introduces_it(message: Any) -> None:
    bench = Bench()
    bench.coordinator.start()
    (grant,) = only(bench.coordinator.on_worker_message(0, message), Grant)
    assert grant == Grant("n", "p", 8, "plan")


def test_a_process_that_was_taken_is_not_unseated_by_talk_to_another_coordinator() -> None:
    bench = Bench().run()
    assert bench.coordinator.on_worker_message(0, Heartbeat("old", "p", 0, 1, 3)) == []
    assert bench.coordinator.on_worker_message(0, Heartbeat("old", "ghost", 0, 9, 3)) == []
    assert bench.coordinator.phase is Phase.RUNNING


def test_a_process_that_replaces_one_which_has_granted_makes_a_new_epoch() -> None:
    bench = Bench()
    bench.coordinator.start()
    bench.hello(0)
    bench.granted(0)
    (grant,) = only(bench.hello(0, "p2"), Grant)
    assert (grant.incarnation, grant.epoch) == ("p2", 2)


def test_a_coordinator_that_workers_refuse_while_it_runs_was_superseded() -> None:
    bench = Bench().run()
    refused = Refused("n", "p", 0, 2, "epoch 2 of another coordinator is obeyed")
    (away,) = only(bench.coordinator.on_worker_message(0, refused), Unattached)
    assert bench.coordinator.phase is Phase.SUPERSEDED
    assert away.reason.startswith("another coordinator took over: rank 0: epoch 2 of another")
    bench.clock.advance(100.0)
    assert bench.coordinator.on_tick() == []


def test_a_coordinator_starts_once() -> None:
    bench = Bench().run()
    with pytest.raises(
        RequestError, match=r"^the coordinator is running: it starts once, make another one$"
    ):
        bench.coordinator.start()
    bench.coordinator.check()


def test_a_client_of_another_coordinator_is_not_attached_by_its_repeats() -> None:
    bench = Bench().run()
    out = bench.coordinator.on_client_message(Attach("d", 5, "another"))
    assert [away.reason for away in only(out, Unattached)] == [
        "another coordinator has taken its place"
    ]
    (attached,) = only(bench.coordinator.on_client_message(Attach("d", 5)), Attached)
    assert (attached.nonce, attached.next_step) == ("n", 5)
    assert only(bench.coordinator.on_client_message(Attach("d", 5, "n")), Attached)


def test_a_client_that_gave_its_steps_up_is_let_go_and_its_blocks_are_freed() -> None:
    bench = Bench().run()
    bench.step(1, new=(new("r"),))
    assert only(bench.attach(next_step=1), Attached)[0].next_step == 2
    (away,) = only(bench.attach(next_step=2), Unattached)
    assert away.reason == "client c gave its steps up, they are freed: use a new client id"
    fence = only(bench.coordinator.on_tick(), StepCommands)
    for rank in (0, 1):
        bench.applied(rank, fence[-1].seq)
    manager = bench.coordinator.manager
    assert manager is not None and manager.statistics().core.num_free_blocks == 23


@pytest.mark.parametrize("next_step", [0, -1, 2**53 + 1, 2**63 - 1])
def test_a_client_cannot_begin_where_numbers_end(next_step: int) -> None:
    (away,) = only(Bench().run().attach("d", next_step), Unattached)
    assert away.reason == f"client id or step {next_step} is invalid"


def test_more_clients_than_messages_in_the_window_wait_their_turn() -> None:
    bench = Bench(max_unacknowledged=2).run()
    names = [f"client-{i}" for i in range(5)]
    for name in names:
        bench.attach(name)
    for name in names:
        bench.step(1, name)
        bench.step(2, name)
    served: list[tuple[str, int]] = []
    for seq in range(2, 14):
        for rank in (0, 1):
            out = bench.applied(rank, min(seq, bench.coordinator.statistics().last_seq))
            results = only(out, StepResult)
            assert [result.error for result in results] == [""] * len(results)
            served += [(result.client_id, result.step) for result in results]
    assert bench.coordinator.statistics().num_steps == 10
    assert bench.coordinator.statistics().num_refused_steps == 0
    rest = [name for name, step in served if step == 1]
    assert rest == [name for name in names if name in rest]


def test_a_hello_of_the_same_process_is_answered_with_the_same_grant() -> None:
    bench = Bench().run()
    out = bench.coordinator.on_worker_message(0, Hello("p", 0, 1, "plan"))
    assert only(out, Grant) == [Grant("n", "p", 1, "plan")]
    assert bench.coordinator.phase is Phase.RUNNING
