"""Directories of earlier layouts are removed, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcache.worker.files import old_layouts
from kvcache.worker.files.old_layouts import RankPlace, remove_in_background, remove_old_layouts

NEW, OLD, OLDER = "a" * 64, "b" * 64, "c" * 64


def make(root: Path, *names: str, about: str = "blocks of kvcache, format 1\n") -> None:
    for name in names:
        directory = root / name
        (directory / "00").mkdir(parents=True)
        (directory / "00" / "file.kvb").write_bytes(b"bytes")
        (directory / "about").write_text(about)


def left(root: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(root)) for path in root.rglob("about"))


def test_what_a_rank_has_left_is_removed_and_nothing_of_other_ranks(tmp_path: Path) -> None:
    make(tmp_path, f"{NEW}/rank1", f"{OLD}/rank1", f"{OLDER}/rank1", f"{OLD}/rank0")
    make(tmp_path, f"{OLD}/rank5")
    assert remove_old_layouts(RankPlace(tmp_path, NEW, 1, 2)) == 2
    assert left(tmp_path) == [f"{NEW}/rank1", f"{OLD}/rank0", f"{OLD}/rank5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [NEW, OLD]


def test_rank_0_also_removes_what_ranks_have_left_that_are_no_more(tmp_path: Path) -> None:
    make(tmp_path, f"{OLD}/rank0", f"{OLD}/rank1", f"{OLD}/rank2")
    assert remove_old_layouts(RankPlace(tmp_path, NEW, 0, 2)) == 2
    assert left(tmp_path) == [f"{OLD}/rank1"]


def test_a_directory_that_a_process_uses_is_left(tmp_path: Path) -> None:
    make(tmp_path, f"{OLD}/rank0", f"{OLDER}/rank0")
    holds = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX);"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(tmp_path / OLD / "rank0" / "about")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert remove_old_layouts(RankPlace(tmp_path, NEW, 0, 1)) == 1
        assert left(tmp_path) == [f"{OLD}/rank0"]
        other.communicate()


def test_what_is_not_ours_is_left(tmp_path: Path) -> None:
    make(tmp_path, "notes/rank0", f"{OLD}/backup")
    make(tmp_path, f"{OLD}/rank0", about="somebody else's\n")
    (tmp_path / OLDER).symlink_to(tmp_path / "notes")
    (tmp_path / f"{OLD}/rank1").symlink_to(tmp_path / "notes" / "rank0")
    assert remove_old_layouts(RankPlace(tmp_path, NEW, 0, 1)) == 0
    assert len(left(tmp_path)) == 3


def test_one_start_removes_so_many_and_what_a_killed_one_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_layouts, "MAX_DIRECTORIES", 2)
    make(tmp_path, *(f"{i:064x}/rank0" for i in range(5)), "removed-1234")
    assert remove_old_layouts(RankPlace(tmp_path, NEW, 0, 1)) == 2
    assert len(left(tmp_path)) == 3
    assert not list(tmp_path.glob("removed-*"))
    remove_in_background(RankPlace(tmp_path, NEW, 0, 1)).join(20)
    assert len(left(tmp_path)) == 1


def test_a_root_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert remove_old_layouts(RankPlace(tmp_path / "gone", NEW, 0, 1)) == 0
