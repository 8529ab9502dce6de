"""`vllm serve` as docs/vllm.md starts it and asks it, over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from kvcache.metrics.engine_samples import EngineStatistics, engine_samples
from kvcache.metrics.engine_socket import ask_engine
from tests.vllm.conftest import ANSWER_S, START_S, ProcessTree, processes_of_session
from tests.vllm.programs import ENVIRONMENT, ROOT, Program, fork_server

pytestmark = pytest.mark.vllm

BLOCK = 32
NUM_TOKENS = 200
"""Of a prompt: the tokenizer makes one of each character."""

HIT = NUM_TOKENS // BLOCK * BLOCK

TINY = {
    "block-size": BLOCK,
    "dtype": "float32",
    "kv-cache-memory-bytes": 128 << 20,
    "max-model-len": 1024,
    "max-num-seqs": 8,
}
"""What the tiny model needs besides the documented options."""


def documented(pattern: str) -> dict[str, Any]:
    """Return the JSON that docs/vllm.md has in the pattern's only group."""
    (found,) = re.findall(pattern, (ROOT / "docs/vllm.md").read_text(), re.DOTALL)
    values: dict[str, Any] = json.loads(found)
    return values


TRANSFER = documented(r"`kvcache.json` holds\s+```json\n(.*?)```")
PREFETCH = documented(r"curl localhost:8000/v1/completions [^']*'[^']*' -d '(.*?)'\n")


def text(seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=NUM_TOKENS))


class Completion(NamedTuple):
    """The tokens of an answer, and how many of its prompt were not computed."""

    tokens: list[int]
    cached: int


class Server(ProcessTree):
    """A running API server: the command `vllm serve`, or the same forked.

    `num_prompt_tokens`, `num_cached_tokens`: of all its answers.
    """

    def __init__(
        self, python: str, model: str, transfer: dict[str, Any], log: Path, *, is_forked: bool
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._model = model
        arguments = ["--kv-transfer-config", json.dumps(transfer)]
        arguments += ["--enable-prompt-tokens-details", "--enforce-eager"]
        arguments += [f"--{name}={value}" for name, value in TINY.items()]
        arguments += ["--host=127.0.0.1", f"--port={self._port}"]
        with log.open("wb") as output:
            if is_forked:
                server = fork_server(python)
                asked = [f"--model={model}", *arguments]
                process = server.fork("tests.vllm.server_process", asked, output)
            else:
                process = run_vllm(python, ["serve", model, *arguments], output)
        super().__init__(process, log)
        self.num_prompt_tokens = self.num_cached_tokens = 0
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise
        self.note_shared_files()

    def complete(self, prompt: str, max_tokens: int = 16, **fields: Any) -> Completion:
        """Complete greedily."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, **fields}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, answer = self.ask("/v1/completions", body)
        assert status == http.HTTPStatus.OK, answer
        told = json.loads(answer)
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.num_prompt_tokens += told["usage"]["prompt_tokens"]
        self.num_cached_tokens += cached
        return Completion(told["choices"][0]["token_ids"], cached)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Return the status and the text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return the samples of `/metrics` by name and labels, but vLLM's own labels."""
        found = {}
        for line in self.ask("/metrics")[1].splitlines():
            if parts := re.fullmatch(r"(vllm:\w+)\{(.*)\} (\S+)", line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', parts[2]))
                rest = {k: v for k, v in labels.items() if k not in ("engine", "model_name")}
                found[parts[1], frozenset(rest.items())] = float(parts[3])
        return found

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                if self.ask("/health")[0] == http.HTTPStatus.OK:
                    return
            except ConnectionError:
                time.sleep(0.2)
            is_running = bool(processes_of_session(self.process.pid))
            is_in_time = time.monotonic() < deadline_s
            assert is_running and is_in_time, f"the server is not ready:\n{self.errors()}"


def run_vllm(python: str, arguments: Sequence[str], output: IO[bytes]) -> Program:
    """Start the command as its users do: each of its processes imports vLLM."""
    process = subprocess.Popen(
        [Path(python).with_name("vllm"), *arguments],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    )
    assert process.stdin is not None
    return Program(process.pid, process.stdin, Path(os.devnull).open("rb"), process.wait)


@pytest.fixture(scope="module")
def name(new_name: Callable[[], str]) -> str:
    return new_name()


@pytest.fixture(scope="module")
def transfer(name: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The documented configuration, with little memory."""
    disk = {"directory": str(tmp_path_factory.mktemp("files")), "capacity_per_rank": "64MiB"}
    offload = {"host_memory_per_rank": "64MiB", "disk": disk}
    extra = {**TRANSFER["kv_connector_extra_config"], "name": name, "offload": offload}
    assert extra.keys() == TRANSFER["kv_connector_extra_config"].keys()
    return {**TRANSFER, "kv_connector_extra_config": extra}


@pytest.fixture(scope="module")
def first(
    python: str, model: str, name: str, transfer: dict[str, Any], tmp_path_factory: Any
) -> dict[str, Completion]:
    """Answers of a server, which is then killed."""
    log = tmp_path_factory.mktemp("first") / "log"
    server = Server(python, model, transfer, log, is_forked=False)
    try:
        found = {"cold": server.complete(text(0)), "again": server.complete(text(0))}
        hints = {"hints": [{"start": 100, "returns_in_s": 5}]}
        found["hinted"] = server.complete(text(1), kv_transfer_params=hints)
        deadline_s = time.monotonic() + ANSWER_S
        while ask_engine(name, 0, {"do": "status"})["tiers"]["host"]["num_pending"]:
            assert time.monotonic() < deadline_s, "blocks are not stored"
            server.complete("a step", 1)
    finally:
        server.kill()
    assert "adopted 0 blocks and 0 files" in server.errors()
    return found


@pytest.fixture(scope="module")
def second(
    python: str,
    model: str,
    first: dict[str, Completion],
    transfer: dict[str, Any],
    tmp_path_factory: Any,
) -> Iterator[Server]:
    """The server after the kill."""
    log = tmp_path_factory.mktemp("second") / "log"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_LOG_STATS_INTERVAL", "1")
        server = Server(python, model, transfer, log, is_forked=True)
    yield server
    server.kill()


def test_usage_counts_cached_tokens(first: dict[str, Completion]) -> None:
    assert [first[what].cached for what in ("cold", "again", "hinted")] == [0, HIT, 0]
    assert first["again"].tokens == first["cold"].tokens


def test_after_kill_9_the_next_server_loads_what_the_killed_one_has_computed(
    second: Server, first: dict[str, Completion]
) -> None:
    (num_adopted,) = re.findall(r"adopted (\d+) blocks and 0 files", second.errors())
    assert int(num_adopted) >= 2 * HIT // BLOCK
    loaded = second.complete(text(0))
    assert loaded == Completion(first["cold"].tokens, HIT)


def test_the_documented_prefetch_loads_a_prompt_and_computes_one_token(
    second: Server, first: dict[str, Completion]
) -> None:
    on_device = "vllm:prefix_cache_hits_total", frozenset[tuple[str, str]]()
    fields = {key: PREFETCH[key] for key in PREFETCH.keys() - {"model", "prompt"}}
    held, unknown = text(1), text(2)
    prefetched = second.complete(held + unknown, **fields)
    assert (len(prefetched.tokens), prefetched.cached) == (1, HIT)
    second.num_prompt_tokens -= NUM_TOKENS * 2 - HIT - 1  # the rest is cut off
    before = second.metrics()[on_device]
    assert second.complete(held) == Completion(first["hinted"].tokens, HIT)
    assert second.metrics()[on_device] == before + HIT
    assert second.complete(unknown, 1).cached == 0


@pytest.mark.parametrize("wrong", [{"hints": [{"priority": 1000}]}, {"hints": "soon"}, {"a": 1}])
def test_a_request_with_invalid_hints_is_served(
    second: Server, first: dict[str, Completion], wrong: dict[str, Any]
) -> None:
    assert second.complete(text(0), kv_transfer_params=wrong).tokens == first["cold"].tokens
    assert second.errors().count("ignored in kv_transfer_params") == 1


def test_metrics_and_the_status_command_say_what_was_served(
    second: Server, python: str, name: str
) -> None:
    deadline_s = time.monotonic() + ANSWER_S
    while True:
        time.sleep(1.1)  # a step takes statistics along if the last ones are a second old
        second.complete("a step", 1)
        command = [Path(python).with_name("kvcache"), "status", "--vllm", name, "--json"]
        told = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, capture_output=True, check=True, timeout=60
        )
        status = json.loads(told.stdout)
        assert status.pop("state") == "running"
        metrics = second.metrics()
        expected = {
            (
                f"vllm:{each.metric.name}",
                frozenset(zip(each.metric.labels, each.labels, strict=True)),
            ): each.value
            for each in engine_samples(EngineStatistics.of_plain(status))
        }
        shown = {key: value for key, value in metrics.items() if key in expected}
        if shown == pytest.approx(expected):
            break
        assert time.monotonic() < deadline_s, (shown, expected)
    requests = status["requests"]
    assert requests["num_asked_tokens"] == second.num_prompt_tokens
    assert requests["num_device_tokens"] + requests["num_loaded_tokens"] == second.num_cached_tokens
    assert requests["num_loaded_tokens"] == 2 * HIT
    cluster = ("cluster", name)
    asked = metrics["vllm:kvcache_query_tokens_total", frozenset([cluster])]
    loaded = metrics["vllm:kvcache_hit_tokens_total", frozenset([cluster, ("tier", "host")])]
    assert (asked, loaded) == (second.num_prompt_tokens, 2 * HIT)
    for kind in ("failed_load", "failed_job", "expired_job", "disk_rest"):
        assert metrics["vllm:kvcache_errors_total", frozenset([cluster, ("kind", kind)])] == 0
    assert second.errors().count("host hits") > 0, "the log shows hits by tier"


def test_a_wrong_option_ends_the_server_with_one_sentence(
    python: str, model: str, transfer: dict[str, Any], tmp_path: Path
) -> None:
    extra = {**transfer["kv_connector_extra_config"], "weight_revison": "a"}
    wrong = {**transfer, "kv_connector_extra_config": extra}
    with pytest.raises(AssertionError) as ended:
        Server(python, model, wrong, tmp_path / "log", is_forked=True)
    assert "weight_revison: 'a': there is no such key: did you mean weight_revision?" in str(
        ended.value
    )
