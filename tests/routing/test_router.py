"""The router against brute force; its replicas really publish, fall silent and return."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from actors.routing.router import PrefixRouter
from actors.routing.scores import Candidate, RankedReplica, RouterSettings, rank_candidates
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError, RequestError
from kvcache.events.prefix_index import PrefixIndex, PrefixMatch
from kvcache.events.publisher import EventPublisher
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.events.subscription import Subscription, SubscriptionSettings
from kvcache.requests.request_content import Namespace
from tests.events.event_world import BLOCK, LORAS, SALTS, Block
from tests.routing.replica import HEARTBEAT_S, Replica
from tests.waiting import wait_until

SETTINGS = RouterSettings(overlap_weight=1.5, host_worth=0.75, storage_worth=0.25, block_tokens=8)
ADAPTERS = {None: None, LORAS[1]: "adapter"}


@dataclass
class Scene:
    """Replicas, and a router that follows them on a clock of its own."""

    replicas: dict[str, Replica]
    router: PrefixRouter
    clock: VirtualClock

    def follow(self, name: str) -> None:
        there = self.replicas[name]
        self.router.add_replica(
            name, there.endpoint, there.replay_endpoint, heartbeat_s=HEARTBEAT_S
        )

    def knows(self, name: str) -> bool:
        """Return whether the router's state of a replica equals its cache."""
        told = self.router.statistics().replicas[name].known.events
        return told.is_exact and told.checksum == self.replicas[name].checksum()

    def is_stale(self, name: str) -> bool:
        return self.router.statistics().replicas[name].is_stale


@pytest.fixture
def scene() -> Iterator[Scene]:
    clock = VirtualClock()
    replicas = {name: Replica(seed) for seed, name in enumerate("abc")}
    with PrefixRouter(SETTINGS, clock) as router:
        made = Scene(replicas, router, clock)
        for name in replicas:
            made.follow(name)
        yield made
    for replica in replicas.values():
        replica.close()


def chains(replica: Replica) -> list[list[Block]]:
    """Return the path from the root to every block that was ever cached."""
    known = replica.cache.known
    found = []
    for block in known.values():
        chain = [block]
        while chain[0].parent is not None:
            chain.insert(0, known[chain[0].parent])
        found.append(chain)
    return found


def prompts(scene: Scene, choice: random.Random) -> list[tuple[list[int], Namespace]]:
    """Return prompts with a prefix that some replica knows, each with more tokens."""
    every = [chain for replica in scene.replicas.values() for chain in chains(replica)]
    found = []
    for chain in choice.sample(every, min(30, len(every))):
        tokens = [token for block in chain for token in block.tokens]
        tail = [choice.randrange(50) for _ in range(choice.randint(0, 3 * BLOCK))]
        space = chain[0].namespace
        if choice.random() < 0.2:
            space = Namespace(0, choice.choice(LORAS), choice.choice(SALTS), None)
        found.append((tokens + tail, space))
    return found


def expected(scene: Scene, tokens: list[int], space: Namespace, loads: dict[str, float]) -> list:
    """Return names and scores by a search through every block of every cache."""
    rows = []
    for name, replica in scene.replicas.items():
        look = replica.cache.leading
        device = look(tokens, space, ("device",))
        host = look(tokens, space, ("device", "host"))
        anywhere = look(tokens, space, ("device", "host", "storage"))
        saved = BLOCK * (device + 0.75 * (host - device) + 0.25 * (anywhere - host))
        score = 1.5 * (len(tokens) - saved) / 8 + loads[name]
        rows.append((score, loads[name], len(blocks_of(replica)), name))
    return [(name, score) for score, _, _, name in sorted(rows)]


def blocks_of(replica: Replica) -> set[bytes]:
    return {digest for medium in replica.cache.media.values() for digest in medium}


@pytest.mark.seeds(4)
def test_ranking_is_what_brute_force_finds(scene: Scene, seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(6):
        for replica in scene.replicas.values():
            for _ in range(20):
                replica.tell(replica.cache.act())
            if choice.random() < 0.1:
                replica.tell(replica.cache.clear())
        settle(scene)
        loads = {name: float(choice.randrange(4)) for name in scene.replicas}
        for name, load in loads.items():
            scene.router.report_load(name, load)
        for tokens, space in prompts(scene, choice):
            ranked = scene.router.rank(
                tokens, lora_name=ADAPTERS[space.lora], cache_salt=space.salt
            )
            assert [(one.name, one.score) for one in ranked] == [
                (name, pytest.approx(score))
                for name, score in expected(scene, tokens, space, loads)
            ]
            assert not any(one.is_stale for one in ranked)


def settle(scene: Scene) -> None:
    """Wait until every replica has published everything, and the router knows it."""
    wait_until(lambda: all(scene.knows(name) for name in scene.replicas))


def fill(scene: Scene, name: str) -> tuple[list[int], Namespace]:
    """Cache a prompt on the device of one replica; return it."""
    cache = scene.replicas[name].cache
    space = Namespace(0, None, None, None)
    blocks = []
    parent = None
    for i in range(6):
        block = Block(bytes([i + 1]) * 32, parent, tuple(range(4 * i, 4 * i + 4)), space)
        blocks.append(block)
        parent = block.digest
    scene.replicas[name].tell(cache.put(blocks, "device"))
    settle(scene)
    return list(range(24)), space


def first(ranked: list[RankedReplica]) -> tuple[str, int, bool]:
    return ranked[0].name, ranked[0].device_blocks, ranked[0].is_stale


def test_a_silent_replica_is_ranked_by_its_load_only_until_it_is_back(scene: Scene) -> None:
    prompt, _ = fill(scene, "c")
    assert first(scene.router.rank(prompt)) == ("c", 6, False)

    silent = scene.replicas["c"]
    silent.close()
    wait_until(lambda: is_silent_alone(scene, "c"))
    ranked = scene.router.rank(prompt)
    assert [(one.name, one.is_stale) for one in ranked] == [("a", False), ("b", False), ("c", True)]
    assert {one.score for one in ranked} == {1.5 * 24 / 8}
    for name in "ab":
        scene.router.report_load(name, 0.5)
    assert first(scene.router.rank(prompt)) == ("c", 0, True)
    assert scene.router.statistics().num_stale_rankings == 2

    silent.publish(silent.places, epoch=2)
    wait_until(lambda: not scene.is_stale("c") and scene.knows("c"))
    assert first(scene.router.rank(prompt)) == ("c", 6, False)


def is_silent_alone(scene: Scene, name: str) -> bool:
    """Let time pass until all the others have been heard; return whether this one was not."""
    scene.clock.advance(3.5 * HEARTBEAT_S)
    wait_until(lambda: not any(scene.is_stale(other) for other in scene.replicas if other != name))
    return scene.is_stale(name)


@pytest.mark.parametrize("place", [PrefixIndex, Subscription])
def test_a_follower_that_cannot_take_a_message_follows_from_the_beginning(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, place: type[PrefixIndex] | type[Subscription]
) -> None:
    prompt, _ = fill(scene, "b")
    name = "follow" if place is PrefixIndex else "_apply"
    take, num_left = getattr(place, name), [1]

    def fail_once(*arguments: object) -> object:
        if num_left and num_left.pop():
            raise KeyError(("no", "such", "block"))
        return take(*arguments)

    monkeypatch.setattr(place, name, fail_once)
    scene.replicas["b"].tell(scene.replicas["b"].cache.act())
    wait_until(lambda: not num_left)
    settle(scene)
    assert first(scene.router.rank(prompt)) == ("b", 6, False)
    told = [each.known for each in scene.router.statistics().replicas.values()]
    problems = [known.problem or known.events.last_problem for known in told]
    assert [text for text in problems if "KeyError: ('no', 'such', 'block')" in text]


def test_a_publisher_survives_requests_that_it_cannot_answer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, num_left = EventPublisher.answer, [1]

    def fail_once(*arguments: Any) -> Any:
        if num_left and num_left.pop():
            raise MemoryError("far too much")
        return answer(*arguments)

    monkeypatch.setattr(EventPublisher, "answer", fail_once)
    there = scene.replicas["a"]
    settings = SubscriptionSettings(reply_s=0.05)
    with KVEventSubscriber(there.endpoint, there.replay_endpoint, settings=settings) as late:
        wait_until(lambda: late.poll(0.01) is not None and not num_left and late.is_exact)
        assert late.checksum == there.checksum()


def test_who_was_never_heard_is_stale(scene: Scene) -> None:
    scene.router.add_replica("d", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    prompt, _ = fill(scene, "b")
    ranked = {one.name: one for one in scene.router.rank(prompt)}
    assert (ranked["d"].is_stale, ranked["b"].is_stale) == (True, False)
    assert scene.router.statistics().replicas["d"].known.silent_s is None
    assert scene.is_stale("d")


def test_a_replica_that_has_moved_is_followed_there(scene: Scene) -> None:
    prompt, _ = fill(scene, "a")
    scene.router.report_load("a", 0.25)
    moved = scene.replicas["a"]
    moved.close()
    moved.publish(Replica.__init__.__kwdefaults__["places"], epoch=2)
    scene.follow("a")
    wait_until(lambda: scene.knows("a"))
    assert first(scene.router.rank(prompt)) == ("a", 6, False)
    assert scene.router.statistics().replicas["a"].load == 0.25
    followers = [t for t in threading.enumerate() if t.name == "replica-follower"]
    assert len(followers) == len(scene.replicas)


def test_replicas_come_and_go(scene: Scene) -> None:
    prompt, _ = fill(scene, "b")
    scene.router.begin("r0", "b", 8)
    scene.router.remove_replica("b")
    scene.router.remove_replica("b")
    assert scene.router.replicas == ("a", "c")
    assert [one.name for one in scene.router.rank(prompt)] == ["a", "c"]
    assert scene.router.statistics().num_open_requests == 0
    scene.router.end("r0")
    scene.follow("b")
    wait_until(lambda: scene.knows("b"))
    assert first(scene.router.rank(prompt)) == ("b", 6, False)
    assert [one.name for one in scene.router.rank(prompt, among=["c", "b", "x"])] == ["b", "c"]


def test_requests_load_their_replica_until_they_end(scene: Scene) -> None:
    prompt, _ = fill(scene, "b")
    for _ in range(2):  # a retry is harmless
        scene.router.begin("r0", "b", 32)
    assert scene.router.statistics().replicas["b"].load == 4.0
    assert [one.name for one in scene.router.rank(prompt)] == ["b", "a", "c"]
    scene.router.begin("r1", "b", 8)
    assert [one.name for one in scene.router.rank(prompt)] == ["a", "c", "b"]
    scene.router.begin("r1", "a", 8)
    assert [one.name for one in scene.router.rank(prompt)] == ["b", "c", "a"]
    assert [scene.router.end("r1") for _ in range(2)] == [True, False]
    assert scene.router.statistics().replicas["a"].num_requests == 0
    scene.router.report_load("b", 100.0)
    assert [one.name for one in scene.router.rank(prompt)] == ["c", "a", "b"]


def test_unknown_prompts_are_spread(scene: Scene) -> None:
    settle(scene)
    chosen = []
    for i in range(6):
        best = scene.router.rank([1000 + i] * 16)[0].name
        scene.router.begin(f"r{i}", best, 16)
        scene.router.end(f"r{i}")
        chosen.append(best)
    assert chosen == ["a", "b", "c", "a", "b", "c"]


def test_of_equal_scores_load_then_turn_then_room_then_names_decide() -> None:
    whole = PrefixMatch("x", 2, 2, 2, 16)
    candidates = [
        Candidate("later", whole, 1.0, last_begun=3),
        Candidate("loaded", PrefixMatch("x", 4, 4, 4, 16), 3.0),
        Candidate("full", whole, 1.0, last_begun=1, num_cached_blocks=9),
        Candidate("b", whole, 1.0, last_begun=1, num_cached_blocks=5),
        Candidate("a", whole, 1.0, last_begun=1, num_cached_blocks=5),
    ]
    ranked = rank_candidates(candidates, 64, RouterSettings())
    assert {one.score for one in ranked} == {3.0}
    assert [one.name for one in ranked] == ["a", "b", "full", "later", "loaded"]


def test_requests_that_never_end_are_forgotten() -> None:
    with PrefixRouter(RouterSettings(max_open_requests=3)) as router:
        router.add_replica("a", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
        for i in range(5):
            router.begin(f"r{i}", "a", 16)
        statistics = router.statistics()
    assert (statistics.num_open_requests, statistics.num_forgotten_requests) == (3, 2)
    assert statistics.replicas["a"].load == 3.0


def test_what_cannot_be_meant_changes_nothing() -> None:
    with PrefixRouter() as router:
        with pytest.raises(ConfigurationError, match="is not an address"):
            router.add_replica("a", "nowhere", "tcp://127.0.0.1:1")
        with pytest.raises(ConfigurationError, match="heartbeat_s is 0"):
            router.add_replica("a", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1", heartbeat_s=0)
        assert router.replicas == ()
        router.add_replica("a", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
        router.begin("r0", "a", 16)
        for call in (
            lambda: router.begin("r0", "b", 16),
            lambda: router.begin("r0", "a", -1),
            lambda: router.report_load("b", 1.0),
            lambda: router.report_load("a", float("nan")),
            lambda: router.rank([1, -1]),
        ):
            with pytest.raises(RequestError):
                call()
        statistics = router.statistics()
        assert (statistics.replicas["a"].load, statistics.num_open_requests) == (1.0, 1)


@pytest.mark.parametrize(
    "values",
    [
        {"overlap_weight": -1.0},
        {"overlap_weight": float("inf")},
        {"host_worth": 1.1},
        {"storage_worth": -0.1},
        {"block_tokens": 0},
        {"stale_heartbeats": 0.0},
        {"max_open_requests": 0},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(values))):
        RouterSettings(**values)  # type: ignore[arg-type]
