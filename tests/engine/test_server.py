"""The completions server over HTTP: answers, streams, prefixes, refusals, disconnects."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from examples.engine import ByteTokenizer, Engine, EngineConfig, SamplingParams
from tests.engine.test_tiers import tiers
from tests.waiting import wait_until

if importlib.util.find_spec("starlette") is None:
    pytest.skip("NO SERVE: THE COMPLETIONS SERVER IS NOT TESTED", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve's own, on import
    from ray import serve
    from ray.serve.handle import DeploymentHandle

    from examples.engine.server import APP_NAME, MODEL, EngineReplica, build

pytestmark = [
    pytest.mark.ray,
    pytest.mark.launches,
    pytest.mark.filterwarnings("default"),
]

PATIENCE_S = 120.0
DOCUMENT = "A document that many ask about, of quite some length: " * 6


@dataclass(frozen=True)
class Server:
    """The server's address, and its engines."""

    port: int
    engines: DeploymentHandle

    @contextmanager
    def asked(
        self, body: dict[str, Any] | bytes, path: str = "/v1/completions", method: str = "POST"
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data)
            yield connection.getresponse()
        finally:
            connection.close()

    def answer(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": MODEL.name, "prompt": "hello", "temperature": 0, **changes}
        with self.asked(body) as response:
            return response.status, json.loads(response.read())

    def running(self) -> int:
        """How many sequences run or wait, on all replicas that answer in a few requests."""
        seen = {}
        for _ in range(8):
            statistics = self.engines.statistics.remote().result()
            seen[statistics["pid"]] = statistics["num_running"] + statistics["num_waiting"]
        return sum(seen.values())


@pytest.fixture(scope="module")
def server(ray_cluster: str) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(build(), name=APP_NAME, route_prefix="/")
        yield Server(port, serve.get_deployment_handle("EngineReplica", APP_NAME))
    finally:
        serve.shutdown()


def until(holds: Callable[[], bool]) -> None:
    wait_until(holds, limit_s=PATIENCE_S)


def expected(prompt: str, **params: Any) -> str:
    """The output of an engine with the same model in this process."""
    config = EngineConfig(model=MODEL, name="expected")
    with Engine.launch(config) as engine:
        request_id = engine.add_request(ByteTokenizer().encode(prompt), SamplingParams(**params))
        return "".join(output.text for output in engine.stream(request_id))


def test_answers_and_streams_say_what_the_engine_says(server: Server) -> None:
    text = expected("hello", max_tokens=12)
    status, body = server.answer(max_tokens=12)
    assert (status, body["object"], body["model"]) == (200, "text_completion", MODEL.name)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["total_tokens"] == 17

    asked = {
        "model": MODEL.name,
        "prompt": "hello",
        "temperature": 0,
        "max_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with server.asked(asked) as response:
        assert response.status == 200
        assert response.getheader("content-type", "").startswith("text/event-stream")
        events = [line[6:] for line in response.read().decode().splitlines() if line]
    assert events[-1] == "[DONE]"
    *chunks, usage = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert len(chunks) > 1
    assert usage["usage"]["completion_tokens"] == 12


def test_several_choices_of_one_prompt(server: Server) -> None:
    status, body = server.answer(n=3, temperature=1.0, seed=5, max_tokens=6)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 18


def test_questions_go_where_their_document_is_cached(server: Server) -> None:
    """Whatever the router knows at first, soon every question hits the document."""
    numbers = iter(range(10_000))

    def finds_the_document() -> bool:
        found = [
            server.answer(prompt=f"{DOCUMENT}{next(numbers)}?", max_tokens=1)[1]["usage"]
            for _ in range(4)
        ]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in found]
        return min(cached) >= len(DOCUMENT) // 16 * 16

    until(finds_the_document)


def test_a_prefetch_loads_the_prefix_and_says_how_much() -> None:
    replica, prompt = EngineReplica(MODEL), ByteTokenizer().encode(DOCUMENT)

    async def cached_tokens(*, is_prefetch: bool) -> int:
        params = SamplingParams(max_tokens=1)
        outputs = replica.generate(prompt, params, is_prefetch=is_prefetch)
        return max([output.num_cached_tokens async for output in outputs])

    def ask(*, is_prefetch: bool) -> int:
        return asyncio.run(cached_tokens(is_prefetch=is_prefetch))

    engine = replica._engine
    with engine:
        num_full = (len(prompt) - 1) // 16 * 16
        assert ask(is_prefetch=False) == 0
        until(  # an engine in one process stores while it steps
            lambda: ask(is_prefetch=False) >= 0 and tiers(engine).host.num_stored == num_full // 16
        )
        engine.executor.client.evict_blocks(range(1, 100))
        assert ask(is_prefetch=True) == num_full
        assert tiers(engine).host.num_pending == 0
        assert ask(is_prefetch=False) == num_full


def test_a_prefetch_of_what_no_tier_has_ends_at_once(server: Server) -> None:
    status, body = server.answer(prompt="never asked before", prefetch=True)
    (choice,) = body["choices"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "", "stop")
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_who_goes_away_has_their_request_aborted(server: Server) -> None:
    until(lambda: server.running() == 0)
    body = {
        "model": MODEL.name,
        "prompt": "tell me everything",
        "max_tokens": 1000,
        "temperature": 0,
        "stream": True,
    }
    with server.asked(body) as response:
        assert response.readline().startswith(b"data: ")
        assert server.running() == 1
    until(lambda: server.running() == 0)
    status, _ = server.answer(max_tokens=1)
    assert status == 200


def test_refusals_have_a_reason_in_the_format_of_the_api(server: Server) -> None:
    for changes, param in (
        ({"prompt": ""}, "prompt"),
        ({"n": 0}, "n"),
        ({"best_of": 3}, "best_of"),
    ):
        status, body = server.answer(**changes)
        assert (status, body["error"]["param"]) == (400, param)
        assert body["error"]["type"] == "invalid_request_error"
    status, body = server.answer(model="other")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    for path, method, data, status in (
        ("/v1/chat/completions", "POST", b"{}", 404),
        ("/v1/completions", "GET", b"", 405),
        ("/v1/completions", "POST", b"{", 400),
        ("/v1/completions", "POST", b" " * (1 << 20) + b"{}", 413),
    ):
        with server.asked(data, path, method) as response:
            assert response.status == status
            assert json.loads(response.read())["error"]["message"]
    with server.asked(b"", "/v1/models", "GET") as response:
        assert json.loads(response.read())["data"][0]["id"] == MODEL.name
