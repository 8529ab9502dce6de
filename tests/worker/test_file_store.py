"""Blocks in files: written whole or not at all, and read only if everything is right."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcache.base.errors import ConfigurationError, InvariantError
from kvcache.offload.keys import label_keys
from kvcache.worker.files.format import FileHead, FileTierError, labels_of_heads, pack_head
from kvcache.worker.files.store import FileStore, StoreLimits
from kvcache.worker.files.tier import FileTier, FileTierSettings
from tests.forked import in_a_fork
from tests.worker.tier_support import PLAIN, SHAPE, FaultyFiles, files_below, random_head

PAYLOAD = bytes(range(96))


def make_store(
    directory: Path, limits: StoreLimits | None = None, writer: str = "me"
) -> tuple[FileStore, FaultyFiles]:
    files = FaultyFiles(directory)
    return FileStore(files, SHAPE, limits or StoreLimits(), writer), files


def views(payload: bytes | bytearray = PAYLOAD) -> list[memoryview]:
    """The payload in two pieces, as host slots have it."""
    whole = memoryview(payload)
    return [whole[:64], whole[64:]]


def written(store: FileStore, seed: int = 0) -> FileHead:
    head = random_head(np.random.default_rng(seed), PAYLOAD)
    store.write(head, views())
    return head


def path_of(directory: Path, head: FileHead) -> Path:
    text = head.key.hex()
    return directory / text[:2] / f"{text}.kvb"


def read(store: FileStore, key: bytes) -> tuple[FileHead, bytes]:
    found = bytearray(96)
    return store.read(key, views(found)), bytes(found)


def test_a_block_comes_back_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    for sync in ("never", "file", "directory"):
        store, files = make_store(tmp_path, StoreLimits(sync=sync))
        for seed in range(20):
            head = written(store, seed)
            assert read(store, head.key) == (head, PAYLOAD)
        assert files.open_descriptors == set()
        assert store.statistics().problems == {}


def test_a_file_with_a_long_head_is_read_to_its_end(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    head = replace(random_head(np.random.default_rng(0), PAYLOAD), extra_keys=b"k" * 10_000)
    store.write(head, views())
    assert read(store, head.key) == (head, PAYLOAD)


def test_a_block_without_a_file_is_a_miss(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    with pytest.raises(FileTierError, match=r"^block 0011223344556677 has no file$") as caught:
        read(store, bytes.fromhex("0011223344556677"))
    assert caught.value.kind == "missing"
    assert store.statistics().problems == {"missing": 1}


def damage(path: Path, what: str, head: FileHead) -> None:
    data = bytearray(path.read_bytes())
    if what == "cut in its head":
        del data[30:]
    elif what == "cut in its payload":
        del data[-1:]
    elif what == "empty":
        data.clear()
    elif what == "longer":
        data += b"more"
    elif what == "a bit in its head":
        data[40] ^= 4
    elif what == "a bit in its payload":
        data[-7] ^= 4
    elif what == "something else":
        data[:4] = b"ELF!"
    elif what == "a newer format":
        data[4] = 9
    else:
        changes: dict[str, dict[str, object]] = {
            "another layout": {"layout_fingerprint": "other"},
            "another rank": {"rank": 2},
            "another block": {"key": b"12345678"},
            "another digest": {"digest": b"1234", "namespace": PLAIN},
            "an unreadable namespace": {"namespace": b"?"},
            "smaller blocks": {"block_bytes": 95},
        }
        data = bytearray(pack_head(replace(head, **changes[what])) + PAYLOAD)
        if what == "smaller blocks":
            del data[-1:]
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("what", "kind", "reason"),
    [
        ("cut in its head", "truncated", "the file ends within its head, at byte 30"),
        ("cut in its payload", "truncated", r"the file has \d+ bytes, its head says \d+"),
        ("empty", "truncated", "the file ends after 0 bytes"),
        ("longer", "damaged", r"the file has \d+ bytes, its head says \d+"),
        ("a bit in its head", "damaged", "the checksum of its head is wrong"),
        ("a bit in its payload", "damaged", "the checksum of its bytes is wrong"),
        ("something else", "damaged", r"it begins with b'ELF!', no block of this cache"),
        ("a newer format", "version", "it has format version 9, this package reads 1"),
        ("another layout", "foreign", "it has layout other, this tier layout"),
        ("another rank", "foreign", "it has rank 2, this tier 1"),
        ("another block", "wrong_key", "it is the file of block 3132333435363738"),
        ("another digest", "wrong_key", "it holds block 313233340000000."),
        ("an unreadable namespace", "damaged", "namespace name b'.' is not readable: .*"),
        ("smaller blocks", "foreign", "it has block bytes 95, this tier 96"),
    ],
)
def test_a_wrong_file_is_a_miss_and_set_aside(
    tmp_path: Path, what: str, kind: str, reason: str
) -> None:
    store, files = make_store(tmp_path)
    head = written(store)
    damage(path_of(tmp_path, head), what, head)
    with pytest.raises(
        FileTierError, match=f"^file of block {head.key.hex()[:16]}: {reason}: set aside$"
    ) as caught:
        read(store, head.key)
    assert caught.value.kind == kind
    assert store.statistics().problems == {kind: 1}
    assert store.statistics().num_set_aside == 1
    assert files_below(tmp_path) == [f"set-aside/{head.key.hex()}.kvb.{kind}"]
    assert files.open_descriptors == set()
    with pytest.raises(FileTierError, match=r" has no file$"):
        read(store, head.key)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    head = written(store)
    path = path_of(tmp_path, head)
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        with pytest.raises(FileTierError):
            read(store, head.key)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    head = written(store)
    path = path_of(tmp_path, head)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(FileTierError) as caught:
            read(store, head.key)
        assert caught.value.kind == "truncated"


def test_only_the_last_wrong_files_are_kept(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, StoreLimits(max_set_aside=2))
    for seed in range(5):
        head = written(store, seed)
        path_of(tmp_path, head).write_bytes(b"")
        with pytest.raises(FileTierError):
            read(store, head.key)
        last = f"set-aside/{head.key.hex()}.kvb.truncated"
    assert len(files_below(tmp_path)) == 2
    assert last in files_below(tmp_path)
    again, _ = make_store(tmp_path, StoreLimits(max_set_aside=1))
    head = written(again, 9)
    path_of(tmp_path, head).write_bytes(b"")
    with pytest.raises(FileTierError):
        read(again, head.key)
    assert files_below(tmp_path) == [f"set-aside/{head.key.hex()}.kvb.truncated"]


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("create", errno.EACCES, "denied"),
        ("create", errno.EROFS, "denied"),
        ("write", errno.ENOSPC, "no_space"),
        ("write", errno.EDQUOT, "no_space"),
        ("write", errno.EIO, "io"),
        ("sync", errno.EIO, "io"),
        ("close", errno.ENOSPC, "no_space"),
        ("rename", errno.ENOENT, "unplugged"),
    ],
)
def test_a_block_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, call: str, number: int, kind: str
) -> None:
    store, files = make_store(tmp_path, StoreLimits(sync="file"))
    old = written(store)
    files.faults.failing[call] = number
    with pytest.raises(FileTierError, match=os.strerror(number)) as caught:
        store.write(replace(old, extra_keys=b"new"), views())
    assert caught.value.kind == kind
    files.faults.cure()
    assert files.open_descriptors == set()
    assert len(files_below(tmp_path)) == 1
    assert read(store, old.key) == (old, PAYLOAD)
    assert store.statistics().used_bytes == path_of(tmp_path, old).stat().st_size


def test_a_disk_that_is_full_after_any_byte_leaves_nothing_behind(tmp_path: Path) -> None:
    head = random_head(np.random.default_rng(3), PAYLOAD)
    size = len(pack_head(head)) + 96
    store, files = make_store(tmp_path, StoreLimits(max_bytes=size))
    for num_bytes in range(size):
        files.faults.full_after = num_bytes
        with pytest.raises(FileTierError) as caught:
            store.write(head, views())
        assert caught.value.kind == "no_space"
        assert files_below(tmp_path) == []
    files.faults.full_after = size
    assert store.write(head, views()) == size
    assert store.statistics().problems == {"no_space": size}


def test_short_reads_and_writes_change_nothing(tmp_path: Path) -> None:
    for seed in range(10):
        print("seed", seed)
        store, files = make_store(tmp_path)
        files.faults.short = random.Random(seed)
        head = written(store, seed)
        assert read(store, head.key) == (head, PAYLOAD)


def test_a_disk_that_cannot_be_read_keeps_its_file(tmp_path: Path) -> None:
    store, files = make_store(tmp_path)
    head = written(store)
    for call in ("open", "read"):
        files.faults.failing[call] = errno.EIO
        with pytest.raises(FileTierError, match="Input/output error: look at the disk") as caught:
            read(store, head.key)
        assert caught.value.kind == "io"
        files.faults.cure()
    assert read(store, head.key) == (head, PAYLOAD)
    assert files.open_descriptors == set()


def test_a_directory_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "tier"
    directory.mkdir()
    store, _ = make_store(directory)
    head = written(store)
    path_of(directory, head).unlink()
    path_of(directory, head).parent.rmdir()
    directory.rmdir()
    with pytest.raises(FileTierError, match="bring the directory back") as caught:
        store.write(head, views())
    assert caught.value.kind == "unplugged"
    assert not directory.exists()
    with pytest.raises(FileTierError, match="has no file"):
        read(store, head.key)
    assert not store.discard(head.key)


@pytest.mark.skipif(os.geteuid() == 0, reason="ROOT MAY WRITE EVERYWHERE: NOT TESTED")
def test_a_read_only_directory_is_said(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    tmp_path.chmod(0o500)
    with pytest.raises(FileTierError) as caught:
        written(store)
    assert caught.value.kind == "denied"


def test_memory_that_is_no_block_is_a_bug_and_nothing_is_touched(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    head = written(store)
    with pytest.raises(InvariantError, match=r"^memory of 64 bytes for a block of 96$"):
        store.write(head, views()[:1])
    with pytest.raises(InvariantError, match=r"^memory of 64 bytes for a block of 96$"):
        store.read(head.key, views(bytearray(96))[:1])
    assert read(store, head.key) == (head, PAYLOAD)


def test_no_more_than_the_bound_is_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    heads = [random_head(rng, PAYLOAD) for _ in range(3)]
    sizes = [len(pack_head(head)) + 96 for head in heads]
    limit = sizes[0] + sizes[1]
    store, _ = make_store(tmp_path, StoreLimits(max_bytes=limit))
    store.write(heads[0], views())
    store.write(heads[1], views())
    with pytest.raises(FileTierError) as caught:
        store.write(heads[2], views())
    assert str(caught.value) == (
        f"a file of {sizes[2]} bytes on top of {limit} exceeds the tier's max_bytes, {limit}: "
        "discard blocks, or raise it"
    )
    assert caught.value.kind == "quota"
    assert store.discard(heads[0].key)
    assert not store.discard(heads[0].key)
    assert store.statistics().used_bytes == sizes[1]


def test_a_scan_finds_good_files_and_clears_up_after_the_dead(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, writer="dead")
    heads = [written(store, seed) for seed in range(30)]
    broken, foreign, moved = heads[0], heads[1], heads[2]
    path_of(tmp_path, broken).write_bytes(b"")
    damage(path_of(tmp_path, foreign), "another layout", foreign)
    elsewhere = tmp_path / f"{(moved.key[0] + 1) % 256:02x}"
    elsewhere.mkdir(exist_ok=True)
    path_of(tmp_path, moved).rename(elsewhere / path_of(tmp_path, moved).name)
    left = path_of(tmp_path, heads[3]).parent / f".{heads[3].key.hex()}.dead.tmp"
    left.write_bytes(b"half")
    (path_of(tmp_path, heads[3]).parent / "README").write_bytes(b"not ours")
    again, files = make_store(tmp_path, writer="alive")
    scanned = [again.scan(prefix) for prefix in range(256)]
    found = [head for directory in scanned for head in directory.heads]
    assert sorted(head.key for head in found) == sorted(head.key for head in heads[3:])
    assert {head.key: head for head in found} == {head.key: head for head in heads[3:]}
    problems = sorted(problem.split(": ", 1)[1] for one in scanned for problem in one.problems)
    assert problems == [
        "it has layout other, this tier layout",
        f"it is the file of block {moved.key.hex()[:16]}",
        "the file ends after 0 bytes",
    ]
    assert not left.exists()
    kept = sum(path_of(tmp_path, head).stat().st_size for head in heads[3:])
    assert again.statistics().used_bytes == kept
    assert files.open_descriptors == set()


def test_a_directory_that_cannot_be_listed_is_a_problem_of_the_scan(tmp_path: Path) -> None:
    store, files = make_store(tmp_path)
    files.faults.failing["names_in"] = errno.EIO
    assert store.scan(7).problems == ("directory 07: Input/output error: look at the disk",)
    assert store.statistics().problems == {"io": 1}


# --- other processes change files


def limited(directory: Path, num_files: int) -> tuple[FileStore, list[FileHead]]:
    """A store full of files of one size."""
    heads = []
    for seed in range(2 * num_files):
        head = random_head(np.random.default_rng(seed), PAYLOAD)
        head = replace(head, token_bytes=b"", extra_keys=b"", namespace=PLAIN)
        heads.append(replace(head, key=label_keys(labels_of_heads([head]))[0]))
    size = len(pack_head(heads[0])) + 96
    store, _ = make_store(directory, StoreLimits(max_bytes=num_files * size))
    for head in heads[:num_files]:
        assert store.write(head, views()) == size
    return store, heads


def scan_all(store: FileStore) -> list[bytes]:
    return sorted(head.key for prefix in range(256) for head in store.scan(prefix).heads)


def bytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("??/*.kvb"))


def find_by_read(store: FileStore, head: FileHead) -> None:
    with pytest.raises(FileTierError, match="has no file"):
        read(store, head.key)


def find_by_discard(store: FileStore, head: FileHead) -> None:
    assert not store.discard(head.key)


def find_by_scan(store: FileStore, head: FileHead) -> None:
    assert store.scan(head.key[0]).heads == ()


@pytest.mark.parametrize("find", [find_by_read, find_by_discard, find_by_scan])
def test_files_that_others_remove_make_room_for_new_ones(
    tmp_path: Path, find: Callable[[FileStore, FileHead], None], caplog: pytest.LogCaptureFixture
) -> None:
    store, heads = limited(tmp_path, 8)
    with pytest.raises(FileTierError, match="exceeds the tier's max_bytes"):
        store.write(heads[8], views())
    for head in heads[:8]:
        path_of(tmp_path, head).unlink()
        find(store, head)
    assert store.statistics().used_bytes == 0
    assert store.statistics().num_vanished == 8
    assert "files of rank 1: " in caplog.text
    for head in heads[8:]:
        store.write(head, views())
    assert store.statistics().used_bytes == bytes_below(tmp_path) > 0
    assert scan_all(store) == sorted(head.key for head in heads[8:])


def test_a_file_that_was_replaced_behind_the_store_counts_once(tmp_path: Path) -> None:
    store, heads = limited(tmp_path, 2)
    path_of(tmp_path, heads[0]).write_bytes(b"short")
    store.discard(heads[1].key)
    store.write(heads[0], views())
    assert store.statistics().used_bytes == bytes_below(tmp_path)


def put_a_directory(path: Path) -> None:
    path.mkdir()


def put_a_full_directory(path: Path) -> None:
    path.mkdir()
    path.joinpath("some").write_bytes(b"thing")


def put_a_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@contextmanager
def working_in(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def put_a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound, working_in(path.parent):
        bound.bind(path.name)  # the whole path may be too long


OBSTACLES = [put_a_directory, put_a_full_directory, put_a_link, os.mkfifo, put_a_socket]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_no_file_is_set_aside_once(
    tmp_path: Path, obstacle: Callable[[Path], None]
) -> None:
    store, heads = limited(tmp_path, 4)
    read_head, scanned, discarded, written_again = heads[:4]
    for head in heads[:4]:
        path_of(tmp_path, head).unlink()
        obstacle(path_of(tmp_path, head))
    with pytest.raises(FileTierError, match="it is not a regular file: set aside") as caught:
        read(store, read_head.key)
    assert caught.value.kind == "damaged"
    assert len(store.scan(scanned.key[0]).problems) == 1
    store.discard(discarded.key)
    store.discard(heads[0].key)
    store.write(written_again, views())
    assert scan_all(store) == [written_again.key]
    before = store.statistics()
    assert before.used_bytes == bytes_below(tmp_path)
    assert scan_all(store) == [written_again.key]
    assert store.statistics() == before, "what was set aside is counted again"
    assert read(store, written_again.key) == (written_again, PAYLOAD)
    assert len(list(tmp_path.glob("set-aside/*"))) >= 2


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_an_unfinished_file_that_is_none_is_removed_or_set_aside(
    tmp_path: Path, obstacle: Callable[[Path], None]
) -> None:
    store, heads = limited(tmp_path, 1)
    directory = path_of(tmp_path, heads[0]).parent
    store.discard(heads[0].key)
    obstacle(directory / f".{heads[0].key.hex()}.me.tmp")
    store.write(heads[0], views())
    obstacle(directory / f".{heads[0].key.hex()}.dead.tmp")
    assert scan_all(store) == scan_all(store) == [heads[0].key]
    assert [path.name for path in directory.iterdir()] == [f"{heads[0].key.hex()}.kvb"]
    assert store.statistics().problems == {}


@pytest.mark.parametrize("obstacle", [*OBSTACLES[2:], Path.touch])
def test_what_lies_in_the_place_of_a_directory_goes(
    tmp_path: Path, obstacle: Callable[[Path], None]
) -> None:
    store, heads = limited(tmp_path, 2)
    directory = path_of(tmp_path, heads[0]).parent
    shutil.rmtree(directory)
    obstacle(directory)
    with pytest.raises(FileTierError) as caught:
        read(store, heads[0].key)
    assert caught.value.kind == "missing"
    assert store.scan(heads[0].key[0]).heads == ()
    store.write(heads[0], views())
    assert read(store, heads[0].key) == (heads[0], PAYLOAD)
    assert store.statistics().used_bytes == bytes_below(tmp_path)


@pytest.mark.parametrize("obstacle", [*OBSTACLES[2:], Path.touch])
def test_what_lies_in_the_place_of_what_is_set_aside_goes(
    tmp_path: Path, obstacle: Callable[[Path], None]
) -> None:
    store, heads = limited(tmp_path, 2)
    obstacle(tmp_path / "set-aside")
    for head in heads[:2]:
        path_of(tmp_path, head).unlink()
        put_a_full_directory(path_of(tmp_path, head))
    assert scan_all(store) == []
    assert len(list(tmp_path.glob("set-aside/*/some"))) == 2


def test_a_directory_is_set_aside_next_to_one_of_its_name(tmp_path: Path) -> None:
    store, heads = limited(tmp_path, 1)
    path = path_of(tmp_path, heads[0])
    for _ in range(3):
        path.unlink()
        put_a_full_directory(path)
        assert scan_all(store) == []
        store.write(heads[0], views())
    path.write_bytes(b"")
    assert scan_all(store) == []
    assert sorted(p.name.partition(".kvb.")[2] for p in tmp_path.glob("set-aside/*")) == [
        "damaged",
        "damaged.1",
        "damaged.2",
        "truncated",
    ]


def test_a_file_that_is_closed_to_us_is_set_aside_and_a_closed_disk_is_not(tmp_path: Path) -> None:
    store, files = make_store(tmp_path)
    head = written(store)
    files.faults.failing |= {"open": errno.EACCES, "rename": errno.EACCES, "remove": errno.EACCES}
    with pytest.raises(FileTierError, match="let the workers' user write there") as caught:
        read(store, head.key)
    assert caught.value.kind == "denied"
    files.faults.cure()
    assert read(store, head.key) == (head, PAYLOAD)
    files.faults.failing["open"] = errno.EACCES
    with pytest.raises(FileTierError, match="Permission denied: set aside") as caught:
        read(store, head.key)
    assert caught.value.kind == "damaged"
    assert files_below(tmp_path) == [f"set-aside/{head.key.hex()}.kvb.damaged"]
    assert store.statistics().used_bytes == 0


def test_a_directory_that_cannot_be_listed_keeps_its_bytes_counted(tmp_path: Path) -> None:
    store, files = make_store(tmp_path)
    head = written(store)
    used = store.statistics().used_bytes
    files.faults.failing["names_in"] = errno.EIO
    assert store.scan(head.key[0]).heads == ()
    assert store.statistics().used_bytes == used > 0


# --- the directory of a rank


def settings(root: Path) -> FileTierSettings:
    return FileTierSettings(root, "cluster")


def test_a_rank_has_a_directory_of_its_own_that_says_what_it_holds(tmp_path: Path) -> None:
    tier = FileTier(settings(tmp_path), SHAPE, "me")
    assert tier.directory == tmp_path / "cluster" / "layout" / "rank1"
    head = written(tier.store)
    tier.close()
    again = FileTier(settings(tmp_path), SHAPE, "next")
    assert read(again.store, head.key) == (head, PAYLOAD)
    again.close()
    assert files_below(tier.directory) == [
        "about",
        f"{head.key.hex()[:2]}/{head.key.hex()}.kvb",
    ]


def test_a_directory_in_which_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FileTier(settings(tmp_path), SHAPE, "me").close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    FileTier(settings(tmp_path), SHAPE, "me").close()  # only its owner may write there
    directory = tmp_path / "cluster" / "layout" / "rank1"
    for mode in (0o702, 0o720):
        directory.chmod(mode)
        with pytest.raises(ConfigurationError, match="others may write there: remove it, or"):
            FileTier(settings(tmp_path), SHAPE, "me")
    assert files_below(directory) == ["about"]


def test_what_lies_below_the_root_is_made(tmp_path: Path) -> None:
    tier = FileTier(replace(settings(tmp_path), below=".cache/kvcache"), SHAPE, "me")
    assert tier.directory == tmp_path / ".cache" / "kvcache" / "cluster" / "layout" / "rank1"
    shutil.rmtree(tmp_path / ".cache")
    head = written(tier.store)
    assert read(tier.store, head.key) == (head, PAYLOAD)
    tier.close()


def remove_the_rank(tier: FileTier, root: Path) -> None:
    shutil.rmtree(tier.directory)


def remove_the_cluster(tier: FileTier, root: Path) -> None:
    shutil.rmtree(root / "cluster")


def replace_it(tier: FileTier, root: Path) -> None:
    shutil.rmtree(tier.directory)
    tier.directory.mkdir()


def move_and_remove_it(tier: FileTier, root: Path) -> None:
    tier.directory.rename(root / "elsewhere")
    tier.directory.mkdir()
    shutil.rmtree(root / "elsewhere")


@pytest.mark.parametrize(
    "remove", [remove_the_rank, remove_the_cluster, replace_it, move_and_remove_it]
)
def test_a_directory_that_others_remove_is_made_again(
    tmp_path: Path,
    remove: Callable[[FileTier, Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = FileTier(settings(tmp_path), SHAPE, "me")
    heads = [written(tier.store, seed) for seed in range(20)]
    path_of(tier.directory, heads[0]).write_bytes(b"")
    assert tier.store.scan(heads[0].key[0]).problems
    remove(tier, tmp_path)
    with pytest.raises(FileTierError) as caught:
        read(tier.store, heads[3].key)
    assert caught.value.kind == "missing"
    with ThreadPoolExecutor(8) as threads:  # only one of them makes it
        list(threads.map(lambda head: tier.store.write(head, views()), heads))
    assert [read(tier.store, head.key) for head in heads] == [(head, PAYLOAD) for head in heads]
    statistics = tier.store.statistics()
    assert statistics.used_bytes == bytes_below(tier.directory) > 0
    assert statistics.num_vanished == 19
    path_of(tier.directory, heads[1]).write_bytes(b"")
    with pytest.raises(FileTierError, match="set aside"):
        read(tier.store, heads[1].key)
    assert caplog.text.count(f"directory {tier.directory} was removed by another process") == 1
    assert remove is not remove_the_rank or is_locked(tmp_path)
    tier.close()
    again = FileTier(settings(tmp_path), SHAPE, "next")
    assert read(again.store, heads[0].key) == (heads[0], PAYLOAD)
    again.close()


def test_a_directory_whose_place_is_taken_is_not_made_again(tmp_path: Path) -> None:
    tier = FileTier(settings(tmp_path), SHAPE, "me")
    replace_it(tier, tmp_path)
    (tier.directory / "something").write_bytes(b"else")
    with pytest.raises(FileTierError) as caught:
        written(tier.store)
    assert str(caught.value) == (
        f"the file tier's directory {tier.directory} is gone, and cannot be made again (another "
        "one is in its place, and is not empty): bring it back, or restart the workers"
    )
    assert caught.value.kind == "unplugged"
    assert files_below(tmp_path) == ["cluster/layout/rank1/something"]
    (tier.directory / "something").unlink()
    head = written(tier.store)
    assert read(tier.store, head.key) == (head, PAYLOAD)
    tier.close()


def test_a_root_that_is_gone_or_on_another_disk_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "mounted"
    root.mkdir()
    tier = FileTier(settings(root), SHAPE, "me")
    head = written(tier.store)
    shutil.rmtree(root)
    with pytest.raises(FileTierError, match="No such file or directory") as caught:
        written(tier.store)
    assert caught.value.kind == "unplugged"
    assert not root.exists()
    root.mkdir()
    with monkeypatch.context() as unmounted:
        unmounted.setattr(tier, "_device", tier._device + 1)
        with pytest.raises(FileTierError, match="is on another device now"):
            written(tier.store)
        assert files_below(root) == []
    assert tier.store.write(head, views()) == tier.store.statistics().used_bytes
    tier.close()


def test_a_directory_of_other_blocks_is_refused(tmp_path: Path) -> None:
    FileTier(settings(tmp_path), SHAPE, "me").close()
    with pytest.raises(ConfigurationError) as caught:
        FileTier(settings(tmp_path), replace(SHAPE, widths=(32,)), "me")
    directory = tmp_path / "cluster" / "layout" / "rank1"
    about = "'blocks of kvcache, format 1, layout layout, rank 1, {} bytes each, keys of 8 bytes'"
    assert str(caught.value) == (
        f"the file tier's directory {directory} holds {about.format(96)}, this rank needs "
        f"{about.format(32)}: choose another root, or remove the directory"
    )


def test_a_root_that_is_not_there_is_refused_and_not_made(tmp_path: Path) -> None:
    root = tmp_path / "unplugged"
    with pytest.raises(
        ConfigurationError, match=f"^the file tier's root {root} is not a directory"
    ):
        FileTier(settings(root), SHAPE, "me")
    assert not root.exists()


def is_locked(root: Path) -> bool:
    """Return whether another process is refused."""
    found = in_a_fork(lambda: FileTier(settings(root), SHAPE, "another").close())
    return isinstance(found, ConfigurationError) and "is in use by another process" in str(found)


def test_a_directory_that_a_living_process_uses_is_refused(tmp_path: Path) -> None:
    tier = FileTier(settings(tmp_path), SHAPE, "me")
    assert is_locked(tmp_path)
    tier.close()
    assert not is_locked(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sync": "often"}, "sync is 'often': choose one of never, file, directory"),
        ({"cluster": "../x"}, r"cluster '../x' cannot name a directory: use a name without /"),
        ({"threads": 0}, "threads"),
        ({"max_bytes": -1}, "max_bytes"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(settings(tmp_path), **change)
