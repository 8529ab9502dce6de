"""Compiled functions: accepted and refused types, and missing caches."""

from __future__ import annotations

import importlib.util
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numba import types

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.compiled import array_type, compiled
from kvcache.core.machine import family_of

ROOT = Path(__file__).resolve().parents[1]

READ = array_type("int32", is_read=True)
WRITTEN = array_type("int32")


@compiled(types.intp(WRITTEN, READ))
def add_to(sums: Int32Array, values: Int32Array) -> int:
    total = 0
    for i in range(len(values)):
        sums[i] += values[i]
        total += sums[i]
    return total


def test_arrays_are_changed_in_place() -> None:
    sums, values = int32_array([1, 2, 3]), int32_array([10, 20, 30])
    assert add_to(sums, values) == 66
    assert sums.tolist() == [11, 22, 33]
    assert values.tolist() == [10, 20, 30]


def test_inputs_may_be_read_only() -> None:
    values = int32_array([1])
    values.flags.writeable = False
    assert add_to(int32_array([1]), values) == 2
    with pytest.raises(TypeError, match="No matching definition"):
        add_to(values, int32_array([1]))
    assert values.tolist() == [1]


@pytest.mark.parametrize(
    "other", [np.zeros(1, np.int64), np.zeros((1, 1), np.int32), np.zeros(4, np.int32)[::2]]
)
def test_other_arrays_are_refused_not_compiled_for(other: Int32Array) -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        add_to(other, int32_array([1]))


def test_without_a_place_to_keep_it_a_function_is_compiled_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names: dict[str, object] = {}
    exec("def double(value):\n    return 2 * value\n", names)  # of no file
    with caplog.at_level("INFO", logger="kvcache.base.compiled"):
        double = compiled(types.int64(types.int64))(names["double"])  # type: ignore[type-var]
    assert double(21) == 42  # type: ignore[operator]
    assert "double is compiled again in every process" in caplog.text


def make(directory: Path, added: int) -> Callable[[int], int]:
    """Import a module as a new process does, whose file was written just now."""
    source = directory / "adding.py"
    source.write_text(
        "from numba import types\n"
        "from kvcache.base.compiled import compiled\n"
        "@compiled(types.int64(types.int64))\n"
        "def add(value):\n"
        f"    return value + {added}\n"
    )
    spec = importlib.util.spec_from_file_location("adding", source)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(source.read_text(), source, "exec"), module.__dict__)
    return cast(Callable[[int], int], module.add)


def kept(directory: Path, ending: str) -> list[Path]:
    return sorted((directory / "__pycache__").glob(f"*.{ending}"))


def test_cached_code_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvcache.base.compiled"):
        assert make(tmp_path, 1)(10) == 11
        (code,) = kept(tmp_path, "nbc")
        written = code.stat().st_ino  # files are replaced, not changed
        assert make(tmp_path, 1)(10) == 11
    assert [path.stat().st_ino for path in kept(tmp_path, "nbc")] == [written]
    assert not caplog.records


def test_code_of_another_source_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    assert make(tmp_path, 1)(10) == 11
    (old,) = kept(tmp_path, "nbc")
    code = old.read_bytes()
    assert make(tmp_path, 2)(10) == 12
    old.write_bytes(code)  # as if the writer had died after the new list
    assert make(tmp_path, 2)(10) == 12
    assert make(tmp_path, 1)(10) == 11


def test_a_full_disk_and_half_a_file_cost_a_compilation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert make(tmp_path, 1)(10) == 11
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # room for the list alone
    try:
        assert make(tmp_path, 2)(10) == 12
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "is compiled again in every process" in caplog.text
    assert make(tmp_path, 2)(10) == 12
    for ending in ("nbc", "nbi"):
        caplog.clear()
        for path in kept(tmp_path, ending):
            path.write_bytes(path.read_bytes()[:5])
        assert make(tmp_path, 2)(10) == 12
        assert "is compiled again" in caplog.text
        caplog.clear()
        assert make(tmp_path, 2)(10) == 12
        assert not caplog.text  # it is whole again


@pytest.mark.launches  # compiles the whole core
def test_all_code_is_kept_where_numba_is_told_to_keep_it(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    (source / "adding.py").write_text(
        "from kvcache.base.compiled import compiled\n"
        "from kvcache.core.machine import INT, kernel, routine\n"
        "@compiled(INT(INT))\n"
        "def add_one(value):\n"
        "    return value + 1\n"
        "@routine\n"
        "def two(value):\n"
        "    return value + 2\n"
        "@kernel(INT, INT)\n"
        "def add_two(value):\n"
        "    return two(value)\n"
    )
    written = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", "import adding; print(adding.add_one(1), adding.add_two(1))"],
            cwd=source,
            env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert (done.stdout, done.stderr) == ("2 3\n", "")
        codes = sorted(cache.glob("source_*/*.nbc"))
        written.append([(code.name.partition("-")[0], code.stat().st_ino) for code in codes])
    assert [name for name, _ in written[0]] == ["adding.add_one", "adding.add_two"]
    assert written[1] == written[0]  # the second process has loaded the first one's code
    assert not kept(source, "nb?")


@pytest.mark.parametrize("name", ["rows", "names", "columns", "kinds/rule"])
def test_kernels_are_compiled_again_when_what_they_contain_has_changed(
    tmp_path: Path, name: str
) -> None:
    package = tmp_path / "core"
    shutil.copytree(
        ROOT / "kvcache" / "core", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    before = family_of(package)
    path = package / f"{name}.py"
    path.write_text(path.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    assert family_of(package) != before
