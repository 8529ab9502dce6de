"""Commands that read and change a running cluster's cache, on Ray.

`cli/test_cluster_commands.py` has their rules, in one process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from actors import KVCacheCluster
from actors.cli import app
from actors.cli.doctor import look_at_ray
from kvcache import NewRequest, StepRequest
from kvcache.base.arrays import int32_array
from tests.actors.conftest import build_config

pytestmark = pytest.mark.ray

PROMPT = list(range(1000, 1065))
"""Four blocks and a token."""


@pytest.fixture(scope="module")
def cluster(ray_cluster: str) -> Iterator[KVCacheCluster]:
    with KVCacheCluster.launch(build_config("test-admin")) as cluster:
        yield cluster


def shown(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json", "--name", "test-admin"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_commands_ask_the_actors_and_change_the_cache(cluster: KVCacheCluster) -> None:
    with cluster.client() as client:
        request = NewRequest("a", int32_array(PROMPT), max_new_tokens=len(PROMPT))
        first = client.step(StepRequest(new=(request,)))
        client.wait_finished(first.step)
        client.step(StepRequest(completed_step=first.step))
        assert shown("usage")["states"]["in_use"] == 5
        (prefix,) = shown("prefixes")["prefixes"]
        assert (prefix["num_blocks"], prefix["num_holders"], prefix["idle_s"]) == (4, 1, None)
        pin = shown("pin", "--tokens", ",".join(map(str, PROMPT)), "--ttl", "100")
        assert [each["pin_id"] for each in shown("pins")["pins"]] == [pin["pin_id"]]
        look = shown("top", "--once", "--interval", "0.2")
        assert (look["state"], look["num_running_requests"], look["num_pins"]) == ("ready", 1, 1)
        shown("unpin", str(pin["pin_id"]))
        client.step(StepRequest(finished=("a",)))
    cleared = shown("clear", "--yes", "--drain")
    assert cleared["num_forgotten_blocks"] == 4
    assert cleared["model_epoch"] == cleared["model_epoch_before"] + 1


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
