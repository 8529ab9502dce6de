"""Commands that read and change a running cluster's cache."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors import KVCacheClient, LocalCluster
from actors.cli import app, clusters, status
from actors.embedded.site import EmbeddedSite
from kvcache import NewRequest, StepRequest
from kvcache.base.arrays import int32_array
from kvcache.base.errors import NotRunningError
from tests.actors.conftest import build_config
from tests.cli.local_access import LocalAccess
from tests.waiting import wait_until

NAME = "test-admin"
BLOCK = 16
PROMPT = list(range(1000, 1000 + 4 * BLOCK + 1))
"""Four blocks and a token."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalAccess]:
    """A cluster with tiers and tenants, which commands find by its name."""
    config = build_config(
        NAME,
        offload={"host_memory_per_rank": "128KiB"},
        tenants={"named": {"gold": {"guaranteed": 0.25}}},
        recorder={"directory": str(tmp_path / "records")},
    )

    @contextmanager
    def session(*, may_start: bool) -> Iterator[bool]:
        yield False

    with LocalCluster(config) as local:
        access = LocalAccess(local)

        def find(name: str | None) -> LocalAccess:
            if name != NAME:
                raise NotRunningError(f"no cluster named {name!r} is running")
            return access

        for module in (clusters, status):
            monkeypatch.setattr(module, "ray_session", session)
            monkeypatch.setattr(module, "named_cluster", find)
        yield access


class Engine:
    """A client that reports the last step complete with each step."""

    def __init__(self, client: KVCacheClient) -> None:
        self.client = client
        self._last = -1

    def step(self, **fields: Any) -> None:
        result = self.client.step(StepRequest(completed_step=self._last, **fields))
        self.client.wait_finished(result.step)
        self._last = result.step


@pytest.fixture
def engine(cluster: LocalAccess) -> Iterator[Engine]:
    """An engine that has computed a prompt, twice, and runs both."""
    with cluster.client() as client:
        engine = Engine(client)
        engine.step(new=(new("a"),))
        engine.step(new=(new("b"),))
        engine.step()
        yield engine
        engine.step(finished=("a", "b"))


def new(request_id: str) -> NewRequest:
    return NewRequest(request_id, int32_array(PROMPT), max_new_tokens=len(PROMPT))


def run(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments, "--name", NAME])
    assert result.exit_code == exit_code, result.output
    return result.stdout if exit_code == 0 else result.stderr


def shown(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_usage_says_what_the_blocks_are(engine: Engine) -> None:
    usage = shown("usage")
    states = usage["states"]
    assert states["in_use"] == 6  # four shared ones, and a last one each
    assert states["in_use_shared"] == 4
    assert states["in_use"] + states["free"] == states["all"]
    assert usage["groups"] == {"0": 4}
    assert [row["num_blocks"] for row in usage["namespaces"]] == [4]
    assert "sealed blocks by group" in run("usage")


def test_prefixes_say_who_uses_what(engine: Engine) -> None:
    (prefix,) = shown("prefixes")["prefixes"]
    assert (prefix["num_blocks"], prefix["num_tokens"], prefix["num_holders"]) == (4, 4 * BLOCK, 2)
    assert prefix["idle_s"] is None
    assert "in use" in run("prefixes", "--tree")
    assert "longest" in run("prefixes", "--sort", "longest")
    assert "choose used, shared" in run("prefixes", "--sort", "best", exit_code=2)


def test_a_pin_holds_until_it_is_ended(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(PROMPT[: 2 * BLOCK]))
    made = shown("pin", "--token-file", str(path), "--ttl", "100")
    assert (made["num_tokens"], made["num_blocks"]) == (2 * BLOCK, 2)
    (pin,) = shown("pins")["pins"]
    assert pin["pin_id"] == made["pin_id"] and 90 < pin["remaining_s"] <= 100
    longer = shown("pin", "--tokens", ",".join(map(str, PROMPT)))
    assert longer["num_blocks"] == 4
    run("unpin", str(made["pin_id"]))
    assert "the pins are" in run("unpin", str(made["pin_id"]), exit_code=2)
    unpinned = shown("unpin", str(longer["pin_id"]))
    assert unpinned == {"name": "test-admin", "unpinned": longer["pin_id"]}
    assert shown("pins")["pins"] == []
    assert run("pins") == "nothing is pinned in test-admin\n"
    assert "no prefix of these 3 tokens" in run("pin", "--tokens", "7,8,9", exit_code=2)


def test_a_prefetch_raises_what_only_host_memory_holds(
    cluster: LocalAccess, engine: Engine, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(PROMPT))
    assert shown("prefetch", "--token-file", str(path))["num_loading_tokens"] == 0
    assert "nothing to load" in run("prefetch", "--token-file", str(path))
    block_ids = engine.client.get_block_ids("a")[0]
    engine.step(finished=("a", "b"))
    until(engine, lambda: num_ready(cluster) == 4)
    engine.client.evict_blocks(block_ids)
    assert shown("prefixes")["prefixes"] == []
    assert "one bracket" in run("prefetch", "--tokens", "[1", exit_code=2)
    made = shown("prefetch", "--tokens", ",".join(map(str, PROMPT)))
    assert made == {"name": NAME, "num_loading_tokens": 4 * BLOCK}
    assert "64 of 65 tokens are being loaded" in run("prefetch", "--token-file", str(path))
    assert shown("prefetch", "--token-file", str(path), "--salt", "x")["num_loading_tokens"] == 0
    until(engine, lambda: shown("prefixes")["prefixes"])
    (prefix,) = shown("prefixes")["prefixes"]
    assert (prefix["num_tokens"], prefix["num_holders"]) == (4 * BLOCK, 0)
    engine.step(new=(new("a"), new("b")))


def until(engine: Engine, is_so: Callable[[], object]) -> None:
    """Run empty steps until something is so."""
    wait_until(is_so, meanwhile=engine.step)


def num_ready(cluster: LocalAccess) -> int:
    offload = cluster.coordinator_statistics().offload
    return offload.tiers.host.num_ready


def test_top_shows_one_look(engine: Engine) -> None:
    look = shown("top", "--once", "--interval", "0.2")
    assert look["state"] == "ready" and look["num_running_requests"] == 2
    assert "2 running" in run("top", "--once", "--interval", "0.2")
    live = run("top", "--interval", "0.2", "--for", "0.5", "--json").splitlines()
    assert len(live) >= 2 and all(json.loads(line)["epoch"] for line in live)
    assert "hit rate" in run("top", "--interval", "0.2", "--for", "0.3")


def test_blocks_in_use_are_cleared_only_by_a_drain(cluster: LocalAccess, engine: Engine) -> None:
    assert "no terminal to ask on: pass --yes" in run("clear", exit_code=2)
    assert "6 blocks are in use by running requests (2)" in run("clear", "--yes", exit_code=2)
    epoch = cluster.coordinator_statistics().manager.model_epoch  # type: ignore[union-attr]
    late = run("clear", "--yes", "--drain", "--timeout", "0.5", exit_code=3)
    assert "still drains after 0.5 s, 6 blocks are in use by running requests (2)" in late
    engine.step(finished=("a", "b"))
    engine.step()
    after = cluster.coordinator_statistics().manager  # type: ignore[union-attr]
    assert after is not None and after.model_epoch == epoch + 1
    assert after.core.num_cached_blocks == 0
    engine.step(new=(new("a"), new("b")))  # for the fixture's end


def test_new_weights_wait_for_no_request(cluster: LocalAccess, engine: Engine) -> None:
    assert "pass one of them" in run("clear", "--yes", "--drain", "--new-weights", exit_code=2)
    cleared = shown("clear", "--yes", "--new-weights")
    assert cleared["model_epoch"] == cleared["model_epoch_before"] + 1
    assert shown("usage")["states"]["cached"] == 0
    manager = cluster.coordinator_statistics().manager
    assert manager is not None and manager.num_running_requests == 2


def test_an_idle_cache_is_cleared_at_once(cluster: LocalAccess) -> None:
    with cluster.client() as client:
        engine = Engine(client)
        engine.step(new=(new("c"),))
        engine.step()
        engine.step(finished=("c",))
    cleared = shown("clear", "--yes")
    assert cleared["num_forgotten_blocks"] >= 4
    assert shown("usage")["states"]["cached"] == 0
    assert shown("prefixes")["prefixes"] == []
    drained = shown("clear", "--yes", "--drain")
    assert drained["model_epoch"] == drained["model_epoch_before"] + 1


def test_status_has_the_state_the_ranks_the_tenants_and_the_tiers(engine: Engine) -> None:
    status = shown("status")
    assert (status["name"], status["state"], len(status["ranks"])) == (NAME, "ready", 2)
    assert status["statistics"]["manager"]["num_running_requests"] == 2
    told = run("status")
    for fact in ("2 running, 0 preempted", "(4 sealed)", "host tier", "gold", "ready"):
        assert fact in told, fact
    assert re.search(r"records, .* in ", told)
    usage = run("usage")
    assert "tiers below the device" in usage and "tokens asked" in usage


def test_what_a_cluster_waits_for_is_named_with_its_age(
    cluster: LocalAccess, engine: Engine
) -> None:
    assert "nothing is stuck in test-admin: all waits are normal" in run("status", "--stuck")
    engine.client.submit(StepRequest(completed_step=engine._last, new=(new("late"),)))
    cluster.local._service.turn()  # the coordinator decides; the ranks do not answer
    (wait, *_) = shown("status", "--stuck")["pending"]
    assert not wait["is_stuck"] and "STUCK" not in run("status", "--stuck")
    cluster.now_s = 60.0
    told = run_any("status", "--stuck")
    assert "STUCK" in told and "test-admin waits for" in told
    cluster.problem = "the disk is full"
    assert "test-admin has failed: the disk is full" in run_any("status", "--stuck")
    assert "test-admin has failed: the disk is full" in run("usage", exit_code=3)


def test_an_embedded_coordinator_cannot_be_asked_from_elsewhere(
    cluster: LocalAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = object.__new__(EmbeddedSite)
    monkeypatch.setattr(EmbeddedSite, "name", NAME, raising=False)
    monkeypatch.setattr(clusters, "named_cluster", lambda name: site)
    assert "is in a process of its engine" in run("usage", exit_code=3)
    assert "look there for what it waits" in run("status", "--stuck", exit_code=3)


def run_any(*arguments: str) -> str:
    """The output of a command that ends with exit code 1."""
    result = CliRunner().invoke(app, [*arguments, "--name", NAME])
    assert result.exit_code == 1, result.output
    return result.stdout
