"""Vandalise a cluster's files while they are written and read.

A cluster in this process plays prompts that its tiers store and load again. Meanwhile a thread
removes, truncates, changes, swaps, hides and replaces files and directories below the tier's root,
as a cleaner, an operator or a broken disk would. Every loaded byte is checked. When the vandal has
stopped and the directories have been read again, the state of every rank matches its disk, the
coordinator's state and the events match that, and newly stored blocks are found.

    python -m tests.attack.vanishing_files --seconds 600 --seed 7
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from actors import LocalCluster
from kvcache.offload.events import OffloadingEvent
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.specs import FILE_MEDIUM
from kvcache.worker.files.store import SUFFIX
from tests.actors.tier_driver import (
    BLOCK_BYTES,
    BLOCKS,
    FOUND,
    play,
    play_all,
    play_until_found,
    settle,
    tier_config,
)
from tests.worker.tier_support import wait_for_files

NUM_PROMPTS = 12
"""Prompts that are repeated; files have room for most of them."""

ROOM_IN_PROMPTS = 9
PAUSE_S = 0.003
"""Pause between two acts of vandalism, at most ten times as long."""


class Vandal:
    """Vandalises the files below a directory, as drawn by a seed."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root = root
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vandal")
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Vandal:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for path in [self._root, *self._root.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)

    def _run(self) -> None:
        acts = [getattr(self, name) for name in dir(type(self)) if name.startswith("act_")]
        weights = [1 if "whole" in act.__name__ else 8 for act in acts]
        while not self._stop.wait(self._random.uniform(PAUSE_S, 10 * PAUSE_S)):
            act = self._random.choices(acts, weights)[0]
            with suppress(OSError):  # another thread was faster
                act()
                self.counts[act.__name__] += 1

    # --- targets

    def _ranks(self) -> list[Path]:
        return sorted(self._root.glob("*/*/rank*"))

    def _directories(self) -> list[Path]:
        return [path for rank in self._ranks() for path in sorted(rank.glob("??"))]

    def _files(self) -> list[Path]:
        return [path for rank in self._ranks() for path in sorted(rank.glob(f"??/*{SUFFIX}"))]

    def _file(self) -> Path:
        files = self._files()
        if not files:
            raise FileNotFoundError
        return self._random.choice(files)

    def _directory(self) -> Path:
        directories = self._directories()
        if not directories:
            raise FileNotFoundError
        return self._random.choice(directories)

    def _emptied(self, path: Path) -> Path:
        """Remove a path; return it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        return path

    # --- acts

    def act_remove_some(self) -> None:
        share = self._random.choice((0.05, 0.3, 1.0))
        for path in self._files():
            if self._random.random() < share:
                with suppress(OSError):
                    path.unlink()

    def act_cut(self) -> None:
        path = self._file()
        os.truncate(path, self._random.randrange(path.stat().st_size + 1))

    def act_change_a_bit(self) -> None:
        with self._file().open("r+b") as file:
            place = self._random.randrange(os.fstat(file.fileno()).st_size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << self._random.randrange(8)]))

    def act_swap_files(self) -> None:
        one, other = self._file(), self._file()
        aside = one.with_name("swapped")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)

    def act_swap_directories(self) -> None:
        one, other = self._directory(), self._directory()
        aside = one.with_name("swapped")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)

    def act_remove_a_directory(self) -> None:
        self._emptied(self._directory())

    def act_hide(self) -> None:
        self._random.choice((self._file(), self._directory())).chmod(0)

    def act_directory_for_file(self) -> None:
        path = self._emptied(self._file())
        path.mkdir()
        if self._random.random() < 0.5:
            path.joinpath("some").write_bytes(b"thing")

    def act_pipe_for_file(self) -> None:
        os.mkfifo(self._emptied(self._file()))

    def act_link_for_file(self) -> None:
        target = self._random.choice(("/dev/zero", "nowhere", str(self._file())))
        self._emptied(self._file()).symlink_to(target)

    def act_socket_for_file(self) -> None:
        path = self._emptied(self._file())
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(f"/proc/self/fd/{directory}/{path.name}"[:107])
        finally:
            os.close(directory)

    def act_file_for_directory(self) -> None:
        self._emptied(self._directory()).write_bytes(b"no directory")

    def act_spoil_what_is_set_aside(self) -> None:
        path = self._random.choice(self._ranks() or [self._root]) / "set-aside"
        self._emptied(path)
        if self._random.random() < 0.5:
            path.write_bytes(b"no directory")

    def act_remove_the_whole_rank(self) -> None:
        shutil.rmtree(self._random.choice(self._ranks() or [self._root / "none"]))

    def act_remove_the_whole_cluster(self) -> None:
        for path in self._root.iterdir():
            shutil.rmtree(path)


@contextmanager
def told_of_files() -> Iterator[Callable[[TierHierarchy], set[bytes]]]:
    """Return a function that returns the files promised by a hierarchy's events so far."""
    told: dict[int, set[bytes]] = {}
    take_events = TierHierarchy.take_events

    def listen(self: TierHierarchy) -> tuple[OffloadingEvent, ...]:
        events = take_events(self)
        promised = told.setdefault(id(self), set())
        for event in events:
            if event.medium == FILE_MEDIUM:
                (promised.difference_update if event.removed else promised.update)(event.keys)
        return events

    with patch.object(TierHierarchy, "take_events", listen):
        yield lambda tiers: told.get(id(tiers), set())


class Attack:
    """One cluster, its vandal, and the checks."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root = root
        self._seed = seed
        self._random = random.Random(-seed)
        capacity = ROOM_IN_PROMPTS * BLOCKS * BLOCK_BYTES
        disk = {"directory": str(root), "capacity_per_rank": capacity, "write": "on_store"}
        anywhere = "tcp://127.0.0.1:0"
        events = {"enabled": True, "endpoint": anywhere, "replay_endpoint": anywhere}
        self._config = tier_config(root, offload={"disk": disk}, events=events)
        self.num_found = 0
        self.counts: Counter[str] = Counter()

    def run(self, goes_on: Callable[[int], bool]) -> None:
        """Play prompts while `goes_on(prompts so far)`; raises AssertionError."""
        with (
            told_of_files() as promised,
            LocalCluster(self._config) as self._cluster,
            self._cluster.client() as self._client,
        ):
            num_played = 0
            with Vandal(self._root, self._seed) as vandal:
                while goes_on(num_played):
                    self.num_found += play(self._client, self._random.randrange(NUM_PROMPTS)) > 0
                    num_played += 1
            self.counts = vandal.counts
            settle(self._client, self._statistics)
            self._check_promises(promised)
            self._cluster.restart_coordinator()
            play_all(self._client, range(100, 103), self._statistics)
            self._check_promises(promised)
            self._check_disks()
            # The tier still serves.
            assert "quota" not in self._problems(), self._problems()
            new = range(200, 200 + ROOM_IN_PROMPTS - 2)
            play_all(self._client, new, self._statistics)
            for number in new:
                play_until_found(self._client, number, self._statistics)
            settle(self._client, self._statistics)
            self._check_promises(promised)
            self._check_disks()
            assert play(self._client, new[-1]) == FOUND
            assert self._client.failures == (), self._client.failures
            self._cluster.coordinator.check()
            for worker in self._cluster.workers:
                worker.worker.check()

    def _statistics(self) -> Any:
        return self._cluster.coordinator.statistics().offload

    @property
    def _tiers(self) -> TierHierarchy:
        epoch_state = self._cluster.coordinator._epoch_state
        return epoch_state._offloading.tiers

    def _check_promises(self, promised: Callable[[TierHierarchy], set[bytes]]) -> None:
        """Check that routers know exactly the coordinator's contents."""
        disk = self._tiers.disk
        told, there = promised(self._tiers), set(disk.slots.present_keys())
        assert told == there, f"{len(told - there)} promised, {len(there - told)} not"

    def _check_disks(self) -> None:
        """Check that every rank has the coordinator's contents, and knows their size."""
        disk = self._tiers.disk
        promised = set(disk.slots.present_keys())
        for rank, worker in enumerate(self._cluster.workers):
            pool = worker.worker._executor.tiers.files
            assert pool is not None
            assert wait_for_files(pool, 60.0)
            (directory,) = self._root.glob(f"*/*/rank{rank}")
            found = {
                bytes.fromhex(p.stem): p.stat().st_size for p in directory.glob(f"??/*{SUFFIX}")
            }
            assert found.keys() == promised, (rank, len(found), len(promised))
            assert pool.store.statistics().used_bytes == sum(found.values())
            assert list(directory.glob("??/.*")) == []

    def _problems(self) -> dict[str, int]:
        problems: Counter[str] = Counter()
        for worker in self._cluster.workers:
            files = worker.worker.statistics().transfers.files
            problems.update(files.problems)
        return dict(problems)


def attack(seed: int, goes_on: Callable[[int], bool]) -> Attack:
    """Attack one cluster; raises AssertionError with the seed if a check fails."""
    with tempfile.TemporaryDirectory(prefix="kvc-attack-") as directory:
        made = Attack(Path(directory), seed)
        try:
            made.run(goes_on)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return made


def main() -> None:
    """Attack for the requested time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end_s, seed = time.monotonic() + options.seconds, options.seed
    while time.monotonic() < end_s:
        made = attack(seed, lambda num_played: num_played < 100)
        print(
            f"seed {seed}: {made.num_found} of 100 prompts found, {dict(made.counts)}", flush=True
        )
        seed += 1


if __name__ == "__main__":
    main()
