"""Two real vLLM engines, each on a node of its own, that share through a coordinator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.connect import find_actor
from actors.names import vllm_coordinator_name
from actors.vllm_coordinator import ask_place, start_vllm_coordinator, stop_vllm_coordinator
from kvcache.events import KVEventSubscriber, StoredEvent, SubscriptionSettings
from kvcache.integrations.vllm import nodes
from kvcache.metrics.engine_socket import ask_engine
from kvcache.sharing.index_server import ask_status
from tests.sharing.test_index import free_port
from tests.vllm.conftest import ROOT, Engine, Segment, Starter, made_model
from tests.vllm.programs import ENVIRONMENT
from tests.vllm.test_connector import BLOCK, FAMILIES, HITS, MEMORY, PROMPTS, damage
from tests.waiting import wait_until

pytestmark = pytest.mark.vllm

PATIENCE = {"answer_s": 10, "silence_s": 60}
"""Processes wait for seconds here: vLLM's of two engines have hundreds of threads for few cores."""

OTHERS = [[(7 * i + 3 * k) % 400 + 50 for i in range(200)] for k in range(4)]


class Coordinator:
    """`kvcache vllm-coordinator`, in a process of its own."""

    def __init__(self) -> None:
        self.address, *places = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))
        self.events = places[0], places[1]
        self.start()

    def start(self) -> None:
        run = "from actors.cli import main; main()"
        events = ["--events", self.events[0], "--events-replay", self.events[1]]
        command = [sys.executable, "-c", run, "vllm-coordinator", self.address, *events]
        self.process = subprocess.Popen(command, cwd=ROOT)
        try:
            ask_status(self.address, None, 30_000)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def status(self) -> dict[str, Any]:
        return ask_status(self.address, None, 10_000)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator()
    yield made
    made.kill()


def await_blocks(status: Callable[[], dict[str, Any]], *names: str) -> None:
    """Return when a coordinator knows all blocks that these engines hold, and none are coming."""

    def held() -> list[int]:
        found = [ask_engine(name, 0, {"do": "status"})["tiers"] for name in names]
        if any(sum(each["open_jobs"].values()) for each in found):
            return []
        return sorted((each["disk"] or each["host"])["num_ready"] for each in found)

    def known() -> list[int]:
        return sorted(source["num_blocks"] for source in status()["sources"])

    wait_until(
        lambda: any(blocks := held()) and blocks == known(),
        lambda: f"the coordinator knows {known()} blocks, engines hold {held()}",
        pause_s=0.1,
    )


def options_of(name: str, coordinator: Coordinator) -> dict[str, Any]:
    sharing = {"address": coordinator.address, **PATIENCE}
    return {"name": name, "coordinator": sharing, **MEMORY}


def test_what_one_node_computes_another_one_loads_and_without_help_it_computes(
    start: Starter, new_name: Callable[[], str], coordinator: Coordinator
) -> None:
    names = new_name(), new_name()
    first, second = (start(options_of(name, coordinator), is_forked=False) for name in names)
    cold = first.generate(PROMPTS)
    assert cold.cached == [0, 0, 0]
    first.generate(OTHERS, 1)
    first.generate(OTHERS[-1:], 1)  # a step after the last one brings its seals
    await_blocks(coordinator.status, *names)

    loaded = second.generate(PROMPTS[:2])
    assert (loaded.cached, loaded.tokens) == (HITS[:2], cold.tokens[:2])
    status = ask_engine(names[1], 0, {"do": "status"})
    assert status["requests"]["num_remote_tokens"] == sum(HITS[:2])
    assert status["nodes"]["num_unanswered_questions"] == 0

    coordinator.kill()
    alone = second.generate(PROMPTS)
    assert alone.tokens == cold.tokens and alone.cached[2] == 0
    status = ask_engine(names[1], 0, {"do": "status"})
    assert status["nodes"]["num_unanswered_questions"] >= 1

    coordinator.start()
    await_blocks(coordinator.status, *names)
    time.sleep(5)  # the engine asks again
    again = second.generate(OTHERS[:2], 1)
    assert again.cached == [192, 192]
    expected = first.generate(OTHERS, 8).tokens

    first.kill()
    silent = second.generate(OTHERS, 8)  # before the coordinator has noticed
    assert silent.tokens == expected
    assert second.generate(OTHERS, 8).tokens == expected
    second.kill()


@contextmanager
def killed_after(seconds: float, kill: Callable[[], None]) -> Iterator[None]:
    """Kill in the middle of what is done meanwhile."""
    killer = threading.Timer(seconds, kill)
    killer.start()
    yield
    killer.join()


@pytest.fixture
def shared_model(python: str, tmp_path: Path, kind: str) -> str:
    """A tiny random model of this kind."""
    return made_model(python, tmp_path, kind)


@pytest.mark.parametrize(("kind", "num_ranks"), [("llama", 2), ("gemma3", 1), ("mistral", 1)])
def test_ranks_and_groups_are_shared_and_damage_and_kills_change_no_token(
    start: Starter,
    new_name: Callable[[], str],
    coordinator: Coordinator,
    shared_model: str,
    num_ranks: int,
) -> None:
    setting = {"model": shared_model, "tensor_parallel_size": num_ranks}
    plain = start(**setting)
    expected = plain.generate(PROMPTS).tokens
    of_families = plain.generate(FAMILIES, 8).tokens
    plain.kill()

    names = new_name(), new_name()
    first, second = (start(options_of(name, coordinator), **setting) for name in names)
    assert first.generate(PROMPTS).tokens == expected
    assert first.generate(FAMILIES, 8).tokens == of_families
    first.generate(OTHERS[:1], 1)  # a step after the last one brings its seals
    await_blocks(coordinator.status, *names)

    loaded = second.generate(PROMPTS)
    assert (loaded.cached, loaded.tokens) == (HITS, expected)
    status = ask_engine(names[1], 0, {"do": "status"})
    assert status["requests"]["num_remote_tokens"] >= 2 * BLOCK * len(PROMPTS)  # a window's blocks
    second.generate(OTHERS[:1], 1)
    for rank in range(num_ranks):
        given, got = (Segment(name, rank).contents() for name in names)
        same = given.keys() & got.keys()
        assert len(same) >= 2 * len(PROMPTS)
        assert all(given[key] == got[key] for key in same)

    damaged = Segment(names[0], num_ranks - 1)
    for slot in damaged.sealed_slots()[::5]:
        damaged.flip_byte(slot, tensor=slot % len(damaged.shape.widths))
    assert second.generate(FAMILIES[:20], 8).tokens == of_families[:20]
    assert "the checksum of its bytes is wrong" in second.errors()
    with killed_after(0.3, first.kill):
        assert second.generate(FAMILIES[:60], 8).tokens == of_families[:60]
    with killed_after(0.3, coordinator.kill):
        assert second.generate(FAMILIES, 8).tokens == of_families
    second.kill()


def test_blocks_that_are_only_in_files_of_a_node_are_loaded_by_another_one(
    start: Starter, new_name: Callable[[], str], coordinator: Coordinator, tmp_path: Path
) -> None:
    names = new_name(), new_name()
    disk = {"directory": str(tmp_path), "capacity_per_rank": "64MiB", "write": "on_store"}
    small = {"host_memory_per_rank": "1MiB", "disk": disk}
    first = start({**options_of(names[0], coordinator), "offload": small})
    second = start({**options_of(names[1], coordinator), "adopt_after_reset": True})
    expected = [first.generate([prompt]).tokens[0] for prompt in PROMPTS]  # memory has no room
    first.generate(FAMILIES[:8], 1)
    for probe in OTHERS:  # steps, in which blocks go on to files
        first.generate([probe[:40]], 1)
    await_blocks(coordinator.status, *names)
    loaded = second.generate(PROMPTS)
    assert (loaded.cached, loaded.tokens) == (HITS, expected)
    deadline_s = time.monotonic() + 60
    while not given_from_files(names[0]):
        first.generate([PROMPTS[0][:20]], 1)  # a step looks at the counts
        assert time.monotonic() < deadline_s, "nothing was read from files"
        time.sleep(0.2)

    damage(list(tmp_path.rglob("*.kvb"))[::2])
    second.reset(connector=True)
    assert second.generate(PROMPTS).tokens == expected
    first.kill()
    second.kill()


def test_what_both_nodes_have_computed_is_a_copy_on_one_until_the_other_is_gone(
    start: Starter, new_name: Callable[[], str], coordinator: Coordinator
) -> None:
    names = new_name(), new_name()
    first, second = (start(options_of(name, coordinator)) for name in names)
    coordinator.kill()
    for engine in (first, second):
        engine.generate(PROMPTS, 1)
        engine.generate(OTHERS[:1], 1)  # a step after the last one brings its seals
    coordinator.start()
    await_blocks(coordinator.status, *names)
    found = coordinator.status()
    assert found["num_copies"] * 2 == found["num_blocks"] > 0
    of_both = {names[0]: first, names[1]: second}
    assert await_copies(of_both, found["num_copies"]) == found["num_copies"]

    first.kill()
    assert await_copies({names[1]: second}, 0) == 0
    assert second.generate(PROMPTS, 1).cached == HITS
    second.kill()


def await_copies(engines: Mapping[str, Engine], num_copies: int) -> int:
    """Return how many blocks engines take for copies when it is this number, or after a while."""
    deadline_s = time.monotonic() + 60
    while True:
        for engine in engines.values():
            engine.generate([PROMPTS[0][:20]], 1)  # less than a block, but a step
        tiers = [ask_engine(name, 0, {"do": "status"})["tiers"] for name in engines]
        found = sum(each["host"]["num_copies"] for each in tiers)
        if found == num_copies or time.monotonic() > deadline_s:
            return int(found)
        time.sleep(0.5)


def given_from_files(name: str) -> int:
    status = ask_engine(name, 0, {"do": "status"})
    return int(status["nodes"]["given_blocks"].get("given_from_files", 0))


def test_a_router_knows_what_each_node_holds_through_kills(
    start: Starter, new_name: Callable[[], str], coordinator: Coordinator
) -> None:
    names = new_name(), new_name()
    engines = {name: start(events_of(name, coordinator)) for name in names}
    first, second = engines.values()
    first.generate(PROMPTS, 1)
    first.generate(OTHERS[:1], 1)
    await_blocks(coordinator.status, *names)
    with ExitStack() as stack:
        followers = {name: stack.enter_context(follower_of(name, coordinator)) for name in names}
        second.generate([[*PROMPTS[0], *OTHERS[1]]], 1)
        second.generate(OTHERS[2:], 1)
        agree(engines, followers)
        assert all(map(hashes_of, followers.values()))

        coordinator.kill()
        first.generate(OTHERS[1:], 1)
        coordinator.start()
        agree(engines, followers)

        engines.pop(names[0]).kill()
        agree(engines, followers)
        late = {name: stack.enter_context(follower_of(name, coordinator)) for name in engines}
        agree(engines, late)

        again = start(events_of(names[0], coordinator))
        assert again.generate(PROMPTS, 1).cached == HITS
        again.generate(OTHERS, 1)
        again.generate(FAMILIES[:3], 1)
        agree({**engines, names[0]: again}, followers)
    again.kill()
    second.kill()


@pytest.fixture
def on_ray(ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a coordinator on Ray."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    name = f"test-{uuid.uuid4().hex[:12]}"
    start_vllm_coordinator(name, None, 60.0)
    yield name
    stop_vllm_coordinator(name, 60.0)


def test_engines_find_a_coordinator_on_ray_and_find_it_again_when_it_was_killed(
    start: Starter, new_name: Callable[[], str], on_ray: str
) -> None:
    names = new_name(), new_name()
    sharing = {"ray": on_ray, **PATIENCE}
    first, second = (start({"name": name, "coordinator": sharing, **MEMORY}) for name in names)
    cold = first.generate(PROMPTS)
    first.generate(OTHERS[:1], 1)  # a step after the last one brings its seals
    await_blocks(partial(status_on_ray, on_ray), *names)
    loaded = second.generate(PROMPTS[:2])
    assert (loaded.cached, loaded.tokens) == (HITS[:2], cold.tokens[:2])

    place = ask_place(on_ray, 60.0)
    actor: Any = find_actor(vllm_coordinator_name(on_ray))
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60), signal.SIGKILL)
    while ask_place(on_ray, 60.0) == place:
        time.sleep(0.1)
    await_blocks(partial(status_on_ray, on_ray), *names)
    second.generate(OTHERS[1:2], 1)  # steps, in which the engine learns where it is now
    time.sleep(nodes.LOOK_S)
    second.generate(OTHERS[2:3], 1)
    again = second.generate(PROMPTS[2:])
    assert (again.cached, again.tokens) == (HITS[2:], cold.tokens[2:])
    status = ask_engine(names[1], 0, {"do": "status"})
    assert status["nodes"]["coordinator"] == ask_place(on_ray, 60.0).address
    first.kill()
    second.kill()


def status_on_ray(name: str) -> dict[str, Any]:
    place = ask_place(name, 60.0)
    return ask_status(place.address, place.keys, 10_000)


def test_an_engine_does_not_start_without_ray_or_without_the_coordinator_on_it(
    start: Starter,
    new_name: Callable[[], str],
    ray_cluster: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"name": new_name(), "coordinator": {"ray": "nowhere"}, **MEMORY}
    (tmp_path / "ray.py").write_text("raise ImportError('there is none')")
    with monkeypatch.context() as hidden:
        hidden.setitem(ENVIRONMENT, "PYTHONPATH", f"{ROOT}:{tmp_path}")
        with pytest.raises(
            AssertionError, match=r"'nowhere': Ray cannot be imported .*: install it"
        ):
            start(options)
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    with pytest.raises(AssertionError, match="no coordinator named 'nowhere' runs on this Ray"):
        start(options)


def events_of(name: str, coordinator: Coordinator) -> dict[str, Any]:
    options = options_of(name, coordinator)
    return {**options, "coordinator": {**options["coordinator"], "events": True}}


def follower_of(name: str, coordinator: Coordinator) -> KVEventSubscriber:
    """A router that follows one engine's topic at the coordinator."""

    def topics() -> list[str]:
        told = coordinator.status()["events"]["topics"]
        return [topic for topic in told if f"/{name}/0@" in topic]

    wait_until(topics, f"the coordinator publishes no events of {name}", pause_s=0.1)
    (topic,) = topics()
    settings = SubscriptionSettings(reply_s=0.5, silence_s=3.0, is_shared=True)
    return KVEventSubscriber(*coordinator.events, topic=topic, settings=settings)


def hashes_of(follower: KVEventSubscriber) -> set[int]:
    events = follower._subscription.mirror.state()
    return {
        value
        for event in events
        if isinstance(event, StoredEvent)
        for value in event.block_hashes.tolist()
    }


def agree(engines: Mapping[str, Engine], followers: Mapping[str, KVEventSubscriber]) -> None:
    """Wait until routers know what the memory of each engine holds, and nothing of one that is
    gone."""
    deadline_s = time.monotonic() + 60
    while True:
        wrong = {}
        for name, follower in followers.items():
            follower.poll(0.05)
            held = Segment(name, 0).event_hashes() if name in engines else set()
            if hashes_of(follower) != held:
                wrong[name] = len(hashes_of(follower)), len(held)
        if not wrong:
            return
        assert time.monotonic() < deadline_s, (wrong, [f.statistics() for f in followers.values()])
        for engine in engines.values():
            engine.generate([PROMPTS[0][:20]], 1)  # less than a block, but a step
