"""The small state: saved whole or not at all, and never guessed."""

from __future__ import annotations

import stat
from pathlib import Path

import msgpack
import pytest

from kvcache.base.errors import (
    ClusterError,
    MalformedMessageError,
    SupersededError,
    VersionMismatchError,
)
from kvcache.protocol.state_store import MemoryStateStore, SmallState, StateStore
from tests.protocol.file_state_store import FileStateStore

STATE = SmallState(epoch=7, model_epoch=2, next_event_chunk=4096, hash_seed="seed")


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StateStore:
    return MemoryStateStore() if request.param == "memory" else FileStateStore(tmp_path / "state")


def test_a_state_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    store = FileStateStore(tmp_path / "state")
    store.save(SmallState(epoch=3), None)
    with pytest.raises(ClusterError, match=r"^a state of 5\d\d\d bytes, 4096 are read: shorten"):
        store.save(SmallState(epoch=4, hash_seed="x" * 5000), SmallState(epoch=3))
    assert store.load() == SmallState(epoch=3)


def test_an_unused_store_holds_nothing(store: StateStore) -> None:
    assert store.load() is None


def test_the_last_state_saved_is_found(store: StateStore) -> None:
    store.save(SmallState(epoch=1), None)
    store.save(STATE, SmallState(epoch=1))
    assert store.load() == STATE


def test_a_coordinator_that_did_not_read_the_saved_state_saves_nothing(store: StateStore) -> None:
    store.save(SmallState(epoch=1), None)
    for replaces in (None, SmallState(epoch=2)):
        with pytest.raises(SupersededError, match=r"another coordinator has begun"):
            store.save(STATE, replaces)
    assert store.load() == SmallState(epoch=1)


def test_another_store_on_the_same_file_finds_the_state(tmp_path: Path) -> None:
    FileStateStore(tmp_path / "state").save(STATE, None)
    assert FileStateStore(tmp_path / "state").load() == STATE
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"hello",
        STATE.to_bytes()[:-1],
        STATE.to_bytes() + b"x",
        msgpack.packb([2, 1, 2, 3]),
        msgpack.packb([2, 1, 2, 3, 4]),
        msgpack.packb([2, -1, 2, 3, ""]),
        msgpack.packb([2, True, 2, 3, ""]),
        msgpack.packb([2, 1, 2, 3, "", 1]),
    ],
)
def test_a_corrupted_file_is_an_error_that_names_it(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(data)
    with pytest.raises(MalformedMessageError, match=rf"state file {path} holds .*: remove it to"):
        FileStateStore(path).load()


def test_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(msgpack.packb([9, "new"]))
    with pytest.raises(VersionMismatchError, match="has version 9, this package reads version 2"):
        FileStateStore(path).load()


def test_a_state_that_cannot_be_written_is_an_error_and_the_old_one_stays(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"state file .*nowhere/state cannot be written"):
        FileStateStore(tmp_path / "nowhere" / "state").save(STATE, None)
