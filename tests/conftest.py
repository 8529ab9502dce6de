"""Shared fixtures: one Ray cluster for the whole run, protected by a token.

Ray reads its settings from the environment at its import, so they are set here, first.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.base.logs import LineLimit

SCRATCH = Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
"""Short, because Ray puts socket paths below it, which are limited to 107 characters."""

ROOT = Path(__file__).resolve().parents[1]

TOKEN_FILE = SCRATCH / "token"
TOKEN_FILE.touch(mode=0o600)
TOKEN_FILE.write_text(secrets.token_hex(32))
os.environ.pop("RAY_ADDRESS", None)
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN_PATH"] = str(TOKEN_FILE)
# Ray's workers import classes of test modules by their names here.
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "actors")))
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Otherwise any call of Ray without a cluster starts one. If a thread starts it, it dies with
# that thread; a minute later Ray ends this process, whatever test is running.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share 1/3`: one of three parts of the selected tests, always the same ones.

    `--seeds 40:50`: seeds 40 to 49 in every test that is marked with `seeds`.
    """
    parser.addoption("--share", default="1/1", metavar="K/N", help="run part K of N of the tests")
    parser.addoption("--seeds", type=seed_range, metavar="A:B", help="seeds A to B - 1 for walks")


def seed_range(text: str) -> range:
    first, end = map(int, text.split(":"))
    return range(first, end)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that is marked with `seeds` its `seed`, or all of its `seeds` at once.

    `seeds(8, long=32)`: seeds 0 to 7 in every run, 8 to 31 among the long tests.
    """
    mark = metafunc.definition.get_closest_marker("seeds")
    if mark is None:
        return
    quick = range(*mark.args)
    long = range(quick.stop, mark.kwargs.get("long", quick.stop))
    if (asked := metafunc.config.getoption("--seeds")) is not None:
        quick, long = asked, range(0)
    if "seed" in metafunc.fixturenames:
        more = [pytest.param(seed, marks=pytest.mark.long) for seed in long]
        metafunc.parametrize("seed", [*quick, *more])
    else:
        more = [pytest.param(long, marks=pytest.mark.long)] if long else []
        metafunc.parametrize("seeds", [quick, *more], ids=lambda s: f"{s.start}:{s.stop}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other parts."""
    part, _, parts = config.getoption("--share").partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError("--share takes K/N, for instance 1/3")
    chosen = [i for i in items if zlib.crc32(i.nodeid.encode()) % int(parts) == int(part) - 1]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Exempt what stays until the end from garbage collections, some of which tests ask for."""
    gc.collect()
    gc.freeze()


LAST_WORDS: list[str] = []
"""The last output of each xdist worker that died, in the process that distributes tests."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell an xdist worker where to leave its last output."""
    node.workerinput["last_words"] = str(SCRATCH / node.gateway.id)


@pytest.hookimpl(trylast=True)  # after pytest's own fault handler
def pytest_configure(config: pytest.Config) -> None:
    """Let an xdist worker write the reason of its death to files that outlive it.

    `.threads` is Python's traceback at a fatal signal. `.stderr` has what libraries print before
    they abort: pytest captures that in an anonymous file, which dies with the process.
    """
    if not hasattr(config, "workerinput"):
        return
    last_words = config.workerinput["last_words"]
    faulthandler.enable(os.open(f"{last_words}.threads", os.O_CREAT | os.O_WRONLY))
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if (stderr := capture._global_capturing.err) is not None:
        with open(f"{last_words}.stderr", "w+b") as file:
            os.dup2(file.fileno(), stderr.tmpfile.fileno())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Keep the last output of an xdist worker that died, before its files are removed."""
    if error is None:
        return
    status = node.gateway._io.popen.wait(timeout=10)  # -11 for signal 11
    LAST_WORDS.append(f"worker {node.gateway.id} ended with status {status}\n")
    for kind in "threads", "stderr":
        file = SCRATCH / f"{node.gateway.id}.{kind}"
        said = file.read_text(errors="replace") if file.exists() else ""
        LAST_WORDS.append(f"its {kind}:\n{said or '(nothing)'}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the last output of the xdist workers that died."""
    if LAST_WORDS:
        terminalreporter.section("last words of workers that died")
        for words in LAST_WORDS:
            terminalreporter.write(words)


def pytest_sessionfinish() -> None:
    """Remove the files of the run outside the tree."""
    shutil.rmtree(SCRATCH, ignore_errors=True)


@pytest.fixture(autouse=True)
def unlimited_lines(request: pytest.FixtureRequest) -> None:
    """Reset the limit of log lines, which earlier tests may have used up."""
    if "caplog" in request.fixturenames:
        for logger in logging.root.manager.loggerDict.values():
            for known in getattr(logger, "filters", ()):
                if isinstance(known, LineLimit):
                    known._places.clear()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A Ray cluster of one node for the whole run; yields its address."""
    import ray

    context = ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _temp_dir=str(SCRATCH / "ray"),
    )
    yield context.address_info["address"]
    ray.shutdown()
