"""Disks that fail under a cluster that serves: it continues, every byte is right, and the reason of
fewer hits is reported."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors import LocalCluster
from kvcache.base.errors import ConfigurationError
from kvcache.coordinator.settings import OffloadStatistics
from kvcache.offload.statistics import TierStatistics
from kvcache.worker.files.file_pool import FilePool
from kvcache.worker.files.system import DirectoryFiles
from tests.actors.tier_driver import (
    BLOCK_BYTES,
    BLOCKS,
    FOUND,
    PATIENCE_S,
    play_all,
    play_until_found,
    settle,
    tier_config,
)
from tests.worker.tier_support import wait_for_files

PROMPTS = range(8)
"""After all prompts were played, six or seven of them are only in files."""


class Player:
    """Plays prompts on a cluster."""

    def __init__(self, cluster: LocalCluster, client: Any) -> None:
        self.cluster, self.client = cluster, client

    def play(self, *numbers: int) -> list[int]:
        return play_all(self.client, numbers, self.statistics)

    def find(self, number: int) -> None:
        play_until_found(self.client, number, self.statistics)

    def statistics(self) -> OffloadStatistics:
        found = self.cluster.coordinator.statistics().offload
        assert found is not None
        return found

    @property
    def disk(self) -> TierStatistics:
        found = self.statistics().tiers.disk
        assert found is not None
        return found

    def problems(self, rank: int) -> dict[str, int]:
        files = self.cluster.workers[rank].worker.statistics().transfers.files
        return dict(files.problems)

    def pool(self, rank: int) -> FilePool:
        found = self.cluster.workers[rank].worker._executor.tiers.files
        assert found is not None
        return found


@contextmanager
def serving(directory: Path, name: str = "") -> Iterator[Player]:
    """A cluster that has played all prompts; at the end no checked byte was wrong."""
    with LocalCluster(tier_config(directory, name)) as cluster, cluster.client() as client:
        player = Player(cluster, client)
        assert player.play(*PROMPTS) == [0] * len(PROMPTS)
        yield player
        assert client.failures == ()
        cluster.coordinator.check()
        for worker in cluster.workers:
            worker.worker.check()


def directory_of(root: Path, rank: int) -> Path:
    (found,) = root.glob(f"*/*/rank{rank}")
    return found


def files_of(root: Path, rank: int) -> list[Path]:
    return sorted(directory_of(root, rank).glob("??/*.kvb"))


def test_with_a_disk_that_is_well_every_prompt_is_found_again(tmp_path: Path) -> None:
    with serving(tmp_path) as player:
        assert player.play(*PROMPTS) == [FOUND] * len(PROMPTS)
        assert (player.statistics().num_failed_jobs, player.problems(0)) == (0, {})


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("spoil", "kind"), [(cut, "truncated"), (flip_a_bit, "damaged"), (Path.unlink, "missing")]
)
def test_a_spoilt_file_of_one_rank_costs_its_own_prompt_and_no_other(
    tmp_path: Path,
    spoil: Callable[[Path], None],
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(tmp_path) as player:
        victim = files_of(tmp_path, 1)[7]
        spoil(victim)
        found = player.play(*PROMPTS)
        assert sum(tokens < FOUND for tokens in found) == 1
        assert sum(found) >= (len(PROMPTS) - 1) * FOUND
        assert (player.problems(0), player.problems(1)) == ({}, {kind: 1})
        aside = [path.name for path in directory_of(tmp_path, 1).glob("set-aside/*")]
        assert aside == ([] if kind == "missing" else [f"{victim.name}.{kind}"])
        assert (player.statistics().num_failed_jobs, player.disk.num_forgotten) == (1, 1)
        assert "fetch: rank 1: 1 of 23 blocks failed: " in player.statistics().last_failure
        assert player.statistics().tiers.num_disk_rests == 0
        assert "files of rank 1: " in caplog.text
        # Computed, stored and written again.
        assert player.play(*PROMPTS) == [FOUND] * len(PROMPTS)


def test_a_disk_that_cannot_be_read_rests_and_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as player:
        with monkeypatch.context() as sick:

            def fail(*arguments: Any) -> int:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            sick.setattr(DirectoryFiles, "read", fail)
            assert player.play(0) == [0]
            told = player.statistics()
            assert told.tiers.num_disk_rests >= 1
            assert "Input/output error: look at the disk" in told.last_failure
            assert player.problems(0)["io"] > 0
            assert "files are left alone for 0.25 s: fetch: rank 0" in caplog.text
        player.find(3)
        assert player.disk.num_forgotten == 0


def test_a_full_disk_stores_no_more_blocks_and_serves_those_it_has(tmp_path: Path) -> None:
    with serving(tmp_path) as player:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            assert player.play(*range(100, 106)) == [0] * 6
            assert player.problems(0)["no_space"] > 0
            assert "free space on the disk" in player.statistics().last_failure
            assert player.play(0) == [FOUND]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert player.play(*range(200, 208)) == [0] * 8
        assert player.play(200) == [FOUND]
        assert list(directory_of(tmp_path, 0).glob("??/.*")) == []


@contextmanager
def with_room_for(num_blocks: int, root: Path) -> Iterator[Player]:
    """A cluster whose files have room for so many blocks; one thread writes them in order."""
    disk = {
        "directory": str(root),
        "capacity_per_rank": num_blocks * BLOCK_BYTES,
        "write": "on_store",
        "num_threads": 1,
    }
    config = tier_config(root, offload={"disk": disk})
    with LocalCluster(config) as cluster, cluster.client() as client:
        yield Player(cluster, client)


def test_files_that_go_make_room_for_those_that_come(tmp_path: Path) -> None:
    with with_room_for(BLOCKS * 4 // 3, tmp_path) as player:  # a prompt is three quarters of it
        player.play(*PROMPTS)
        assert player.disk.num_evicted >= (len(PROMPTS) - 2) * BLOCKS
        assert (player.statistics().num_failed_jobs, player.problems(0)) == (0, {})
        assert len(files_of(tmp_path, 0)) == player.disk.num_ready == BLOCKS * 4 // 3


def test_a_disk_that_is_read_only_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as player:

        def refuse(*arguments: Any) -> int:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        for call in ("create", "remove", "rename", "make_directory"):
            monkeypatch.setattr(DirectoryFiles, call, refuse)
        assert player.play(*range(100, 104)) == [0] * 4
        assert player.problems(1)["denied"] > 0
        assert "let the workers' user write there" in player.statistics().last_failure
        assert player.play(0) == [FOUND]


def used_bytes(player: Player, rank: int) -> int:
    return player.pool(rank).store.statistics().used_bytes


def bytes_of(root: Path, rank: int) -> int:
    return sum(path.stat().st_size for path in files_of(root, rank))


def test_a_directory_that_is_removed_is_a_miss_and_is_made_again(tmp_path: Path) -> None:
    with serving(tmp_path) as player:
        gone = directory_of(tmp_path, 0)
        shutil.rmtree(gone)
        assert sum(player.play(*PROMPTS)) <= 2 * FOUND  # what host memory had
        assert player.problems(0)["missing"] > 0
        assert player.play(*PROMPTS) == [FOUND] * len(PROMPTS)
        assert player.statistics().tiers.num_disk_rests == 0
        for rank in (0, 1):
            assert used_bytes(player, rank) == bytes_of(tmp_path, rank) > 0


def test_a_cleaner_that_removes_files_does_not_stop_spills(tmp_path: Path) -> None:
    # There is room for two and a third prompts; files that others remove make room, too.
    with with_room_for(BLOCKS * 7 // 3, tmp_path) as player:
        for first in range(0, 24, 4):
            player.play(*range(first, first + 4))
            for rank in (0, 1):
                for path in files_of(tmp_path, rank):
                    path.unlink()
        assert "quota" not in player.problems(0)
        assert player.play(100, 101, 102, 101) == [0, 0, 0, FOUND]
        for rank in (0, 1):
            assert used_bytes(player, rank) == bytes_of(tmp_path, rank) > 0


def test_a_directory_that_is_renamed_is_used_where_it_is(tmp_path: Path) -> None:
    with serving(tmp_path) as player:
        here = directory_of(tmp_path, 0)
        here.rename(tmp_path / "elsewhere")
        here.write_text("no directory")
        assert player.play(*PROMPTS) == [FOUND] * len(PROMPTS)
        assert (player.statistics().num_failed_jobs, player.problems(0)) == (0, {})


def test_a_worker_that_takes_a_lost_ones_place_goes_without_files_where_it_must(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as player:
        here = directory_of(tmp_path, 1)
        here.rename(tmp_path / "elsewhere")
        here.write_text("no directory")
        others = files_of(tmp_path, 0)
        player.cluster.restart_worker(1)
        assert player.play(0) == [0]
        transfers = player.cluster.workers[1].worker.statistics().transfers
        assert transfers.files is None
        assert "cannot be used (File exists)" in transfers.files_problem
        assert player.statistics().tiers.disk_problem == (
            "rank 1 works without files: look into its log"
        )
        assert "rank 1 works without files: " in caplog.text
        player.play(*PROMPTS)
        assert player.play(PROMPTS[-1]) == [FOUND]  # in host memory
        assert player.statistics().num_failed_jobs == 0
        assert files_of(tmp_path, 0) == others  # they may be of use yet
        here.unlink()
        (tmp_path / "elsewhere").rename(here)
        player.cluster.restart_worker(1)
        player.find(0)
        assert player.statistics().tiers.disk_problem == ""


def test_a_launch_onto_a_directory_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, "mine"):
        pass
    here = directory_of(tmp_path, 1)
    shutil.rmtree(here)
    here.write_text("no directory")
    with pytest.raises(ConfigurationError, match="choose another root"):
        LocalCluster(tier_config(tmp_path, "mine"))
    with pytest.raises(ConfigurationError, match="make or mount it first"):
        LocalCluster(tier_config(tmp_path / "not there"))


def test_what_one_cluster_wrote_the_next_one_finds(tmp_path: Path) -> None:
    with serving(tmp_path, "same"):
        pass
    with LocalCluster(tier_config(tmp_path, "same")) as cluster, cluster.client() as client:
        player = Player(cluster, client)
        assert player.play(*PROMPTS) == [FOUND] * len(PROMPTS)
        assert client.failures == ()
        assert player.statistics().num_adopted_blocks == len(PROMPTS) * BLOCKS


def test_a_coordinator_that_is_restarted_finds_what_ranks_have(tmp_path: Path) -> None:
    with serving(tmp_path) as player:
        player.cluster.restart_coordinator()
        assert player.play(*PROMPTS) == [FOUND] * len(PROMPTS)


def test_what_cannot_be_removed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as player:
        with monkeypatch.context() as sick:

            def refuse(*arguments: Any) -> None:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

            sick.setattr(DirectoryFiles, "remove", refuse)
            player.client.reset_prefix_cache()
            settle(player.client, player.statistics)
            for rank in range(2):
                assert wait_for_files(player.pool(rank), PATIENCE_S)
                assert len(player.pool(rank)._undone) == len(PROMPTS) * BLOCKS
        player.play(*range(100, 108))
        for rank in range(2):
            assert wait_for_files(player.pool(rank), PATIENCE_S)
            assert len(player.pool(rank)._undone) == 0
            assert len(files_of(tmp_path, rank)) == player.disk.num_ready
