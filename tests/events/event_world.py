"""A cache with arbitrary changes, its publisher, and followers that miss some messages.

For schedules of loss, joins and restarts: publisher and subscriptions are real, the network between
them is a list. The cache's state is also kept separately, block by block.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from kvcache.events.prefix_index import PrefixIndex
from kvcache.events.publisher import EventPublisher, PublisherSettings
from kvcache.events.subscription import Subscription, SubscriptionSettings, Update
from kvcache.events.translation import GroupKind
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.request_content import Namespace

BLOCK = 4
MEDIA = ("device", "host", "storage")
WIRE_MEDIA = {"device": "GPU", "host": "CPU", "storage": "STORAGE"}
EPOCH = 1 << 40
SALTS = (None, "salt")
LORAS = (None, '["adapter","/a"]')
REPLY_S = 0.5


@dataclass(frozen=True)
class Block:
    """A cached block: its tokens after its parent."""

    digest: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    namespace: Namespace


class Cache:
    """Blocks in media. Removes children first, as every core does."""

    def __init__(self, choice: random.Random) -> None:
        self.choice = choice
        self.known: dict[bytes, Block] = {}
        self.media: dict[str, dict[bytes, None]] = {medium: {} for medium in MEDIA}

    def act(self) -> list[CacheEvent]:
        kind = self.choice.random()
        if kind < 0.6:
            return self.store()
        if kind < 0.95:
            return self.remove()
        return [*self.store(), *self.remove(), *self.store()]

    def store(self) -> list[CacheEvent]:
        """Store a chain: new blocks on the device, or blocks of the device in a lower medium."""
        medium = self.choice.choices(MEDIA, (6, 3, 1))[0]
        if medium != "device":
            return self.copy_down(medium)
        parents = [None, *self.media["device"]]
        parent = self.choice.choice(parents)
        namespace = Namespace(0, self.choice.choice(LORAS), self.choice.choice(SALTS), None)
        if parent is not None:
            namespace = self.known[parent].namespace
        chain = []
        above = parent
        for _ in range(self.choice.randint(1, 6)):
            tokens = tuple(self.choice.randrange(50) for _ in range(BLOCK))
            digest = self.digest_of(above, tokens, namespace)
            if digest in self.media["device"]:
                break
            chain.append(Block(digest, above, tokens, namespace))
            above = digest
        return self.put(chain, "device")

    def digest_of(self, parent: bytes | None, tokens: tuple[int, ...], space: Namespace) -> bytes:
        for block in self.known.values():
            if (block.parent, block.tokens, block.namespace) == (parent, tokens, space):
                return block.digest
        return self.choice.randbytes(32)

    def copy_down(self, medium: str) -> list[CacheEvent]:
        there = [d for d in self.media["device"] if d not in self.media[medium]]
        if not there:
            return []
        return self.put([self.known[self.choice.choice(there)]], medium)

    def put(self, chain: list[Block], medium: str) -> list[CacheEvent]:
        if not chain:
            return []
        for block in chain:
            self.known[block.digest] = block
            self.media[medium][block.digest] = None
        return [stored(chain, medium)]

    def remove(self) -> list[CacheEvent]:
        medium = self.choice.choice(MEDIA)
        there = self.media[medium]
        parents = {self.known[d].parent for d in there}
        leaves = [d for d in there if d not in parents]
        gone = self.choice.sample(leaves, min(len(leaves), self.choice.randint(0, 4)))
        for digest in gone:
            del there[digest]
        if not gone:
            return []
        return [BlocksRemoved(0, medium, tuple(BlockHash(digest) for digest in gone))]

    def clear(self) -> list[CacheEvent]:
        for medium in MEDIA:
            self.media[medium].clear()
        return [AllBlocksCleared()]

    def state(self) -> list[CacheEvent]:
        """The whole state, in random order: the publisher must put parents first."""
        found: list[CacheEvent] = []
        for medium in MEDIA:
            there = [self.known[d] for d in self.media[medium]]
            self.choice.shuffle(there)
            found += [stored([block], medium) for block in there]
        return found

    def leading(self, tokens: list[int], space: Namespace, media: tuple[str, ...]) -> int:
        """How many leading blocks of a prompt are in these media, by a linear search."""
        parent: bytes | None = None
        count = 0
        for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            wanted = (parent, tuple(tokens[start : start + BLOCK]), space)
            found = [
                d
                for medium in media
                for d in self.media[medium]
                if (self.known[d].parent, self.known[d].tokens, self.known[d].namespace) == wanted
            ]
            if not found:
                break
            parent = found[0]
            count += 1
        return count


def stored(chain: list[Block], medium: str) -> BlocksStored:
    return BlocksStored(
        0,
        medium,
        tuple(BlockHash(block.digest) for block in chain),
        None if chain[0].parent is None else BlockHash(chain[0].parent),
        np.array([t for block in chain for t in block.tokens], np.int32),
        BLOCK,
        chain[0].namespace,
    )


@dataclass(eq=False)
class Follower:
    """One subscriber, and the messages in transit to it."""

    subscription: Subscription
    index: PrefixIndex = field(default_factory=PrefixIndex)
    live: list[list[bytes]] = field(default_factory=list)
    replies: list[list[bytes]] = field(default_factory=list)


class World:
    """A publisher that restarts, and followers that join late, over links that lose messages."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.cache = Cache(self.choice)
        self.now_s = 0.0
        self.epoch = 0
        self.checksums: dict[int, int] = {}
        self.followers: list[Follower] = []
        self.loss = self.choice.choice((0.0, 0.05, 0.3))
        self.settings = PublisherSettings(
            topic="kv@test@model",
            history_batches=self.choice.choice((1, 4, 1000)),
            encoding=self.choice.choice(("map", "array")),
            one_block_per_event=self.choice.random() < 0.3,
        )
        self.restart()

    def restart(self) -> None:
        """Replace the publisher by one that begins with the present state, under higher numbers."""
        self.epoch += 1
        self.publisher = EventPublisher(self.settings, [GroupKind("full")])
        for follower in self.followers:
            follower.replies.clear()
            if self.choice.random() < 0.5:
                follower.live.clear()
        self.send(self.publisher.begin(self.epoch * EPOCH, self.now_s, self.cache.state()))

    def overflow(self) -> None:
        """Lose the coordinator's events before the publisher: the whole state is sent again."""
        for _ in range(self.choice.randint(1, 4)):
            self.cache.act()
        self.send(self.publisher.begin(self.epoch * EPOCH, self.now_s, self.cache.state()))

    def join(self) -> None:
        settings = SubscriptionSettings(
            reply_s=REPLY_S, max_kept_batches=self.choice.choice((2, 50))
        )
        self.followers.append(Follower(Subscription(settings, self.now_s)))

    def send(self, frames: list[bytes]) -> None:
        if not frames:
            return
        statistics = self.publisher.statistics()
        self.checksums[statistics.last_seq] = statistics.checksum
        for follower in self.followers:
            if self.choice.random() >= self.loss:
                follower.live.append(frames)

    def step(self) -> None:
        kind = self.choice.random()
        if kind < 0.75:
            self.send(self.publisher.publish(self.now_s, self.cache.act()))
        elif kind < 0.80:
            self.send(self.publisher.publish(self.now_s, self.cache.clear()))
        elif kind < 0.88:
            self.send(self.publisher.heartbeat(self.now_s))
        elif kind < 0.91:
            self.restart()
        elif kind < 0.94:
            self.overflow()
        elif len(self.followers) < 4:
            self.join()
        self.now_s += self.choice.random() * 0.3
        for follower in self.followers:
            if self.choice.random() < 0.7:
                self.deliver(follower, is_lossy=True)

    def deliver(self, follower: Follower, *, is_lossy: bool) -> None:
        """Deliver some of a follower's messages; carry its request, and part of the answer."""
        subscription = follower.subscription
        number = subscription.request(self.now_s)
        if number is not None and not (is_lossy and self.choice.random() < self.loss):
            request = [b"id", b"", number] if self.choice.random() < 0.8 else [b"id", number]
            for answer in self.publisher.answer(request, self.now_s):
                if not (is_lossy and self.choice.random() < self.loss):
                    follower.replies.append(answer[1:])
        while follower.live or follower.replies:
            if is_lossy and self.choice.random() < 0.1:
                return
            from_live = follower.live and (not follower.replies or self.choice.random() < 0.5)
            queue = follower.live if from_live else follower.replies
            take = subscription.on_live if from_live else subscription.on_reply
            for update in take(queue.pop(0), self.now_s):
                self.check(follower, update)

    def check(self, follower: Follower, update: Update) -> None:
        follower.index.follow("here", update)
        if update.seq == follower.subscription.last_seq:
            found = follower.subscription.mirror.checksum
            assert found == self.checksums[update.seq], f"another state at {update.seq}"

    def finish(self) -> None:
        """Lose no more messages: every follower is exact within one heartbeat."""
        self.loss = 0.0
        self.send(self.publisher.heartbeat(self.now_s))
        for follower in self.followers:
            follower.live[:] = follower.live[-1:]
            self.deliver(follower, is_lossy=False)
            self.now_s += 2 * REPLY_S
            self.deliver(follower, is_lossy=False)
