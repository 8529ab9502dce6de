"""`kvcache vllm-coordinator`, in a process of its own."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from kvcache.base.errors import DeadlineError
from kvcache.sharing.access import read_keys
from kvcache.sharing.index_server import ask_status
from tests.cli.commands import KVCACHE, run
from tests.sharing.test_index import free_port


def test_a_coordinator_makes_keys_serves_and_ends_when_it_is_told(tmp_path: Path) -> None:
    address, keys = f"tcp://127.0.0.1:{free_port()}", tmp_path / "keys"
    served = [*KVCACHE, "vllm-coordinator", address, "--keys", str(keys)]
    anywhere = "tcp://127.0.0.1:0"
    publishing = ["--events", anywhere, "--events-replay", anywhere]
    process = subprocess.Popen([*served, *publishing], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr.readline().startswith(f"made {keys}: copy it")
        assert process.stderr.readline().startswith("events are at tcp://127.0.0.1:")
        assert process.stderr.readline() == f"listening at {address}\n"
        assert stat.S_IMODE(keys.stat().st_mode) == 0o600
        found = ask_status(address, read_keys(str(keys)), 30_000)
        assert (found["num_blocks"], list(found["sources"])) == (0, [])
        with pytest.raises(DeadlineError, match="no coordinator answers"):
            ask_status(address, None, 200)
        told = subprocess.run(
            [*served, "--status"], capture_output=True, text=True, check=True, timeout=60
        )
        assert "0 of 0 engines" in told.stdout
        plain = subprocess.run(
            [*served, "--status", "--json"], capture_output=True, text=True, check=True, timeout=60
        )
        assert json.loads(plain.stdout)["num_blocks"] == 0
        assert json.loads(plain.stdout)["events"]["topics"] == []
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.stderr.close()


def test_events_need_both_addresses() -> None:
    found = subprocess.run(
        [*KVCACHE, "vllm-coordinator", "tcp://127.0.0.1:7400", "--events", "tcp://127.0.0.1:1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 2
    assert "pass both, or none" in found.stderr


def test_an_address_on_the_network_needs_keys() -> None:
    found = subprocess.run(
        [*KVCACHE, "vllm-coordinator", "tcp://10.0.0.1:7400"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 2
    assert "is on the network, and there are no keys" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "pass tcp://HOST:PORT, or --ray NAME"),
        (["tcp://127.0.0.1:7400", "--ray", "chat"], "pass tcp://HOST:PORT, or --ray NAME"),
        (["tcp://127.0.0.1:7400", "--stop"], "--stop ends a coordinator on Ray"),
        (["--ray", "chat", "--stop", "--status"], "without --status"),
        (["--ray", "chat", "--keys", "/keys"], "has keys of its own: remove it"),
        (["--ray", "a/b"], "'a/b' is no name"),
        (["--ray", "chat", "--events", "1"], "pass both, or none"),
        (["--ray", "chat", "--events", "1", "--events-replay", "tcp://h:1"], "pass a port, 0 for"),
        (["--ray", "chat", "--events", "65536", "--events-replay", "1"], "pass a port, 0 for"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], problem: str) -> None:
    _, errors = run("vllm-coordinator", *arguments, exit_code=2)
    assert problem in errors


def test_without_a_ray_cluster_the_error_names_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    _, errors = run("vllm-coordinator", "--ray", "chat", exit_code=3)
    assert f"RAY_ADDRESS is {address}, and nothing answers there" in errors
