"""Dynamo's own indexer as a process, and its answers over HTTP.

`python -m dynamo.indexer`, as installed. Its listener can be paused, which it allows for tests:
it misses messages published during that time.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final, Protocol

from tests.interop.published_cluster import MODEL, PATIENCE_S, Answer, Prompt, free_endpoint

TIERS: Final = {"device": "GPU", "host_pinned": "CPU", "disk": "STORAGE"}
"""Our names of the tiers in its dumps."""

_INSTANCE: Final = 1
_REPLY_S: Final = 30.0


class Publisher(Protocol):
    """What an indexer subscribes to."""

    @property
    def endpoint(self) -> str: ...
    @property
    def replay_endpoint(self) -> str: ...
    @property
    def block_size(self) -> int: ...


class DynamoIndexer:
    """A running indexer, with one publisher or none yet."""

    def __init__(self, python: Path, log: Path) -> None:
        """Start it and wait until it answers; `log` is a file for its output."""
        port = free_endpoint().rpartition(":")[2]
        self._url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [python, "-m", "dynamo.indexer", "--port", port, "--threads", "2"],
                stdout=file,
                stderr=file,
                env={**os.environ, "DYN_KV_INDEXER_TEST_ENDPOINTS": "1"},
            )
        give_up_s = time.monotonic() + PATIENCE_S
        while not self._is_there():
            assert self._process.poll() is None, f"the indexer has ended: {self.said()}"
            assert time.monotonic() < give_up_s, f"the indexer does not answer: {self.said()}"
            time.sleep(0.05)

    def __enter__(self) -> DynamoIndexer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def said(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-4000:]

    def register(self, publisher: Publisher, rank: int = 0) -> None:
        """Subscribe to a publisher, as that of a data-parallel rank."""
        self.post(
            "/register",
            instance_id=_INSTANCE,
            endpoint=publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
            model_name=MODEL,
            block_size=publisher.block_size,
            dp_rank=rank,
        )

    def unregister(self) -> None:
        """Remove the publisher and all its blocks."""
        self.post("/unregister", instance_id=_INSTANCE, model_name=MODEL)

    def pause(self) -> None:
        """Stop receiving: later messages are lost."""
        self.post("/test/pause_listener", instance_id=_INSTANCE)

    def resume(self) -> None:
        """Receive again."""
        self.post("/test/resume_listener", instance_id=_INSTANCE)

    def answer(self, prompt: Prompt) -> Answer:
        """Return its answer for a prompt."""
        found = self._query(prompt)
        there = found["instances"].get(str(_INSTANCE))
        if there is None:
            return Answer(0, 0, 0)
        assert there["longest_matched"] == max(there["gpu"], there["cpu"], there["disk"])
        assert found["scores"].get(str(_INSTANCE), {}).get("0", 0) == there["gpu"]
        return Answer(there["gpu"], there["cpu"], there["disk"])

    def device_by_rank(self, prompt: Prompt) -> dict[int, int]:
        """Return the leading tokens of a prompt on the device of each rank that has any."""
        scores = self._query(prompt)["scores"].get(str(_INSTANCE), {})
        return {int(rank): tokens for rank, tokens in scores.items()}

    def hashes(self) -> dict[str, set[int]]:
        """Return the hashes of all its blocks, by medium."""
        found: dict[str, set[int]] = {}
        for dumped in self._get("/dump").values():
            for event in dumped["events"]:
                blocks = event["event"]["data"]["stored"]["blocks"]
                medium = found.setdefault(TIERS[event["storage_tier"]], set())
                medium.update(block["block_hash"] for block in blocks)
        return found

    def post(self, path: str, **body: Any) -> Any:
        """Send a request; raises AssertionError unless it succeeds."""
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        try:
            return self._get(urllib.request.Request(self._url + path, data=data, headers=headers))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {body}: {error} {error.read()!r}") from error

    def _query(self, prompt: Prompt) -> Any:
        asked: dict[str, Any] = {
            "token_ids": prompt.token_ids.tolist(),
            "model_name": MODEL,
            "lora_name": prompt.lora_name,
            "cache_salt": prompt.cache_salt,
        }
        return self.post("/query", **asked)

    def _get(self, request: str | urllib.request.Request) -> Any:
        if isinstance(request, str):
            request = urllib.request.Request(self._url + request)
        with urllib.request.urlopen(request, timeout=_REPLY_S) as reply:
            return json.loads(reply.read() or b"null")

    def _is_there(self) -> bool:
        try:
            self._get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True
