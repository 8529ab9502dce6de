"""A thousand schedules of faults: every byte right, everything ends, nothing is left.

A failing seed is in the message; `simulate(random_scenario(seed))` plays it again.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from kvcache.client.session import ClientSession, SessionState
from kvcache.coordinator import Coordinator
from kvcache.coordinator.job_table import JobTable
from kvcache.coordinator.settings import CoordinatorSettings
from kvcache.core import CacheHit, Reservation, flat_core
from kvcache.core.columns import ACCEPTED, OPENED
from kvcache.core.flat_core import FlatCore
from kvcache.core.prefix_cache import PrefixCache
from kvcache.core.running import ROW
from kvcache.offload import keys
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.protocol.delivery import CommandReceiver, CommandWindow, ReceivedCommands
from kvcache.protocol.messages import Ack, FromClient, StepCommands
from kvcache.protocol.step_delivery import StepReceiver
from kvcache.requests.request import Request
from kvcache.worker.host_memory.segment import HostSegment
from tests.core.builders import run_one_by_one
from tests.protocol.engine import WeightChanger
from tests.protocol.network import NetworkFaults
from tests.protocol.scenario import MODELS, MODELS_IN_TIERS, Scenario, random_scenario
from tests.protocol.simulation import any_is_red, simulate

ROUGH = NetworkFaults(
    dropped=0.1, duplicated=0.3, delayed=0.4, reordered=0.3, torn=0.02, max_delay_s=0.1
)


@pytest.mark.seeds(10, long=1000)
def test_every_schedule_of_faults_ends_with_every_byte_right(seed: int) -> None:
    simulate(random_scenario(seed))


def test_the_same_seed_plays_the_same_schedule() -> None:
    first, second = (simulate(random_scenario(3)) for _ in range(2))
    assert first.network.statistics() == second.network.statistics()
    assert first.clock.now() == second.clock.now()


def test_without_content_checking_steps_finish_when_they_are_applied() -> None:
    cluster = simulate(Scenario(3, is_content_checking=False, faults=ROUGH))
    assert cluster.coordinator.statistics().num_open_jobs == 0


@pytest.mark.long
def test_the_schedules_reach_what_they_are_meant_to_reach() -> None:
    engines = [
        engine for seed in range(40) for engine in simulate(random_scenario(seed)).engines.values()
    ]
    assert sum(engine.num_hit_tokens for engine in engines) > 100
    assert sum(engine.num_preempted for engine in engines) > 5
    assert sum(engine.num_failed_steps for engine in engines) > 5
    assert sum(engine.num_voided for engine in engines) > 2
    assert sum(engine.session.num_resent for engine in engines) > 20


@pytest.mark.parametrize("model", MODELS)
def test_the_schedules_of_every_model_reach_what_they_are_meant_to_reach(model: str) -> None:
    num_hit = num_failed = num_drafts = num_preempted = 0
    for seed in range(6):
        num_blocks = 22 * len(MODELS[model])
        scenario = Scenario(seed, num_blocks, num_requests=5, fail_share=0.1, model=model)
        for engine in simulate(scenario).engines.values():
            num_hit += engine.num_hit_tokens
            num_failed += engine.num_failed_steps
            num_drafts += engine.num_drafts
            num_preempted += engine.num_preempted
    can_hit = all(spec.can_prefix_cache for spec in MODELS[model])
    assert min(num_failed, num_drafts, num_preempted) > 0
    assert (num_hit > 0) is can_hit


def one_token_later(kernel: Any, *places: int) -> Any:
    """Return a kernel that gets one more token in these of its arguments: the rules that it calls
    are compiled into it."""
    return lambda *args: kernel(*[arg + 1 if i in places else arg for i, arg in enumerate(args)])


def turns_red(num_seeds: int = 12, model: str = "full", first_seed: int = 0) -> bool:
    """Return whether some schedule fails.

    A caller that knows a failing seed begins shortly before it.
    """
    num_blocks = 24 * len(MODELS[model])
    scenario = Scenario(0, num_blocks, num_requests=3, faults=ROUGH, fail_share=0.1, model=model)
    seeds = range(first_seed, first_seed + num_seeds)
    return any_is_red(replace(scenario, seed=seed, num_ranks=2 + seed % 2) for seed in seeds)


@pytest.mark.parametrize("model", ["full", "mla, chunk, align", "chunk, cross, none"])
def test_with_all_rules_the_rough_schedules_are_green(model: str) -> None:
    assert not turns_red(6, model)


def new_weights(seed: int) -> Scenario:
    """Return a schedule in which the weights change often, with all tiers, restarts and swaps.

    Of odd seeds, device and host memory have so little room that prefixes come back from files; of
    every other of these, the weights stay for longer, so that more of them do.
    """
    scenario = random_scenario(seed)
    num_changes = 1 + seed % 8
    if seed % 4 == 1:
        scenario = replace(scenario, model=("full", "full, window", "mla")[seed // 4 % 3])
        num_changes = 1 + seed // 4 % 2
    if seed % 2 and scenario.model in MODELS_IN_TIERS:
        scenario = replace(
            scenario,
            num_blocks=16 * len(MODELS[scenario.model]),
            num_requests=8 if seed % 4 == 3 else 14,
            num_host_blocks=8,
            store_after=1,
            num_disk_blocks=60,
        )
    return replace(scenario, num_weight_changes=num_changes, num_restarts=seed % 3)


@pytest.mark.seeds(12, 12, long=1000)
def test_no_schedule_hits_what_other_weights_computed(seed: int) -> None:
    simulate(new_weights(seed))


def test_the_schedules_of_new_weights_reach_what_they_are_meant_to_reach() -> None:
    clusters = [simulate(new_weights(seed)) for seed in range(12)]
    engines = [engine for cluster in clusters for engine in cluster.engines.values()]
    assert sum(e.num_changes for e in engines if isinstance(e, WeightChanger)) > 24
    assert sum(e.num_hit_tokens for e in engines) > 100
    assert sum(cluster.num_loaded_tokens for cluster in clusters) > 0
    assert sum(cluster.num_fetched_tokens for cluster in clusters) > 0
    assert sum(cluster.num_kept_blocks for cluster in clusters) > 0


def test_a_device_that_keeps_old_bytes_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefixCache, "forget_all", lambda self: None)
    assert any_is_red(map(new_weights, range(20)))


def test_tiers_that_keep_old_bytes_turn_the_simulation_red(monkeypatch: pytest.MonkeyPatch) -> None:
    fold = keys._fold
    monkeypatch.setattr(keys, "_fold", lambda n, size: fold(replace(n, model_epoch=0), size))
    assert not any_is_red(map(new_weights, range(5, 8))), "the tiers are emptied"
    monkeypatch.setattr(TierHierarchy, "reset", lambda self: None)
    monkeypatch.setattr(HostSegment, "reset", lambda self, model_epoch: None)
    assert any_is_red(map(new_weights, range(5, 40)))


def comings_and_goings(seed: int, model: str = "full") -> Scenario:
    """Return a schedule in which clients leave, are killed, and lose their connections."""
    num_blocks = 30 * len(MODELS[model])
    return Scenario(
        seed,
        num_blocks,
        num_requests=3,
        faults=ROUGH,
        fail_share=0.1,
        model=model,
        num_hang_ups=4,
        num_visitors=2,
        num_restarts=seed % 2,
    )


@pytest.mark.parametrize("model", ["full", "mla, chunk, short window", "align"])
def test_clients_that_go_leave_nothing_and_those_that_come_back_lose_nothing(model: str) -> None:
    clusters = [simulate(comings_and_goings(seed, model)) for seed in range(8)]
    assert sum(cluster.num_killed for cluster in clusters) > 0
    assert sum(cluster.num_departed for cluster in clusters) > 0


def test_ranks_are_told_what_follows_when_a_client_goes_though_no_step_comes() -> None:
    assert simulate(random_scenario(113)).num_departed == 1


def test_a_connection_that_ends_unnoticed_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Coordinator, "on_client_lost", lambda self, client_id: None)
    assert any_is_red(map(comings_and_goings, range(6)))


def test_a_client_given_up_with_its_connection_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CoordinatorSettings, "client_return_s", 0.0)
    assert any_is_red(map(comings_and_goings, range(6)))


def test_a_farewell_that_is_said_once_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_tick = ClientSession.on_tick

    def once(self: ClientSession) -> list[FromClient]:
        return [] if self.state is SessionState.DETACHING else on_tick(self)

    monkeypatch.setattr(ClientSession, "on_tick", once)
    assert any_is_red(map(comings_and_goings, range(30)))


def test_a_report_counted_twice_turns_the_simulation_red(monkeypatch: pytest.MonkeyPatch) -> None:
    report, numbers = JobTable.report, count()

    def by_number(self: JobTable, rank: int, job: Any) -> Any:
        return report(self, next(numbers), job)

    monkeypatch.setattr(JobTable, "report", by_number)
    assert turns_red()


def test_an_acknowledgement_of_one_rank_taken_for_all_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_applied = CommandWindow.on_applied

    def for_all(self: CommandWindow, rank: int, name: str, epoch: int, *rest: Any) -> bool:
        on_applied(self, rank, name, epoch, *rest)
        for other, progress in self._ranks.items():
            if progress.applied_seq < rest[0]:
                on_applied(self, other, progress.incarnation, epoch, *rest)
        return True

    monkeypatch.setattr(CommandWindow, "on_applied", for_all)
    assert turns_red()


def test_commands_applied_as_they_come_turn_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_they_come(self: CommandReceiver, message: StepCommands) -> ReceivedCommands:
        if message.epoch != self._epoch:
            return ReceivedCommands()
        self._delivered_seq = max(self._delivered_seq, message.seq)
        return ReceivedCommands((message,))

    def confirm(self: CommandReceiver, seq: int) -> Ack:
        self._applied_seq = max(self._applied_seq, seq)
        return self._ack()

    monkeypatch.setattr(CommandReceiver, "on_commands", as_they_come)
    monkeypatch.setattr(CommandReceiver, "confirm_applied", confirm)
    assert turns_red()


@pytest.mark.parametrize("model", ["align", "full, short window, align"])
def test_a_state_one_column_off_turns_the_simulation_red(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a step are served one by one, each after its forward is noted one token off."""

    def one_off(self: FlatCore, table: Any, slots: Any, *rest: Any) -> Any:
        self.store.columns.forward[table.rows[slots, ROW], :ACCEPTED] += 1
        return serve(self, table, slots, *rest)

    serve = FlatCore._serve_singly
    monkeypatch.setattr(FlatCore, "run_rows", run_one_by_one)
    monkeypatch.setattr(FlatCore, "_serve_singly", one_off)
    assert turns_red(model=model)


@pytest.mark.parametrize("model", ["chunk", "mla, chunk, short window"])
def test_a_chunk_dropped_one_token_early_turns_the_simulation_red(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, place in (("run_rows", 12), ("serve_row", 2)):
        kernel = one_token_later(getattr(flat_core, name), place)
        monkeypatch.setattr(flat_core, name, kernel)
    assert turns_red(60, model, first_seed=29 if model == "chunk" else 5)


def test_an_encoder_block_too_few_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_few(self: FlatCore, request: Request, wanted: Reservation, hit: Any) -> Any:
        fewer = wanted._replace(num_encoder_tokens=max(0, wanted.num_encoder_tokens - 1))
        return admit(self, request, fewer, hit)

    admit = FlatCore._admit
    monkeypatch.setattr(FlatCore, "_admit", too_few)
    assert turns_red(model="full, cross")


def test_a_state_hit_in_the_step_that_writes_it_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hits_open_step(self: PrefixCache, request: Request) -> CacheHit:
        self.store.columns.number[OPENED] = 1 << 60
        return look_up(self, request)

    look_up = PrefixCache.look_up
    monkeypatch.setattr(PrefixCache, "look_up", hits_open_step)
    assert turns_red(60, model="align", first_seed=10)


def test_without_repeating_commands_the_simulation_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CommandWindow, "due_for_resend", lambda self, now_s: {})
    monkeypatch.setattr(CommandWindow, "on_missing", lambda self, *args: [])
    assert turns_red(3)


def test_a_step_executed_twice_turns_the_simulation_red(monkeypatch: pytest.MonkeyPatch) -> None:
    on_step = StepReceiver.on_step

    def forgetful(self: StepReceiver, message: Any) -> Any:
        self._next_step = min(self._next_step, message.step)
        return on_step(self, message)

    monkeypatch.setattr(StepReceiver, "on_step", forgetful)
    assert turns_red()
