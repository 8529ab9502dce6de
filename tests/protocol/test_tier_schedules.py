"""Schedules of faults with tiers below the device: blocks are stored, loaded and adopted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcache.coordinator.offloading import Offloading
from kvcache.coordinator.prefix_loading import PrefixLoading
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.manager.loads import PrefixLoads
from kvcache.protocol.commands import Command
from kvcache.worker.files.file_pool import FilePool
from kvcache.worker.files.store import FileStore
from kvcache.worker.transfers import TransferJobs
from tests.protocol import virtual_disk
from tests.protocol.network import NetworkFaults
from tests.protocol.scenario import MODELS, MODELS_IN_TIERS, Scenario
from tests.protocol.simulation import Cluster, any_is_red, simulate
from tests.worker.tier_support import is_scanning

NUM_BLOCKS = {"mla": 8}
"""Its blocks are larger than those of other models."""

ROUGH = NetworkFaults(
    dropped=0.1, duplicated=0.2, delayed=0.4, reordered=0.3, torn=0.02, max_delay_s=0.1
)


def scenario_of(seed: int, model: str = "full") -> Scenario:
    """So few blocks that contents are evicted, and a common prefix that comes back."""
    return Scenario(
        seed,
        num_blocks=NUM_BLOCKS.get(model, 14) * len(MODELS[model]),
        num_ranks=1 + seed % 2,
        num_requests=8,
        fail_share=0.1 * (seed % 3 == 0),
        model=model,
        num_host_blocks=40,
        blocks_per_slot=1 + seed % 2,
        store_after=1 + (seed % 5 == 0),
        faults=ROUGH,
    )


def num_loaded(clusters: list[Cluster]) -> int:
    return sum(cluster.num_loaded_tokens for cluster in clusters)


@pytest.mark.parametrize("model", sorted(MODELS_IN_TIERS))
def test_of_every_model_something_is_loaded_and_every_byte_is_right(model: str) -> None:
    clusters: list[Cluster] = []
    while not num_loaded(clusters) and len(clusters) < 8:
        clusters.append(simulate(scenario_of(len(clusters), model)))
    # With chunks alone a request needs only its last one, which it computes.
    assert num_loaded(clusters) > 0 or model == "chunk"


def test_host_memory_outlives_the_coordinator() -> None:
    num_adopted = 0
    for seed in range(40):
        num_adopted += simulate(replace(scenario_of(seed), num_restarts=1)).num_adopted_blocks
        if num_adopted > 10:
            return
    raise AssertionError(f"only {num_adopted} blocks were taken over")


def test_workers_are_lost_with_their_host_memory() -> None:
    for seed in range(4):
        simulate(replace(scenario_of(seed), num_worker_losses=1))


def with_files(seed: int, **changes: Any) -> Scenario:
    """So little host memory that most contents are only in files, which may be too few as well."""
    model = ("full", "full, window", "mla", "chunk")[seed % 4]
    scenario = replace(
        scenario_of(seed, model),
        num_requests=14,
        num_host_blocks=(4, 6, 10)[seed % 3] * (1 + seed % 2),
        num_disk_blocks=(6, 40, 100)[seed // 3 % 3],
        writes_through=seed % 5 == 0,
        keeps_memory=seed % 2 == 0,
    )
    return replace(scenario, **changes)


def faulty(seed: int) -> Scenario:
    """Disks that fail and hang, and processes that are lost and taken over from."""
    return with_files(
        seed,
        disk_fail_share=(0.02, 0.15)[seed % 2],
        disk_stall_share=0.05 * (seed % 3 == 1),
        num_worker_losses=seed % 3 % 2,
        num_restarts=seed % 4 // 2,
    )


def test_files_hold_what_the_tables_say_and_every_byte_that_comes_back_is_right() -> None:
    clusters = [simulate(with_files(seed)) for seed in range(6)]
    assert sum(cluster.num_fetched_tokens for cluster in clusters) > 0


@pytest.mark.long
def test_files_outlive_coordinators_and_workers() -> None:
    num_adopted = 0
    for seed in range(8):
        scenario = with_files(seed, num_restarts=1, num_worker_losses=seed % 2)
        num_adopted += simulate(scenario).num_adopted_blocks
    assert num_adopted > 10


SEEDS_PER_TEST = 3
NUM_SEEDS = 300
NUM_QUICK_SEEDS = 3


@pytest.mark.parametrize(
    "first",
    [
        first if first < NUM_QUICK_SEEDS else pytest.param(first, marks=pytest.mark.long)
        for first in range(0, NUM_SEEDS, SEEDS_PER_TEST)
    ],
)
def test_disks_may_fail_and_hang_and_lie(first: int) -> None:
    disks = [
        disk
        for seed in range(first, first + SEEDS_PER_TEST)
        for disk in simulate(faulty(seed)).disks.values()
    ]
    assert sum(disk.num_failures for disk in disks) > 0


@pytest.mark.long
def test_another_blocks_file_that_is_believed_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mixed_up(seed: int) -> Scenario:
        return with_files(seed, disk_fail_share=0.5)

    monkeypatch.setattr(virtual_disk, "DAMAGE", ("other file",))
    monkeypatch.setattr(virtual_disk.VirtualDisk, "may_fail", lambda self: None)
    assert not any_is_red(map(mixed_up, range(4)))
    monkeypatch.setattr(FileStore, "_require_ours", lambda self, head, key: None)
    assert any_is_red(map(mixed_up, range(40)))


def test_a_file_that_is_not_discarded_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FilePool, "discard", lambda self, keys: None)
    assert any_is_red(map(with_files, range(8)))


@pytest.mark.long
def test_a_scan_of_another_coordinator_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scan = FilePool.scan

    def go_on(self: FilePool, *prefixes: Any) -> None:
        if not is_scanning(self):
            scan(self, *prefixes)

    monkeypatch.setattr(FilePool, "scan", go_on)
    assert any_is_red(with_files(seed, num_restarts=3) for seed in range(40))


def turns_red(num_seeds: int = 10) -> bool:
    return any_is_red(scenario_of(seed, "full, window") for seed in range(num_seeds))


def test_with_all_rules_the_schedules_are_green() -> None:
    assert not turns_red(5)


def test_a_load_into_blocks_that_a_step_still_reads_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefixLoads, "may_be_written", lambda self, load_id: True)
    assert turns_red()


def test_a_load_of_other_blocks_turns_the_simulation_red(monkeypatch: pytest.MonkeyPatch) -> None:
    keys_of = TierHitFinder.keys_of

    def shifted(self: TierHitFinder, request: Any, group: int, columns: Any) -> Any:
        keys = keys_of(self, request, group, columns)
        return [*keys[1:], *keys[:1]] if not isinstance(columns, range) else keys

    monkeypatch.setattr(TierHitFinder, "keys_of", shifted)
    assert turns_red()


@pytest.mark.long
def test_a_load_that_counts_before_every_rank_has_it_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advance = PrefixLoading.advance

    def too_early(self: PrefixLoading, now_s: float) -> list[Command]:
        commands = advance(self, now_s)
        for wish in list(self._wishes.values()):
            if wish.load is not None and wish.stage.value == "loading":
                self._loads.finish(wish.load.load_id)
                wish.stage = type(wish.stage)("loaded")
        return commands

    monkeypatch.setattr(PrefixLoading, "advance", too_early)
    assert turns_red()


def test_labels_of_blocks_that_loads_take_must_be_withdrawn_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follow = Offloading.follow

    def deaf(self: Offloading, commands: Any, **rest: Any) -> None:
        follow(self, commands, **rest)
        if isinstance(commands, list):
            commands.clear()  # evictions for a load are never sent

    monkeypatch.setattr(Offloading, "follow", deaf)
    assert turns_red()


def test_a_failed_copy_of_one_rank_fails_it_everywhere_and_service_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, failed = TransferJobs.start, []

    def sometimes(self: TransferJobs, job: Any, *rest: Any) -> None:
        if (
            job.job_id % 3 == 0
            and self._pool.layout.num_blocks
            and not failed[-20:].count(job.job_id)
        ):
            failed.append(job.job_id)
            problem = replace(job, medium="nowhere")
            start(self, problem, *rest)
            return
        start(self, job, *rest)

    monkeypatch.setattr(TransferJobs, "start", sometimes)
    for seed in range(4):
        cluster = Cluster(scenario_of(seed))
        cluster.are_copies_failing = True
        cluster.play()
    assert failed
