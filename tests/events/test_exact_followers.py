"""Whatever is lost, late or restarted: every follower becomes exact."""

from __future__ import annotations

from collections import Counter

import pytest

from kvcache.events.prefix_index import PrefixIndex
from kvcache.requests.request_content import Namespace
from tests.events.event_world import LORAS, MEDIA, SALTS, WIRE_MEDIA, World


@pytest.mark.seeds(50, long=1000)
def test_followers_are_exact_within_one_heartbeat(seed: int) -> None:
    world = World(seed)
    world.join()
    for _ in range(40):
        world.step()
    world.finish()
    truth = world.publisher.statistics()
    counts = {WIRE_MEDIA[m]: len(world.cache.media[m]) for m in MEDIA if world.cache.media[m]}
    assert Counter(truth.num_blocks) + Counter(truth.num_orphans) == counts
    for follower in world.followers:
        statistics = follower.subscription.statistics()
        assert statistics.is_exact
        assert (statistics.last_seq, statistics.checksum) == (truth.last_seq, truth.checksum)
        assert statistics.num_blocks == truth.num_blocks
        assert statistics.num_malformed == 0
        compare_matches(world, follower.index)


def compare_matches(world: World, index: PrefixIndex) -> None:
    """Prompts along cached chains, and off them, match the cached leading blocks."""
    cache, choice = world.cache, world.choice
    for _ in range(5):
        tokens: list[int] = []
        space = Namespace(0, choice.choice(LORAS), choice.choice(SALTS), None)
        if cache.known and choice.random() < 0.9:
            block = cache.known[choice.choice(list(cache.known))]
            space = block.namespace
            while True:
                tokens[:0] = block.tokens
                if block.parent is None:
                    break
                block = cache.known[block.parent]
        tokens += [choice.randrange(50) for _ in range(choice.randrange(6))]
        lora = None if space.lora is None else "adapter"
        for match in index.match(tokens, lora_name=lora, cache_salt=space.salt):
            found = (match.device_blocks, match.host_blocks, match.storage_blocks)
            expected = tuple(cache.leading(tokens, space, MEDIA[: i + 1]) for i in range(3))
            assert found == expected
