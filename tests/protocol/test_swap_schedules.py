"""Schedules of faults in which preempted requests are swapped out, and continue from that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcache.coordinator.offloading import Offloading
from kvcache.coordinator.partial_block_swap import PartialBlockSwap, SwappedTail
from kvcache.manager.step_ledger import ClientSteps
from tests.protocol.network import NetworkFaults
from tests.protocol.scenario import MODELS, MODELS_BY_CONTENT, Scenario
from tests.protocol.simulation import Cluster, any_is_red, simulate
from tests.worker.delayed_engine import DelayedEngine

ROUGH = NetworkFaults(
    dropped=0.1, duplicated=0.2, delayed=0.4, reordered=0.3, torn=0.02, max_delay_s=0.1
)
NUM_BLOCKS = {"mla": 8}
"""Its blocks are larger than those of other models."""


def scenario_of(number: int, model: str = "full") -> Scenario:
    """So few blocks that running requests are preempted; copies are slow and overtake each other.

    Every third seed has a draft model, for which nothing is swapped: not here.
    """
    return Scenario(
        1 + 3 * number,
        num_blocks=NUM_BLOCKS.get(model, 14) * len(MODELS[model]),
        num_ranks=1 + number % 2,
        num_requests=8,
        fail_share=0.1 * (number % 3 == 0),
        model=model,
        num_host_blocks=40,
        blocks_per_slot=1 + number % 2,
        swap_share=1.0,
        has_slow_copies=True,
        faults=ROUGH,
    )


@pytest.mark.parametrize("model", sorted(MODELS_BY_CONTENT))
def test_of_every_model_requests_come_back_where_they_were(model: str) -> None:
    num_swapped_in = 0
    for number in range(12):
        num_swapped_in += simulate(scenario_of(number, model)).num_swapped_in
        if num_swapped_in >= 2:
            return
    raise AssertionError(f"only {num_swapped_in} requests came back where they were")


def test_a_restart_or_a_lost_worker_leaves_no_tails() -> None:
    clusters: list[Cluster] = []
    for number in range(3):
        clusters.append(simulate(replace(scenario_of(number), num_restarts=1)))
        clusters.append(simulate(replace(scenario_of(number), num_worker_losses=1)))
    assert sum(cluster.num_swapped_in for cluster in clusters) > 0


def turns_red(model: str = "full", num_schedules: int = 12, first: int = 0) -> bool:
    """Return whether some schedule fails. A known failing seed is found faster from just before."""
    numbers = range(first, first + num_schedules)
    return any_is_red(scenario_of(number, model) for number in numbers)


def test_a_tail_whose_blocks_come_back_in_another_order_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key_at = SwappedTail.key_at

    def reversed_key_at(self: SwappedTail, group: int, column: int) -> Any:
        if key_at(self, group, column) is None:
            return None
        return self.keys[::-1][self.places.index((group, column))]

    monkeypatch.setattr(SwappedTail, "key_at", reversed_key_at)
    assert turns_red("full, window")


def test_tokens_that_a_forward_under_way_still_writes_turn_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        ClientSteps,
        "num_confirmed",
        lambda self, generation, num_computed, num_tokens: min(num_computed, num_tokens),
    )
    assert turns_red(first=8)


def test_a_block_that_is_written_while_a_store_reads_it_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = DelayedEngine.go_on

    def go_on_rarely(self: DelayedEngine) -> None:
        if self.chance.random() < 0.3:
            go_on(self)

    monkeypatch.setattr(DelayedEngine, "go_on", go_on_rarely)
    assert not turns_red(num_schedules=2)
    monkeypatch.setattr(Offloading, "_announce", lambda self, taken, result: [])
    assert turns_red() or turns_red("full, window")


def test_a_tail_that_stays_when_its_request_has_gone_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget_name_only(self: PartialBlockSwap, request_id: str) -> None:
        self._tails.pop(request_id, None)

    monkeypatch.setattr(PartialBlockSwap, "forget", forget_name_only)
    assert turns_red()
