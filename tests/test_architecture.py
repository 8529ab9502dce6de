"""The import rule, checked by reading the sources."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import kvcache

ROOT = Path(__file__).resolve().parent.parent

# Lower packages may import higher ones, never the reverse. Packages of one line may
# import each other, but not in a circle.
ORDER: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("specs", "policies", "requests", "config"),
    ("protocol", "tenants", "planner", "memory_service", "sharing"),
    ("core",),
    ("manager", "tables", "sequences", "offload", "events"),
    ("worker", "coordinator"),
    ("client", "recorder", "metrics", "simulate", "replay"),
    ("integrations",),
)

# The same rule inside packages with many modules.
INSIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "policies": (
        ("entry_queue", "ranked_queue"),
        ("policy", "orders"),
        ("lru", "history_policy", "victims"),
        ("adaptive", "hinted", "outside_policy", "ranked_policies"),
        ("registry",),
    ),
    "tenants": (("shares",), ("ledger",), ("policy",)),
    "manager": (
        ("cache_blocks", "pins"),
        ("settings", "statistics", "model_limits"),
        ("request_table",),
        ("step_ledger", "admission", "forks"),
        ("step_plan",),
        ("cache_control", "loads", "tiers"),
        ("step_execution",),
        ("kv_cache_manager",),
    ),
    "core": (
        ("machine", "names"),
        ("kinds",),
        ("columns",),
        ("prefix_tree", "digesting"),
        ("pool", "hits", "running"),
        ("states",),
        ("rows", "notifier"),
        ("forgetting", "steps", "forks"),
        ("eviction",),
        ("audit", "rebuild", "prefix_cache", "flat_core"),
        ("block_pool",),
    ),
    "tables": (("single_type_managers", "free_queue"), ("coordinators",)),
    "coordinator": (
        (
            "event_feed",
            "job_table",
            "membership",
            "forward_plan",
            "remote_calls",
            "tier_hits",
        ),
        ("step_recorder",),
        ("settings", "block_storing"),
        ("parts", "clients", "label_collection"),
        ("partial_block_swap",),
        ("prefix_loading",),
        ("tier_adoption",),
        ("offloading",),
        ("serving", "auditor"),
        ("recovery",),
        ("epoch_state",),
        ("coordinator",),
        ("watchdog",),
    ),
    "offload": (
        ("keys", "statistics", "canonical", "disk_use"),
        ("specs", "jobs", "slots"),
        ("events",),
        ("contents",),
        ("options", "manager"),
        ("tier_manager",),
        ("registry", "spills"),
        ("hierarchy",),
    ),
    "worker": (
        ("block_tables", "history", "kv_cache_pool", "host_memory"),
        ("copies",),
        ("files",),
        ("settings", "statistics"),
        ("content", "tiers"),
        ("validation",),
        ("transfers",),
        ("execution",),
        ("reports",),
        ("worker",),
    ),
    "events": (
        ("wire_events", "answers"),
        ("translation", "mirror"),
        ("codec", "feed_frames", "published_state"),
        ("decoding", "publisher"),
        ("publisher_process", "subscription"),
        ("process_link", "subscriber", "prefix_index"),
        ("feed_sender",),
        ("stream_proxy",),
    ),
    "metrics": (
        ("metric",),
        ("declarations",),
        ("ages", "step_meter", "engine_samples"),
        ("samples", "metered_coordinator"),
        ("engine_socket", "inspection"),
    ),
    "recorder": (
        ("frames", "manager_config", "outcomes", "request_tracer"),
        ("records",),
        ("segments",),
        ("recorder", "recording"),
        ("replayed_epoch",),
        ("replay",),
    ),
}


def levels_of(order: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    return {name: level for level, names in enumerate(order) for name in names}


LEVELS = levels_of(ORDER)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@dataclass(frozen=True)
class Names:
    """The names in a source: imported modules, names imported from modules, attributes."""

    modules: tuple[str, ...]
    imported: tuple[str, ...]
    attributes: frozenset[str]


@cache
def names_of(path: Path) -> Names:
    """Read a source, once for all tests."""
    modules: list[str] = []
    imported: list[str] = []
    attributes: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{path}:{node.lineno}: relative import")
            module = node.module or ""
            modules.append(module)
            names = [f"{module}.{alias.name}" for alias in node.names]
            imported += names
            if module in {"kvcache", "actors"}:
                modules += names
    return Names(tuple(modules), tuple(imported), frozenset(attributes))


def imported_modules(path: Path) -> tuple[str, ...]:
    """Return the dotted name of every module imported anywhere in the file."""
    return names_of(path).modules


def all_imports(path: Path) -> tuple[str, ...]:
    """Return what `imported_modules` does, and every name that is imported from a module."""
    return imported_modules(path) + names_of(path).imported


def unit_of(path: Path) -> str:
    """Return the package that a file belongs to."""
    return package_of(path.relative_to(ROOT).with_suffix("").parts)


def package_of(parts: Sequence[str]) -> str:
    """Return the package of a module of the library, itself `__init__`."""
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_module_of_the_library_has_its_place_in_the_order() -> None:
    units = {unit_of(path) for path in sources("kvcache")} - {"__init__"}
    assert units - set(LEVELS) == set()


def test_no_module_imports_one_that_stands_lower() -> None:
    wrong = []
    for path in sources("kvcache"):
        unit = unit_of(path)
        if unit == "__init__":
            continue
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] != "kvcache" or len(parts) < 2:
                continue
            if LEVELS.get(package_of(parts), 0) > LEVELS[unit]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_no_packages_import_each_other_in_a_circle() -> None:
    imports: dict[str, set[str]] = {name: set() for name in LEVELS}
    for path in sources("kvcache"):
        unit = unit_of(path)
        for module in imported_modules(path):
            parts = module.split(".")
            if unit in imports and parts[0] == "kvcache" and package_of(parts) in imports:
                imports[unit].add(package_of(parts))
    done: set[str] = set()
    while ready := {u for u in imports.keys() - done if imports[u] - {u} <= done}:
        done |= ready
    assert imports.keys() - done == set()


@pytest.mark.parametrize("package", sorted(INSIDE))
def test_no_part_of_a_package_imports_one_that_stands_lower(package: str) -> None:
    levels = levels_of(INSIDE[package])
    parts = [path for path in sources(f"kvcache/{package}") if path.stem != "__init__"]
    part_of = {path: path.relative_to(ROOT / "kvcache" / package).parts[0] for path in parts}
    part_of = {path: part.removesuffix(".py") for path, part in part_of.items()}
    assert set(part_of.values()) == set(levels)
    wrong = []
    for path in parts:
        for module in imported_modules(path):
            names = module.split(".")
            if (
                names[:2] == ["kvcache", package]
                and len(names) > 2
                and (levels[names[2]] > levels[part_of[path]])
            ):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_the_library_never_imports_ray_or_the_actors() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("kvcache")
        for module in imported_modules(path)
        if module.split(".")[0] in {"ray", "actors"}
    ]
    assert wrong == []


def test_public_names_are_the_same_everywhere_and_no_others() -> None:
    names = {name: getattr(kvcache, name) for name in kvcache.__all__}
    assert dir(kvcache) == sorted({*vars(kvcache), *names})
    for module in kvcache._MODULES:
        found = vars(importlib.import_module(module))
        assert all(found[name] is names[name] for name in names.keys() & found)
    with pytest.raises(AttributeError, match=r"^module 'kvcache' has no attribute 'Requests'$"):
        kvcache.Requests  # noqa: B018


def test_only_workers_and_integrations_import_torch() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources("kvcache")
        if unit_of(path) not in {"worker", "integrations"}
        and any(module.split(".")[0] == "torch" for module in imported_modules(path))
    ]
    assert wrong == []


def test_nothing_of_the_house_imports_integrations() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for package in ("kvcache", "actors")
        for path in sources(package)
        if (ROOT / "kvcache" / "integrations") not in path.parents
        and any(name.startswith("kvcache.integrations") for name in imported_modules(path))
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["kvcache", "actors"])
def test_installed_modules_import_only_installed_ones(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(package)
        for module in imported_modules(path)
        if module.split(".")[0] in {"tests", "bench", "tools", "examples"}
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["kvcache", "actors"])
def test_nothing_is_ever_unpickled(package: str) -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources(package)
        if any({"pickle", "cloudpickle", "dill"} & set(m.split(".")) for m in all_imports(path))
        or "recv_pyobj" in path.read_text(encoding="utf-8")
    ]
    assert wrong == []


def test_the_environment_is_read_only_where_configuration_is() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in sources("kvcache")
        if unit_of(path) != "config" and names_of(path).attributes & {"environ", "getenv"}
    ]
    # It gives a process that runs in another directory the way to this package.
    assert found == ["kvcache/memory_service/process.py"]


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("actors.workers.worker, kvcache.worker", "kvcache.core.flat_core"),
        ("kvcache.config, kvcache.planner", "numba"),
    ],
)
def test_no_process_loads_kernels_that_it_never_runs(modules: str, unwanted: str) -> None:
    """Loading the kernels of the core or of the policies takes a process about a second."""
    code = f"import {modules}; import sys; print({unwanted!r} in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    names = {
        path.stem
        for package in ("kvcache", "actors", "bench", "tools", "examples/engine")
        for path in sources(package)
    }
    assert names & {"utils", "util", "common", "helpers", "misc"} == set()
