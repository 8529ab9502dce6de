"""Commands that read and change a running cluster's cache, on a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors import KVCacheClient, KVCacheCluster
from actors.cli import app
from actors.cli.doctor import look_at_ray
from kvcache import NewRequest, StepRequest
from kvcache.base.arrays import int32_array
from tests.actors.conftest import build_config

pytestmark = pytest.mark.ray

BLOCK = 16
PROMPT = list(range(1000, 1000 + 4 * BLOCK + 1))
"""Four blocks and a token."""


@pytest.fixture(scope="module")
def cluster(ray_cluster: str) -> Iterator[KVCacheCluster]:
    with KVCacheCluster.launch(build_config("test-admin")) as cluster:
        yield cluster


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
def engine(cluster: KVCacheCluster) -> Iterator[Engine]:
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
    result = CliRunner().invoke(app, [*arguments, "--name", "test-admin"])
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


def test_top_shows_one_look(engine: Engine) -> None:
    look = shown("top", "--once", "--interval", "0.2")
    assert look["state"] == "ready" and look["num_running_requests"] == 2
    assert "2 running" in run("top", "--once", "--interval", "0.2")
    live = run("top", "--interval", "0.2", "--for", "0.5", "--json").splitlines()
    assert len(live) >= 2 and all(json.loads(line)["epoch"] for line in live)
    assert "hit rate" in run("top", "--interval", "0.2", "--for", "0.3")


def test_blocks_in_use_are_cleared_only_by_a_drain(cluster: KVCacheCluster, engine: Engine) -> None:
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


def test_an_idle_cache_is_cleared_at_once(cluster: KVCacheCluster) -> None:
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


def test_an_unknown_name_is_answered_with_the_known_ones(cluster: KVCacheCluster) -> None:
    for command in (["usage"], ["top", "--once"], ["status"], ["stop"]):
        result = CliRunner().invoke(app, [*command, "--name", "none"])
        assert result.exit_code == 3
        assert "no cluster named 'none' is running: choose one of " in result.stderr
        assert "test-admin" in result.stderr


def test_doctor_sees_the_ray_cluster_and_what_runs_there(cluster: KVCacheCluster) -> None:
    found = look_at_ray()
    assert found.is_running and found.num_nodes == 1 and not found.problem
    assert "test-admin" in found.clusters
