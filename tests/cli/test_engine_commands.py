"""`--vllm NAME`: commands about an engine on this node, which is a plain class here."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from actors.cli import app
from actors.cli.command import EXIT_CLUSTER, EXIT_INPUT
from actors.cli.engines import facts, rates
from kvcache.memory_service.client import MemoryServiceClient, service_address
from kvcache.memory_service.service import HostMemoryService
from kvcache.metrics import engine_socket
from kvcache.metrics.engine_samples import EngineStatistics, RequestStatistics
from kvcache.worker.host_memory.shared_memory import SYSTEM_ROOT, make_memory
from tests.integrations.test_vllm_block_store import request_of
from tests.integrations.test_vllm_control import Asked


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr(engine_socket, "_WAIT_S", 0.02)  # it ends as soon
    made = Asked(num_files=24)
    for name in ("r", "s"):
        made.cluster.run(request_of(name, 13))
        made.cluster.settle()
    made.statistics()
    yield made
    made.socket.close()


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_the_status_of_an_engine(asked: Asked) -> None:
    found = json.loads(run("status", "--vllm", asked.name, "--json"))
    assert found["state"] == "running"
    assert found["requests"]["num_loaded_tokens"] == 12
    assert found["tiers"]["host"]["num_ready"] == 3
    told = run("status", "--vllm", asked.name)
    assert "device 0.0%, host 46.2%, disk 0.0% of tokens" in told
    assert "3 of 8 blocks" in told


def test_the_status_of_an_engine_that_shares_with_other_nodes(asked: Asked) -> None:
    found = asked.statistics()
    nodes = {
        "coordinator": "tcp://10.0.0.1:7400",
        "num_questions": 7,
        "num_unanswered_questions": 2,
        "is_giving_blocks": False,
    }
    requests = RequestStatistics(num_asked_tokens=100, num_loaded_tokens=60, num_remote_tokens=45)
    tiers = found.tiers
    tiers = replace(tiers, host=replace(tiers.host, num_copies=2))
    told = facts(replace(found, requests=requests, nodes=nodes, tiers=tiers))
    assert "2 copies" in told[f"{tiers.host.medium} tier"]
    assert told["hits"] == "device 0.0%, host 15.0%, disk 0.0%, other nodes 45.0% of tokens"
    assert "7 questions, 2 unanswered" in told["other nodes"]
    assert "does not give blocks" in told["other nodes"]
    assert "other nodes" not in facts(found)


def test_the_metrics_of_an_engine(asked: Asked) -> None:
    told = run("status", "--vllm", asked.name, "--metrics")
    assert f'kvcache_hit_tokens_total{{cluster="{asked.name}",tier="host"}} 12' in told


def test_the_usage_of_an_engine(asked: Asked) -> None:
    found = json.loads(run("usage", "--vllm", asked.name, "--json"))
    assert found["tiers"]["disk"]["num_slots"] == 24
    assert (found["name"], found["replica"]) == (asked.name, 0)
    assert "tiers below the device" in run("usage", "--vllm", asked.name)


def test_an_engine_live(asked: Asked) -> None:
    told = run("top", "--vllm", asked.name, "--once", "--interval", "0.1", "--json")
    assert json.loads(told)["requests"]["num_requests"] == 2
    assert "requests/s" in run("top", "--vllm", asked.name, "--once", "--interval", "0.1")


@pytest.mark.parametrize("option", ["--drain", "--new-weights"])
def test_an_engine_is_not_told_of_new_weights(asked: Asked, option: str) -> None:
    told = run("clear", "--vllm", asked.name, "--yes", option, code=EXIT_INPUT)
    assert "reset_prefix_cache(reset_connector=True)" in told.replace("\n", "")
    assert json.loads(run("status", "--vllm", asked.name, "--json"))["tiers"]["host"]["num_ready"]


def test_an_engine_is_cleared_only_when_it_is_confirmed(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.integrations.vllm.control.CLEAR_S", 0.01)
    assert "pass --yes" in run("clear", "--vllm", asked.name, code=EXIT_INPUT)
    assert asked.control._wanted is None
    assert "is idle: 3 blocks" in run("clear", "--vllm", asked.name, "--yes")
    asked.control.step()
    assert asked.statistics().tiers.host.num_ready == 0


def test_options_of_clusters_are_refused_for_an_engine_and_the_other_way_round(
    asked: Asked,
) -> None:
    for option in (("--stuck",), ("--name", "chat")):
        told = run("status", "--vllm", asked.name, *option, code=EXIT_INPUT)
        assert "--name and --stuck are for clusters, not for --vllm" in told
    assert "--metrics is for --vllm NAME" in run("status", "--metrics", code=EXIT_INPUT)


def test_memory_that_an_engine_has_left_is_shown() -> None:
    name = f"test-{uuid.uuid4().hex[:8]}"
    address = service_address(name, 1)
    service = HostMemoryService(address.address, max_segments=4, max_bytes=1 << 20)
    service.serve()
    descriptor = make_memory("test", 4096, SYSTEM_ROOT)
    MemoryServiceClient(address.address).put(address.name_of(0), descriptor)
    found = json.loads(run("status", "--vllm", name, "--json"))
    told = run("status", "--vllm", name)
    of_replica = json.loads(run("status", "--vllm", f"{name}/1", "--json"))
    told_of_replica = run("status", "--vllm", f"{name}/1")
    of_first = run("status", "--vllm", f"{name}/0", code=EXIT_CLUSTER)
    service.close()
    assert (found["state"], found["name"], found["replica"]) == ("not running", name, None)
    assert of_replica == {**found, "replica": 1}
    assert f"no engine {name}/1 runs" in told_of_replica
    # Other tests may keep memory at the same time.
    assert f"no engine '{name}' runs" in of_first and name in of_first.partition("is kept of:")[2]
    assert found["kept"] == [{"name": f"{name}/replica1/rank0", "num_bytes": 4096, "process_id": 0}]
    assert f"no engine {name} runs" in told and "4.0 KiB" in told


def test_a_replica_that_does_not_run_is_not_shown_as_another_that_does(asked: Asked) -> None:
    address = service_address(asked.name)
    service = HostMemoryService(address.address, max_segments=4, max_bytes=1 << 20)
    service.serve()
    descriptor = make_memory("test", 4096, SYSTEM_ROOT)
    MemoryServiceClient(address.address).put(address.name_of(0), descriptor)
    told = run("status", "--vllm", f"{asked.name}/1", code=EXIT_CLUSTER)
    service.close()
    assert "replica 1, runs" in told and asked.name in told


def test_rates_are_never_negative() -> None:
    def engine(uptime_s: float, **counts: int) -> EngineStatistics:
        requests = RequestStatistics(num_requests=1, num_asked_tokens=4000, **counts)
        return EngineStatistics("chat", 0, "tiny", 7, 1, 16, uptime_s, requests, None)

    first = engine(1, num_device_tokens=32)
    loaded = engine(2, num_device_tokens=32, num_loaded_tokens=3968)
    told = "0.0 requests/s, 0 tokens/s; 0 on the device, 3,968 loaded"
    assert rates(first, loaded) == {"now": told}
    told = "1.0 requests/s, 4,000 tokens/s; 32 on the device, 0 loaded"
    assert rates(loaded, first) == {"now": told}, "another engine with the same process number"


def test_an_engine_that_is_not_known_is_an_error_with_those_that_are(asked: Asked) -> None:
    for verb in ("status", "usage", "top", "clear"):
        told = run(verb, "--vllm", "nowhere", code=EXIT_CLUSTER)
        assert "no engine 'nowhere' runs" in told and asked.name in told
    assert "write NAME" in run("status", "--vllm", "chat/x", code=EXIT_INPUT)
