"""What a real vLLM tells of the connector's tiers: events, status, recordings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from typer.testing import CliRunner

from actors.cli import app
from actors.cli.engines import clear_engine, show_status
from kvcache.events import CacheMirror, ClearedEvent, KVEventSubscriber, StoredEvent, decode_batch
from kvcache.events.publisher import END_MARK
from kvcache.simulate import MooncakeTrace
from tests.vllm.conftest import Engine, Segment, Starter
from tests.vllm.test_connector import BLOCK, PROMPTS

pytestmark = pytest.mark.vllm

MEMORY_BLOCKS = 16
"""Fewer than the prompts have together."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def name(new_name: Callable[[], str]) -> str:
    return new_name()


@pytest.fixture(scope="module")
def engine(start: Starter, name: str, directory: Path) -> Iterator[Engine]:
    own = {
        "enabled": True,
        "endpoint": f"ipc://{directory}/own",
        "replay_endpoint": f"ipc://{directory}/own-replay",
    }
    stream = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{directory}/live",
        "replay_endpoint": f"ipc://{directory}/replay",
    }
    extra = {
        "name": name,
        "events": own,
        "record": str(directory),
        "offload": {"host_memory_per_rank": f"{64 * MEMORY_BLOCKS}KiB"},
    }
    started = start(extra, kv_events_config=stream)
    yield started
    started.kill()


def streamed(directory: Path) -> CacheMirror:
    """The state according to all events that vLLM has published."""
    mirror = CacheMirror()
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(f"ipc://{directory}/replay")
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert asking.poll(10_000), "vLLM does not answer"
            _, _, seq, payload = asking.recv_multipart()
            if seq == END_MARK:
                return mirror
            mirror.apply(decode_batch(payload).events)


def blocks(mirror: CacheMirror, medium: str) -> dict[int, StoredEvent]:
    """The blocks that a medium has, by their hashes."""
    return {
        value: event.part(i, i + 1)
        for event in mirror.state()
        if isinstance(event, StoredEvent) and event.medium == medium
        for i, value in enumerate(event.block_hashes.tolist())
    }


def told(mirror: CacheMirror, medium: str) -> dict[int, list[int]]:
    """The tokens of each block that a medium has."""
    return {value: e.token_ids.tolist() for value, e in blocks(mirror, medium).items()}


def publishable(expected: CacheMirror, published: CacheMirror) -> dict[int, list[int]]:
    """The tokens of the blocks in memory, except those that a publisher holds back: such a block
    was stored when the one before it had been evicted."""
    known = blocks(published, "CPU").keys()
    return {
        value: event.token_ids.tolist()
        for value, event in blocks(expected, "CPU").items()
        if value in known or not event.parent_block_hash or event.parent_block_hash in known
    }


def agreed(directory: Path, name: str) -> CacheMirror:
    """Wait until vLLM's stream and the labels in the memory say the same."""
    give_up_s = time.monotonic() + 60
    while True:
        mirror, held = streamed(directory), Segment(name, 0).event_hashes()
        if set(told(mirror, "CPU")) == held:
            return mirror
        assert time.monotonic() < give_up_s, (told(mirror, "CPU").keys(), held)
        time.sleep(0.1)


def test_the_stream_says_what_memory_holds(engine: Engine, name: str, directory: Path) -> None:
    engine.generate(PROMPTS)
    mirror = agreed(directory, name)
    in_memory, on_device = told(mirror, "CPU"), told(mirror, "GPU")
    assert len(in_memory) == MEMORY_BLOCKS
    assert in_memory.items() <= on_device.items()
    assert any(tokens == PROMPTS[0][:BLOCK] for tokens in on_device.values())
    assert not mirror.num_unknown_removals


def test_a_reset_of_the_device_leaves_the_memory_in_the_stream(
    engine: Engine, name: str, directory: Path
) -> None:
    engine.generate(PROMPTS)
    engine.reset()
    engine.generate([PROMPTS[0][:20]], 1)  # less than a block, but a step
    mirror = agreed(directory, name)
    assert len(told(mirror, "CPU")) == MEMORY_BLOCKS
    assert not told(mirror, "GPU")


def test_commands_find_the_engine_by_its_name(
    engine: Engine, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.generate(PROMPTS)
    engine.reset()
    time.sleep(1.1)  # vLLM's metrics come at most once a second
    engine.generate(PROMPTS)
    show_status(name, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "running"
    assert found["requests"]["num_loaded_tokens"] > 0
    assert found["tiers"]["host"]["num_ready"] == MEMORY_BLOCKS
    assert found["tiers"]["host"]["loaded_bytes"] > 0
    assert 0 < found["requests"]["load_wait_s"] < 60
    time.sleep(1.1)
    engine.generate(PROMPTS[:1], 1)
    assert engine.count()["kvcache_query_tokens"] > 0


def test_a_recording_is_simulated(engine: Engine, name: str, directory: Path) -> None:
    engine.generate(PROMPTS[:1], 8)
    (path,) = directory.glob(f"{name}-0-*.jsonl")
    give_up_s = time.monotonic() + 60
    while True:
        requests = list(MooncakeTrace(path).lines())
        if requests and requests[-1].output_length == 8:
            break
        assert time.monotonic() < give_up_s
        time.sleep(0.1)
    assert {request.input_length for request in requests} <= {20, len(PROMPTS[0])}
    assert requests[-1].hash_ids == requests[0].hash_ids
    result = CliRunner().invoke(app, ["simulate", str(path), "--blocks", "64", "--json"])
    assert result.exit_code == 0, result.output


def test_a_late_follower_of_the_publisher_is_exact(
    engine: Engine, name: str, directory: Path
) -> None:
    addresses = f"ipc://{directory}/own", f"ipc://{directory}/own-replay"

    def follow(expected: CacheMirror) -> CacheMirror:
        mirror, give_up_s = CacheMirror(), time.monotonic() + 60
        with KVEventSubscriber(*addresses) as subscriber:
            while not mirror or told(mirror, "CPU") != publishable(expected, mirror):
                assert time.monotonic() < give_up_s
                for update in subscriber.poll(0.5):
                    mirror.apply(update.batch.events)
        return mirror

    follow(agreed(directory, name))
    clear_engine(name, is_confirmed=True, as_json=True)  # the engine is idle
    engine.generate(PROMPTS[:2])  # memory has room for them
    expected = agreed(directory, name)
    assert told(follow(expected), "CPU") == told(expected, "CPU")
    clear_engine(name, is_confirmed=True, as_json=True)
    engine.generate([PROMPTS[0][:20]], 1)
    assert not told(agreed(directory, name), "CPU")
    with KVEventSubscriber(*addresses) as subscriber:
        events: list[Any] = []
        give_up_s = time.monotonic() + 60
        while not events:
            assert time.monotonic() < give_up_s
            events = [e for update in subscriber.poll(0.5) for e in update.batch.events]
        assert [type(event) for event in events] == [ClearedEvent]
