"""A completions server: OpenAI's `/v1/completions` on Ray Serve, with two engines behind a router.

    curl ──HTTP──▶ Serve's proxy ──▶ Completions (checks, tokens) ──PrefixCacheRequestRouter──┐
         ◀──SSE──                                                                             ▼
                            EngineReplica 0 or 1: an engine, its coordinator and worker inside

A request goes to the replica whose cache has most of its prompt, according to cache events. If a
client disconnects, its request is aborted. This is a demonstration: the model has random weights,
and the server needs no key.

    pip install 'kvcache[serve]'
    .venv/bin/python -m examples.engine.server --port 8000

It joins the Ray cluster that runs on this machine or that RAY_ADDRESS names; if there is none, it
starts one. Ctrl-C ends the server and everything it started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from actors.routing.event_endpoints import endpoints_in
from actors.routing.serve_router import event_metadata
from examples.engine.completions import (
    MAX_BODY_BYTES,
    SSE_END,
    CompletionBody,
    CompletionError,
    CompletionRequest,
    sse,
)
from examples.engine.config import EngineConfig
from examples.engine.engine import LOADING_PAUSE_S, Engine
from examples.engine.executor import LocalExecutor
from examples.engine.model_config import DecoderConfig, llama
from examples.engine.outputs import Output
from examples.engine.sampling import SamplingParams
from examples.engine.tokenizer import ByteTokenizer
from kvcache.base.errors import RequestError
from kvcache.requests.hints import CacheHint

APP_NAME = "completions"
MODEL = llama(name="tiny-random-llama", max_model_len=1024)
NUM_REPLICAS = 2
HOST_MEMORY = "128MiB"
HEARTBEAT_S = 0.5
PREFETCH_S = 10.0
"""A prefetch is answered after this time at the latest."""


def engine_config(model: DecoderConfig = MODEL, name: str = "engine") -> EngineConfig:
    """Return the configuration of one replica: everything in its process, events for routers, and
    host memory, from which a prefix can be prefetched."""
    anywhere = "tcp://127.0.0.1:0"
    events = {
        "enabled": True,
        "endpoint": anywhere,
        "replay_endpoint": anywhere,
        "heartbeat_s": HEARTBEAT_S,
    }
    offload = {"host_memory_per_rank": HOST_MEMORY}
    sections: dict[str, dict[str, Any]] = {"events": events, "offload": offload}
    return EngineConfig(model=model, name=name, sections=sections)


class EngineReplica:
    """One engine. Requests share its steps; a request that waits for an output runs the next
    one."""

    def __init__(self, model: DecoderConfig = MODEL) -> None:
        torch.set_num_threads(1)
        self._engine = Engine.launch(engine_config(model, f"replica-{os.getpid()}"))

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the addresses of this replica's events, for routers."""
        executor = self._engine.executor
        assert isinstance(executor, LocalExecutor)
        cluster = executor.cluster
        statistics = cluster.coordinator.statistics().events
        return event_metadata(endpoints_in(statistics, cluster.config.name, HEARTBEAT_S))

    async def generate(
        self,
        token_ids: list[int],
        params: SamplingParams,
        hints: tuple[CacheHint, ...] = (),
        is_prefetch: bool = False,
    ) -> AsyncIterator[Output]:
        """Yield a request's outputs; closing early aborts the request. A prefetch has one, without
        tokens, when its prefix is loaded."""
        engine = self._engine
        if is_prefetch:
            count = await asyncio.to_thread(self._prefetch, token_ids)
            yield Output("", 0, finish_reason="stop", num_cached_tokens=count)
            return
        request_id = engine.add_request(token_ids, params, hints=hints)
        try:
            with engine.stream(request_id) as stream:
                async for output in stream:
                    yield output
        finally:
            # The next step frees aborted requests and publishes the last blocks. It runs even if
            # this task is cancelled.
            await asyncio.shield(asyncio.to_thread(self._settle))

    def _prefetch(self, token_ids: list[int]) -> int:
        """Raise a prefix from tiers; return how many of its tokens were loaded, or began to be."""
        count = left = self._engine.prefetch(token_ids)
        give_up_s = time.monotonic() + PREFETCH_S
        while left and time.monotonic() < give_up_s:
            self._engine.step()
            time.sleep(LOADING_PAUSE_S)
            left = self._engine.prefetch(token_ids)
        return count

    def _settle(self) -> None:
        """Run a step for requests that have gone; the others run their own."""
        self._engine.step()
        if not self._engine.has_unfinished:
            self._engine.step()

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of the engine, and its name."""
        return {"pid": os.getpid(), **asdict(self._engine.statistics())}


class Completions:
    """Serves HTTP, and forwards to the replicas."""

    def __init__(self, engines: Any, model: DecoderConfig = MODEL) -> None:
        """Take a handle of `EngineReplica`."""
        self._engines = engines.options(method_name="generate", stream=True)
        self._config = engine_config(model)
        self._tokenizer = ByteTokenizer()

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        try:
            return await self._answer(request)
        except CompletionError as error:
            return JSONResponse(error.body, error.status)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path.rstrip("/")
        if path == "/v1/models" and request.method == "GET":
            model = {"id": self._config.model.name, "object": "model", "owned_by": "kvcache"}
            return JSONResponse({"object": "list", "data": [model]})
        if path != "/v1/completions":
            raise CompletionError(f"there is no {path or '/'}: POST /v1/completions", status=404)
        if request.method != "POST":
            raise CompletionError(f"{request.method} is not served here: use POST", status=405)
        wanted = CompletionRequest.parse(await _body(request), self._config, self._tokenizer)
        body = CompletionBody(
            f"cmpl-{uuid.uuid4().hex}",
            int(time.time()),
            self._config.model.name,
            len(wanted.tokens),
        )
        outputs = self._engines.remote(
            token_ids=wanted.tokens,
            params=wanted.params,
            hints=wanted.hints,
            is_prefetch=wanted.is_prefetch,
        )
        if wanted.is_stream:
            return StreamingResponse(
                _events(outputs, body, wanted.includes_usage), media_type="text/event-stream"
            )
        try:
            async for output in outputs:
                body.add(output)
        except RequestError as error:
            raise CompletionError(str(error)) from None
        finally:
            outputs.cancel()  # no effect if it has ended
        return JSONResponse(body.whole())


async def _body(request: Request) -> bytes:
    """Return the body of a request, up to a limit."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise CompletionError(
                f"the body is longer than {MAX_BODY_BYTES} bytes: send a shorter prompt", status=413
            )
    return body


async def _events(outputs: Any, body: CompletionBody, includes_usage: bool) -> AsyncIterator[str]:
    """Yield the events of a stream. If the client disconnects, the request is aborted."""
    try:
        async for output in outputs:
            yield sse(body.add(output))
        if includes_usage:
            yield sse(body.usage_chunk())
        yield SSE_END
    except CompletionError as error:
        yield sse(error.body)
    finally:
        outputs.cancel()


def build(model: DecoderConfig = MODEL) -> serve.Application:
    """Return the application: one entry point, and engines behind the prefix router."""
    router: dict[str, Any] = {
        "request_router_class": "actors.routing.serve_router.PrefixCacheRequestRouter"
    }
    engines: Any = serve.deployment(
        EngineReplica,
        num_replicas=NUM_REPLICAS,
        max_ongoing_requests=64,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(**router),
    )
    entrance: Any = serve.deployment(
        Completions, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.1}
    )
    application: serve.Application = entrance.bind(engines.bind(model), model)
    return application


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    ray.init(log_to_driver=False, include_dashboard=False)
    serve.start(http_options={"host": options.host, "port": options.port})
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        serve.run(build(), name=APP_NAME, route_prefix="/")
        print(f"serving {MODEL.name} on http://{options.host}:{options.port}/v1/completions")
        ended.wait()
    except KeyboardInterrupt:
        pass
    finally:
        end: Any = serve.shutdown
        end()
        ray.shutdown()


if __name__ == "__main__":
    main()
