"""One directory of files with several writers: the limit, the bytes, and what followers learn.

The model is the directory itself: how many names there are, and which key has which bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import time
import uuid
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np
import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.integrations.vllm.shared_directory import SharedDirectory
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.options import TierOptions
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.offload.tier_manager import TierManager
from kvcache.worker.files import shared
from kvcache.worker.files.format import FileHead, FileTierError
from kvcache.worker.files.shared import RING, ChangeLog, DirectoryFollower, SharedFiles, position_in
from kvcache.worker.files.store import FileStore, StoreLimits
from kvcache.worker.files.system import DirectoryFiles
from kvcache.worker.files.tier import FileTier, FileTierSettings
from tests.walks import random_walk
from tests.worker.tier_support import SHAPE, random_head

DEADLINE_S = 30.0
MAX_FILES = 7
NUM_KEYS = 12


def payload_of(number: int) -> bytes:
    return np.random.default_rng(number).bytes(96)


HEADS = [random_head(np.random.default_rng(100 + i), payload_of(i)) for i in range(NUM_KEYS)]
KEYS = [random.Random(i).randbytes(32) + bytes(4) for i in range(NUM_KEYS)]
NUMBERS = {head.key: number for number, head in enumerate(HEADS)}


def views(payload: bytes | bytearray) -> list[memoryview]:
    whole = memoryview(payload)
    return [whole[:64], whole[64:]]


def path_of(directory: Path, head: FileHead) -> Path:
    text = head.key.hex()
    return directory / text[:2] / f"{text}.kvb"


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("??/*") if path.suffix in (".kvb", ".tmp")]


def keys_in(directory: Path) -> set[bytes]:
    return {bytes.fromhex(name[:-4]) for name in names_in(directory) if name.endswith(".kvb")}


class Killed(BaseException):
    """The process has been killed: none of its code runs any more."""


class Fate:
    """Kills a process before or after one of its next system calls."""

    def __init__(self) -> None:
        self.calls_left = -1
        self.files: set[int] = set()

    def pass_by(self) -> None:
        if self.calls_left == 0:
            raise Killed
        self.calls_left -= 1


class MortalFiles(DirectoryFiles):
    fate: Fate

    def create(self, name: str) -> int:
        self.fate.pass_by()
        file = super().create(name)
        self.fate.files.add(file)
        self.fate.pass_by()
        return file

    def write(self, descriptor: int, buffers: object, offset: int) -> int:
        self.fate.pass_by()
        return super().write(descriptor, buffers, offset)  # type: ignore[arg-type]

    def close(self, descriptor: int) -> None:
        self.fate.files.discard(descriptor)
        super().close(descriptor)

    def rename(self, name: str, new_name: str) -> None:
        self.fate.pass_by()
        super().rename(name, new_name)
        self.fate.pass_by()

    def remove(self, name: str) -> None:
        self.fate.pass_by()
        super().remove(name)
        self.fate.pass_by()


class MortalSharedFiles(SharedFiles, MortalFiles):
    def __init__(self, directory: int, log: MortalLog, fate: Fate) -> None:
        self.fate = fate
        super().__init__(directory, MAX_FILES, log)


class MortalLog(ChangeLog):
    def __init__(self, directory: int, fate: Fate) -> None:
        super().__init__(directory, SHAPE.key_bytes)
        self.fate = fate

    def set_count(self, num_files: int) -> None:
        self.fate.pass_by()
        super().set_count(num_files)


class Writer:
    """One process, which has read what there is."""

    def __init__(self, directory: Path) -> None:
        self.fate = Fate()
        self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.log = MortalLog(self.fd, self.fate)
        files = MortalSharedFiles(self.fd, self.log, self.fate)
        self.store = FileStore(files, SHAPE, StoreLimits(is_shared=True), uuid.uuid4().hex)
        for prefix in range(256):
            self.store.scan(prefix)

    def die(self) -> None:
        """Close what the kernel closes."""
        for file in self.fate.files:
            os.close(file)
        self.log.close()
        os.close(self.fd)


class Walk:
    """Three writers on one directory, and a process that only looks."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.done: Counter[str] = Counter()
        self.writers = [Writer(directory) for _ in range(3)]
        self.follower = DirectoryFollower(
            str(directory), position_in(str(directory)), SHAPE.key_bytes
        )
        self.believed: set[bytes] = set()
        self.is_exact = True

    @contextmanager
    def _lives(self, place: int):  # type: ignore[no-untyped-def]
        """A call of a process, which may be killed in it and is then started again."""
        try:
            yield self.writers[place].store
        except Killed:
            self.done["kill"] += 1
            self.writers[place].die()
            self._compare(self.writers[place - 1].log)
            self.writers[place] = Writer(self.directory)
        except FileTierError as error:
            self.done[error.kind] += 1
            assert error.kind in ("quota", "missing", "damaged", "truncated")
            if error.kind == "quota":
                assert len(names_in(self.directory)) == MAX_FILES

    def write(self) -> None:
        number = self.random.randrange(NUM_KEYS)
        with self._lives(self.random.randrange(3)) as store:
            self.done["write"] += store.write(HEADS[number], views(payload_of(number))) > 0

    def read(self) -> None:
        number, found = self.random.randrange(NUM_KEYS), bytearray(96)
        with self._lives(self.random.randrange(3)) as store:
            assert store.read(HEADS[number].key, views(found)) == HEADS[number]
            assert found == payload_of(number)
            self.done["read"] += 1

    def discard(self) -> None:
        with self._lives(self.random.randrange(3)) as store:
            store.discard(self.random.choice(HEADS).key)

    def arm(self) -> None:
        self.is_exact = False
        self.random.choice(self.writers).fate.calls_left = self.random.randrange(9)

    def damage(self) -> None:
        path = path_of(self.directory, self.random.choice(HEADS))
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[self.random.randrange(len(data))] ^= 1
            path.write_bytes(data[: self.random.choice([len(data), len(data), 9])])

    def take_away(self) -> None:
        self.is_exact = False
        with suppress(FileNotFoundError):
            path_of(self.directory, self.random.choice(HEADS)).unlink()

    def scan(self) -> None:
        with self._lives(self.random.randrange(3)) as store:
            for prefix in range(256):
                for head in store.scan(prefix).heads:
                    assert head == HEADS[NUMBERS[head.key]]

    def follow(self) -> None:
        changes = self.follower.changes()
        for key, is_there in changes.items():
            (self.believed.add if is_there else self.believed.discard)(key)
        if self.is_exact:
            assert self.believed == keys_in(self.directory)

    def compare(self) -> None:
        self._compare(self.writers[0].log)

    def _compare(self, log: MortalLog) -> None:
        num_names = len(names_in(self.directory))
        assert num_names <= MAX_FILES
        with log.locked() as is_known:
            assert is_known
            assert log.num_files == num_names if self.is_exact else log.num_files >= num_names

    def end(self) -> None:
        for writer in self.writers:
            writer.die()
        last = Writer(self.directory)
        assert not [name for name in names_in(self.directory) if name.endswith(".tmp")]
        with last.log.locked():
            assert last.log.num_files == len(names_in(self.directory))
        last.die()
        self.follower.close()


@pytest.mark.seeds(8, long=64)
def test_the_limit_and_the_bytes_hold_whatever_writers_do(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "AGAIN_S", 0.0)  # so that what was left out is counted at once
    walk = Walk(tmp_path, seed)
    weights = {walk.write: 10.0, walk.read: 6, walk.discard: 4, walk.follow: 2, walk.scan: 0.1}
    if seed % 2:
        weights |= {walk.arm: 1, walk.take_away: 0.3, walk.damage: 0.3}
    random_walk(f"seed {seed}", walk.random, weights, 600, walk.compare)
    walk.end()
    assert walk.done["write"] > 30 and walk.done["read"] > 30 and walk.done["quota"] > 5
    assert not seed % 2 or walk.done["kill"] > 10


def test_a_block_that_is_there_is_not_written_again_and_followers_are_told(tmp_path: Path) -> None:
    first, second = Writer(tmp_path), Writer(tmp_path)
    assert first.store.write(HEADS[0], views(payload_of(0))) > 0
    found = os.stat(path_of(tmp_path, HEADS[0])).st_ino
    follower = DirectoryFollower(str(tmp_path), position_in(str(tmp_path)), SHAPE.key_bytes)
    assert follower.changes() == {}
    assert second.store.write(HEADS[0], views(payload_of(0))) == 0
    assert os.stat(path_of(tmp_path, HEADS[0])).st_ino == found
    assert follower.changes() == {HEADS[0].key: True}
    assert second.store.discard(HEADS[0].key)
    assert not first.store.discard(HEADS[0].key)
    assert follower.changes() == {HEADS[0].key: False}


def test_a_file_that_is_removed_while_it_is_looked_at_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Writer(tmp_path), Writer(tmp_path)
    first.store.write(HEADS[0], views(payload_of(0)))
    follower = DirectoryFollower(str(tmp_path), position_in(str(tmp_path)), SHAPE.key_bytes)
    look, removals = first.store._files._has, iter([second.store.discard])

    def look_and_lose(name: str) -> bool:
        found = look(name)
        for remove in removals:
            assert remove(HEADS[0].key)
        return found

    monkeypatch.setattr(first.store._files, "_has", look_and_lose)
    assert first.store.write(HEADS[0], views(payload_of(0))) > 0
    assert keys_in(tmp_path) == {HEADS[0].key}
    assert follower.changes() == {HEADS[0].key: True}


def test_what_a_dead_writer_has_begun_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path: Path,
) -> None:
    dead, living = Writer(tmp_path), Writer(tmp_path)
    path_of(tmp_path, HEADS[0]).parent.mkdir()
    dead.fate.calls_left = 3  # before it writes bytes
    with pytest.raises(Killed):
        dead.store.write(HEADS[0], views(payload_of(0)))
    name = f"{HEADS[0].key.hex()[:2]}/.of-the-living.tmp"
    file = living.store._files.create(name)
    assert len(names_in(tmp_path)) == 2
    dead.die()
    Writer(tmp_path)
    assert names_in(tmp_path) == [".of-the-living.tmp"]
    with living.log.locked():
        assert living.log.num_files == 1
    os.close(file)
    living.store.scan(HEADS[0].key[0])
    assert names_in(tmp_path) == []
    with living.log.locked():
        assert living.log.num_files == 0


def test_a_follower_that_is_too_far_behind_lists_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RING > 10_000
    monkeypatch.setattr(shared, "RING", 8)
    writer = Writer(tmp_path)
    follower = DirectoryFollower(str(tmp_path), position_in(str(tmp_path)), SHAPE.key_bytes)
    for _ in range(4):
        writer.store.write(HEADS[0], views(payload_of(0)))
        writer.store.discard(HEADS[0].key)
    assert follower.changes() is None  # the next change would be written over the first one
    writer.store.write(HEADS[1], views(payload_of(1)))
    assert follower.changes() == {HEADS[1].key: True}
    assert follower.keys() == {HEADS[1].key}
    (tmp_path / "changes").write_bytes(b"something else")
    assert follower.changes() == {}
    writer.store.write(HEADS[2], views(payload_of(2)))  # counts the files again
    with writer.log.locked():
        assert writer.log.num_files == 2
    assert follower.changes() is None
    (tmp_path / "changes").unlink()
    writer.store.write(HEADS[3], views(payload_of(3)))
    with writer.log.locked():
        assert writer.log.num_files == 3
    assert follower.changes() is None
    assert follower.keys() == {head.key for head in HEADS[1:4]}


def test_a_follower_lists_the_directory_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    follower = DirectoryFollower(str(tmp_path), position_in(str(tmp_path)), SHAPE.key_bytes)
    writer.store.write(HEADS[0], views(payload_of(0)))

    def fail(start: int, end: int) -> list[bytes]:
        raise OSError(errno.EIO, "no luck")

    with monkeypatch.context() as patched:
        patched.setattr(follower, "_read", fail)
        with pytest.raises(OSError, match="no luck"):
            follower.changes()
    assert follower.changes() is None
    assert follower.keys() == {HEADS[0].key}
    assert follower.changes() == {}


def test_a_writer_that_hangs_with_the_lock_stops_writes_and_no_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LOCK_S", 0.02)
    writer = Writer(tmp_path)
    writer.store.write(HEADS[0], views(payload_of(0)))
    hanging = os.open(tmp_path / "changes", os.O_RDWR)
    fcntl.flock(hanging, fcntl.LOCK_EX)
    for _ in range(2):
        with pytest.raises(FileTierError, match="has locked changes, and does not go on: end it"):
            writer.store.write(HEADS[1], views(payload_of(1)))
    with pytest.raises(FileTierError, match="does not go on"):
        writer.store.discard(HEADS[0].key)
    found = bytearray(96)
    assert writer.store.read(HEADS[0].key, views(found)) == HEADS[0]
    settings = FileTierSettings(tmp_path / "root", "name", max_shared_files=4)
    settings.root.mkdir()
    tier = FileTier(settings, SHAPE, "me")
    blocked = os.open(tier.directory / "changes", os.O_RDWR)
    fcntl.flock(blocked, fcntl.LOCK_EX)
    with pytest.raises(ConfigurationError, match=r"cannot be shared .*end processes of this name"):
        FileTier(settings, SHAPE, "other")
    os.close(blocked)
    os.close(hanging)  # it is killed
    tier.close()
    writer.store.write(HEADS[1], views(payload_of(1)))


class RankFiles:
    """The directory of one rank, in which any replica writes."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.log = ChangeLog(self.fd, len(KEYS[0]))
        self.files = SharedFiles(self.fd, 2 * NUM_KEYS, self.log)

    def write(self, key: bytes) -> None:
        name = key.hex()
        self.files.make_directory(name[:2])
        if not self.files.is_complete(f"{name[:2]}/{name}.kvb"):
            self.files.close(self.files.create(f"{name[:2]}/.{name}.me.tmp"))
            self.files.rename(f"{name[:2]}/.{name}.me.tmp", f"{name[:2]}/{name}.kvb")

    def remove(self, key: bytes) -> None:
        with suppress(FileNotFoundError):
            self.files.remove(f"{key.hex()[:2]}/{key.hex()}.kvb")

    def close(self) -> None:
        self.log.close()
        os.close(self.fd)


class TwoRanks:
    """The tiers of a replica that only looks, and the directories of its two ranks."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random, self.now_s = random.Random(seed), 0.0
        self.ranks = [RankFiles(directory / f"rank{rank}") for rank in range(2)]
        self.directory = SharedDirectory(
            [
                DirectoryFollower(str(rank.directory), position_in(str(rank.directory)), 36)
                for rank in self.ranks
            ]
        )
        host = TierManager(TierOptions(HOST_MEDIUM, 4))
        disk = TierManager(TierOptions(FILE_MEDIUM, NUM_KEYS))
        self.tiers = TierHierarchy(host, disk, count(1).__next__)
        self.num_ready = 0

    def write(self) -> None:
        key = self.random.choice(KEYS)
        for rank in self.random.choice([self.ranks, self.ranks[::-1], self.ranks[:1]]):
            rank.write(key)
            if self.random.random() < 0.2:
                self.look()

    def remove(self) -> None:
        key = self.random.choice(KEYS)
        for rank in self.random.choice([self.ranks, self.ranks[::-1], self.ranks[1:]]):
            rank.remove(key)
            if self.random.random() < 0.2:
                self.look()

    def look(self) -> None:
        self.now_s += 1
        self.directory.follow(self.tiers, self.now_s)
        first, second = (keys_in(rank.directory) for rank in self.ranks)
        assert set(self.tiers.disk.slots.present_keys()) == first & second
        self.num_ready += len(first & second)
        self.tiers.check()


@pytest.mark.seeds(6, long=64)
def test_a_key_is_a_hit_once_all_ranks_have_its_file(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        monkeypatch.setattr(shared, "RING", 6)  # it falls behind, and lists
    walk = TwoRanks(tmp_path, seed)
    weights = {walk.write: 5.0, walk.remove: 3, walk.look: 1}
    random_walk(f"seed {seed}", walk.random, weights, 300, lambda: None)
    walk.look()
    assert walk.num_ready > 50
    for rank in walk.ranks:
        rank.close()


def test_without_its_directory_a_replica_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    walk = TwoRanks(tmp_path, 0)
    walk.ranks[0].write(KEYS[0])
    walk.ranks[1].write(KEYS[0])
    walk.look()
    shutil.rmtree(tmp_path)
    for _ in range(2):
        walk.now_s += 1
        walk.directory.follow(walk.tiers, walk.now_s)
    assert caplog.text.count("files of other replicas are not looked at") == 2


def test_damaged_changes_end_no_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    walk, draw = TwoRanks(tmp_path, 0), random.Random(0)
    path = tmp_path / "rank0" / "changes"
    walk.directory = SharedDirectory([DirectoryFollower(str(path.parent), 0, 36)])
    for _ in range(60):
        walk.ranks[0].write(draw.choice(KEYS))
        data = bytearray(path.read_bytes())
        if draw.random() < 0.2:
            path.write_bytes(data[: draw.randrange(len(data))])
        else:
            data[-draw.randrange(1, 40)] ^= 0xFF
            path.write_bytes(data)
        walk.now_s += 1
        walk.directory.follow(walk.tiers, walk.now_s)
        walk.ranks[0].remove(draw.choice(KEYS))
    walk.tiers.check()
    assert "following the files of other replicas failed; the engine goes on" in caplog.text
    last = DirectoryFollower(str(tmp_path / "rank0"), -1, 36)
    assert last.changes() is None


def write_on_and_on(root: Path, seed: int, said: Connection) -> None:
    """Write, read and discard until the process is killed; say when it has begun, and each error
    that must not be."""
    tier = FileTier(FileTierSettings(root, "n", max_shared_files=MAX_FILES), SHAPE, str(seed))
    draw, found = random.Random(seed), bytearray(96)
    said.send("begun")
    while True:
        number = draw.randrange(NUM_KEYS)
        try:
            if draw.random() < 0.5:
                tier.store.write(HEADS[number], views(payload_of(number)))
            elif draw.random() < 0.5:
                tier.store.discard(HEADS[number].key)
            elif tier.store.read(HEADS[number].key, views(found)) and found != payload_of(number):
                said.send("wrong bytes")
        except FileTierError as error:
            if error.kind not in ("quota", "missing") and "does not go on" not in str(error):
                said.send(f"{error.kind}: {error}")


def test_the_limit_holds_for_three_processes_that_are_killed_and_stopped(tmp_path: Path) -> None:
    draw, fork = random.Random(4), get_context("fork")
    heard: list[Connection] = []

    def start(seed: int) -> ForkProcess:
        hear, say = fork.Pipe(duplex=False)
        process = fork.Process(target=write_on_and_on, args=(tmp_path, seed, say), daemon=True)
        process.start()
        say.close()
        assert hear.poll(DEADLINE_S) and hear.recv() == "begun"
        heard.append(hear)
        return process

    processes = [start(seed) for seed in range(3)]
    directory = tmp_path / "n" / "layout" / "rank1"
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    log = ChangeLog(fd, SHAPE.key_bytes)
    largest = num_looks = 0
    for seed in range(3, 9):
        victim = draw.randrange(3)
        stopped = processes[victim - 1].pid or 0
        os.kill(stopped, signal.SIGSTOP)
        for _ in range(10):
            with suppress(OSError), log.locked():  # unless the lock belongs to who is stopped
                largest = max(largest, len(names_in(directory)))
                num_looks += 1
            time.sleep(0.005)
        os.kill(stopped, signal.SIGCONT)
        processes[victim].kill()
        processes[victim].join()
        processes[victim] = start(seed)
    for process in processes:
        process.kill()
        process.join()
    for hear in heard:
        with suppress(EOFError):
            raise AssertionError(hear.recv())
    assert num_looks > 0
    assert 0 < largest <= MAX_FILES
    os.close(fd)
    log.close()
