"""The page of a real cluster under load, from the command line into a browser."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors import KVCacheClient, KVCacheCluster
from kvcache import NewRequest, StepRequest
from kvcache.base.arrays import int32_array
from tests.actors.conftest import build_config
from tests.cli.commands import KVCACHE

pytestmark = [pytest.mark.ray, pytest.mark.launches]

DEADLINE_S = 90.0
HTML_IF_DRAWN = "document.body?.dataset.drawn ? document.documentElement.outerHTML : ''"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def cluster(ray_cluster: str) -> Iterator[KVCacheCluster]:
    events = {"enabled": True, "endpoint": "tcp://127.0.0.1:0"}
    config = build_config("test-page", events={**events, "replay_endpoint": "tcp://127.0.0.1:0"})
    with KVCacheCluster.launch(config) as cluster:
        yield cluster


@contextmanager
def served(
    *arguments: str, address: str, ending: signal.Signals = signal.SIGINT
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the address of `kvcache dashboard`; Ctrl-C, or another signal, ends it."""
    command = [*KVCACHE, "dashboard", "--json", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": address},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield json.loads(line)["url"], process
        process.send_signal(ending)
        assert process.wait(DEADLINE_S) == 0, process.stderr.read()
        told = process.stderr.read()
        assert "Traceback" not in told  # pages that were closed are no errors
        assert "SIGTERM received" not in told  # what Ray's own handler says, with its stack
    finally:
        process.kill()
        process.communicate()


def play(client: KVCacheClient) -> None:
    """Two prompts that share three blocks; one of them stays."""
    last = -1
    for name, tail in (("a", 7), ("b", 8)):
        tokens = [*range(48), *([tail] * 33)]
        request = NewRequest(name, int32_array(tokens), max_new_tokens=len(tokens))
        result = client.step(StepRequest(completed_step=last, new=(request,)))
        client.wait_finished(result.step)
        last = result.step
    result = client.step(StepRequest(completed_step=last, finished=("a",)))
    client.wait_finished(result.step)
    client.step(StepRequest(completed_step=result.step))


def test_the_page_shows_what_the_cluster_has(
    cluster: KVCacheCluster, ray_cluster: str, tmp_path: Path
) -> None:
    with (
        cluster.client() as client,
        served("--name", cluster.name, "--port", "0", address=ray_cluster) as (url, _),
    ):
        play(client)
        picture = follow(f"{url}stream")
        assert picture["state"] == "ready"
        assert picture["facts"]["hit_rate"] > 0
        assert picture["pool"]["counts"]["in use"] == 6  # 48 + 33 tokens in blocks of 16
        assert picture["events"]["is_same_state"] is True
        assert picture["tree"]["num_prefixes"] == 2
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(
                urllib.request.Request(f"{url}state.json", headers={"Host": "evil.example"}),
                timeout=DEADLINE_S,
            )
        if CHROMIUM is None:
            pytest.skip("NO CHROMIUM: THE PAGE IS NOT LOOKED AT (apt install chromium)")
        page = in_chromium(url, tmp_path)
        assert 'data-drawn="' in page
        assert '<span id="state" class="badge ready">ready</span>' in page
        assert "2 prefixes, 80 tokens deep" in page
        assert "in use 6" in page
        assert (tmp_path / "page.png").stat().st_size > 10_000


def follow(url: str) -> dict[str, dict[str, object]]:
    """Return the first picture in which the events agree and the tree is complete."""
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as stream:
        for _ in range(200):
            line = stream.readline().decode()
            if not line.startswith("data: "):
                continue
            picture = json.loads(line[6:])
            tree = picture.get("tree") or {}
            if tree.get("num_prefixes") == 2 and picture["events"].get("is_same_state"):
                found: dict[str, dict[str, object]] = picture
                return found
    raise AssertionError(f"the page never showed the prompts: {picture}")


def in_chromium(url: str, directory: Path) -> str:
    """Return the page once a browser has drawn it, and save its picture as `page.png`."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1280,860",
        "--remote-debugging-pipe",
        f"--user-data-dir={directory / 'profile'}",
    ]
    with Browser(command) as browser:
        browser.open(url)
        while not (drawn := browser.evaluate(HTML_IF_DRAWN)):
            time.sleep(0.1)
        picture = browser.call("Page.captureScreenshot")["data"]
        (directory / "page.png").write_bytes(base64.b64decode(picture))
        return drawn


class Browser:
    """A browser that takes commands of the DevTools protocol from file 3 and answers on file 4.

    Both directions carry JSON messages that end with a zero byte.
    """

    def __init__(self, command: list[str]) -> None:
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        ends = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", ends, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread = b""
        self._last = 0
        self._session: dict[str, str] = {}
        self._ends_at = time.monotonic() + DEADLINE_S

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._commands)
        os.close(self._answers)
        self._process.kill()
        self._process.wait()

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> str:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression)
        return str(answer["result"]["value"])

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and return its result; events in between are dropped."""
        assert time.monotonic() < self._ends_at, f"no page within {DEADLINE_S} s"
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last:
            pass
        assert "result" in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left_s = self._ends_at - time.monotonic()
            ready, _, _ = select.select([self._answers], [], [], max(0.0, left_s))
            assert ready, f"the browser said nothing within {DEADLINE_S} s"
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, f"the browser ended with {self._process.wait()}"
            self._unread += chunk
        message, self._unread = self._unread.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found


def test_a_port_that_is_taken_and_an_address_of_others_are_errors_that_say_what_to_do(
    cluster: KVCacheCluster, ray_cluster: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = refused("--name", cluster.name, "--port", port, address=ray_cluster)
    assert f"cannot listen on 127.0.0.1:{port}" in told
    assert "choose another --port" in told
    told = refused("--host", "0.0.0.0", address=ray_cluster)
    assert "SSH tunnel" in told
    told = refused("--name", "nobody", address=ray_cluster)
    assert "no cluster named 'nobody'" in told
    assert cluster.name in told


def test_sigterm_ends_the_page_as_ctrl_c_does(cluster: KVCacheCluster, ray_cluster: str) -> None:
    arguments = ("--name", cluster.name, "--port", "0")
    with served(*arguments, address=ray_cluster, ending=signal.SIGTERM):
        pass


def refused(*arguments: str, address: str) -> str:
    """Return the refusal of the command."""
    ended = subprocess.run(
        [*KVCACHE, "dashboard", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "RAY_ADDRESS": address, "COLUMNS": "500"},
        check=False,
    )
    assert ended.returncode in (2, 3), ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr + ended.stdout
