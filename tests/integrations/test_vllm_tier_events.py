"""Events of the connector's tiers: what a follower knows is what the tiers hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.config.events import EventsConfig
from kvcache.events import CacheMirror, KVEventSubscriber, StoredEvent
from kvcache.events.translation import EventTranslator, GroupKind, short_hash
from kvcache.integrations.vllm.block_contents import BlockContents
from kvcache.integrations.vllm.block_store import BlockStore
from kvcache.integrations.vllm.options import ConnectorOptions
from kvcache.integrations.vllm.tier_events import TierEvents, open_publisher
from kvcache.requests.hash_algorithms import BlockHash
from tests.integrations.test_vllm_adapters import make_adapter
from tests.integrations.test_vllm_block_store import TOKENS, Cluster, request_of, setting_of

KINDS = [GroupKind("full")]


def described(name: str, num_tokens: int, content: str = "a", **more: Any) -> Any:
    """A request whose tokens follow from its content, as its hashes do."""
    request = request_of(name, num_tokens, content)
    request.all_token_ids = [ord(content) * 1000 + i for i in range(num_tokens)]
    request.lora_request = more.pop("lora_request", None)
    request.cache_salt = more.pop("cache_salt", None)
    request.extra_keys = more.pop("extra_keys", None)
    return request


def extra_keys_of(request: Any, start: int, end: int) -> Any:
    return request.extra_keys if start == 0 else None


class Followed(Cluster):
    """A cluster whose events a mirror follows."""

    def __init__(self, **options: Any) -> None:
        self.mirror = CacheMirror()
        self.told: list[Any] = []
        super().__init__(**options)

    def restart(self) -> tuple[int, int]:
        self.mirror = CacheMirror()
        for rank in self.ranks:
            rank.slots = {slot: rank.slots[slot] for slot in rank.sealed if slot in rank.slots}
            rank.running.clear()
        contents = BlockContents([TOKENS], extra_keys_of)
        self.events = TierEvents(contents, for_engine=True)
        self.store = BlockStore(setting_of(**self.options), lambda: self.time_s, self.events)
        inventories = {rank.rank: rank.inventory(self.num_files) for rank in self.ranks}
        return self.store.adopt(inventories)

    def follow(self, *, is_cleared: bool = False) -> list[Any]:
        """Give the mirror what vLLM would publish after this step."""
        self.store.follow_events(is_cleared=is_cleared)
        events = EventTranslator(KINDS).translate(self.events.take())
        if is_cleared:
            self.mirror = CacheMirror()
        self.mirror.apply(events)
        self.told += events
        return events

    def run(self, request: Any) -> int:
        found = super().run(request)
        self.settle()
        self.follow()
        return found

    def settle(self) -> None:
        super().settle()
        self.follow()

    def seen(self, medium: str) -> set[int]:
        return {
            value
            for event in self.mirror.state()
            if isinstance(event, StoredEvent) and event.medium == medium
            for value in event.block_hashes.tolist()
        }

    def held(self) -> tuple[set[int], set[int]]:
        """What rank 0 has in memory and in files."""
        keys = self.ranks[0].inventory().slot_keys.values()
        slots = {short_hash(BlockHash(key[:-4])) for key in keys}
        return slots, {short_hash(BlockHash(key[:32])) for key in self.ranks[0].files}


def test_a_follower_knows_what_memory_and_files_hold() -> None:
    cluster = Followed(num_files=6)
    for content in "abcdefgh":
        cluster.run(described(content, 13, content))
        assert (cluster.seen("CPU"), cluster.seen("STORAGE")) == cluster.held()
    assert len(cluster.seen("STORAGE")) == 6, "files were never full"
    assert not cluster.mirror.num_unknown_removals


def test_a_block_is_told_with_its_tokens_and_its_parent() -> None:
    cluster = Followed()
    request = described("r", 13, "b", cache_salt="s", extra_keys=(("cache_salt", "s"),))
    cluster.run(request)
    (event,) = cluster.told
    assert (event.medium, event.block_size, event.parent_block_hash) == ("CPU", TOKENS, None)
    assert event.token_ids.tolist() == request.all_token_ids[:12]
    assert (event.extra_keys, event.cache_salt) == ((("s",), None, None), "s")
    longer = described("s", 21, "b", cache_salt="s", extra_keys=(("cache_salt", "s"),))
    cluster.run(longer)
    assert cluster.told[1].parent_block_hash == short_hash(BlockHash(request.block_hashes[2]))


def test_an_adapter_is_told_by_its_name(tmp_path: Path) -> None:
    cluster = Followed()
    adapter = make_adapter(tmp_path / "fr", b"weights", "fr")
    request = described("r", 9, lora_request=adapter, extra_keys=(("lora", "fr"),))
    cluster.run(request)
    assert cluster.told[0].lora_name == "fr"
    told = [block_hash for event in cluster.told for block_hash in event.block_hashes]
    assert told == [short_hash(BlockHash(each)) for each in request.block_hashes]


def test_a_block_whose_hash_covers_embeddings_is_not_told() -> None:
    cluster = Followed()
    cluster.run(described("r", 5, extra_keys=(("prompt_embeds", b"bytes"),)))
    assert cluster.sealed_keys()[0] and not cluster.told


def test_adopted_blocks_are_told_once_a_request_brings_their_tokens() -> None:
    cluster = Followed(num_files=12)
    for content in "abcd":
        cluster.run(described(content, 13, content))
    cluster.restart()
    cluster.follow()
    assert not cluster.mirror.num_blocks()
    for content in "dcba":
        cluster.run(described(content, 13, content))
    assert (cluster.seen("CPU"), cluster.seen("STORAGE")) == cluster.held()
    assert not cluster.mirror.num_unknown_removals


def test_a_reset_removes_every_block() -> None:
    cluster = Followed()
    cluster.run(described("r", 13))
    cluster.store.reset()
    cluster.follow()
    assert not cluster.mirror.num_blocks()


def test_after_a_clear_of_the_stream_the_tiers_are_told_again() -> None:
    cluster = Followed()
    cluster.run(described("r", 13))
    cluster.follow(is_cleared=True)
    assert cluster.seen("CPU") == cluster.held()[0] != set()


def test_without_events_no_tokens_are_kept() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 13))  # it has no tokens
    cluster.store.follow_events()


def test_events_with_keys_of_a_cluster_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"events\.curve"):
        ConnectorOptions.parse({"events": {"enabled": True, "curve": "always"}})


class Published(Followed):
    """A cluster whose events our own publisher publishes."""

    def __init__(self, **options: Any) -> None:
        section = EventsConfig(
            enabled=True, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"
        )
        self.sender = open_publisher(section, "kv@chat@model", KINDS, replica=0)
        super().__init__(**options)

    def restart(self) -> tuple[int, int]:
        contents = BlockContents([TOKENS], extra_keys_of)
        self.events = TierEvents(contents, for_engine=False, sender=self.sender)
        self.store = BlockStore(setting_of(**self.options), lambda: self.time_s, self.events)
        inventories = {rank.rank: rank.inventory(self.num_files) for rank in self.ranks}
        return self.store.adopt(inventories)


@pytest.fixture
def published() -> Iterator[Published]:
    cluster = Published()
    yield cluster
    cluster.events.close()


def test_a_late_follower_of_the_publisher_is_exact(published: Published) -> None:
    for content in "abcd":  # more than fits
        published.run(described(content, 13, content))
    link = published.sender.link
    with KVEventSubscriber(*link.endpoints) as subscriber:
        published.mirror = CacheMirror()
        give_up_s = time.monotonic() + 20
        # The publisher may still be sending: the number of blocks is right before the blocks are.
        while published.seen("CPU") != published.held()[0]:
            assert time.monotonic() < give_up_s
            for update in subscriber.poll(1.0):
                published.mirror.apply(update.batch.events)
        assert published.mirror.checksum == subscriber.checksum
    assert published.mirror.num_blocks() == {"CPU": 8}


def test_a_publisher_that_fails_does_not_stop_the_scheduler(
    published: Published, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("no descriptor is left")

    with monkeypatch.context() as patch:
        patch.setattr(published.sender.link, "poll", fail)
        for content in "ab":
            published.run(described(content, 13, content))
        published.store.reset()
    assert caplog.text.count("events of the tiers failed; the engine goes on") == 1
    published.run(described("c", 13, "c"))
    test_a_late_follower_of_the_publisher_is_exact(published)


def test_a_block_that_cannot_be_described_is_stored_and_not_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Followed(num_files=6)
    for name in ("s", "t"):
        broken = described(name, 13, name)
        del broken.cache_salt  # as if another vLLM had named it otherwise
        assert cluster.run(broken) == 0
        assert cluster.run(described(f"{name}2", 13, name)) == 12
    assert caplog.text.count("labels of blocks for events failed") == 1
    assert len(cluster.held()[0]) == 6
    assert cluster.seen("CPU") == set()
    cluster.store.check()
