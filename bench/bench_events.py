"""The cost of publishing in a step, and the rate of blocks at a subscriber. Rows C5.

Steps with 256 decodes through a real cluster, with events and without, alternating. Blocks a second
through the encoder alone, and from a publisher's process into a subscriber that ends up with the
same state. Needs Ray for the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from actors import KVCacheClient, KVCacheCluster
from bench.bench_cluster import Decodes, make_config, per_step_us
from bench.cores import OURS
from bench.measure import Figure, Row
from kvcache.base.arrays import int32_array
from kvcache.base.clock import SystemClock
from kvcache.config import parse_config
from kvcache.core import BlocksStored, CacheEvent
from kvcache.events.codec import EventCodec
from kvcache.events.feed_frames import pack_events, pack_frame, pack_state
from kvcache.events.process_link import ProcessLink
from kvcache.events.publisher import PublisherSettings
from kvcache.events.publisher_process import SocketSettings
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.events.translation import EventTranslator, GroupKind
from kvcache.requests.digests import PackedDigests
from kvcache.requests.request_content import Namespace

BLOCK_TOKENS = 16
BLOCKS_AT_ONCE = 2048
ANY_PORT = "tcp://127.0.0.1:0"
PATIENCE_S = 120.0


def measure_events(is_small: bool, say: Callable[[str], None]) -> list[Row]:
    """Return the rows of C5. Ray runs."""
    rounds, num_steps, num_batches = (2, 8, 8) if is_small else (9, 96, 200)
    say("steps with and without events")
    rows = [step_row(rounds, num_steps)]
    say("blocks into a subscriber")
    return [*rows, encode_row(num_batches), subscriber_row(min(rounds, 5), num_batches)]


def step_row(rounds: int, num_steps: int) -> Row:
    """Compare steps of 256 decodes; one decode in sixteen fills a block."""
    plain = make_config(4)
    events = {"enabled": True, "endpoint": ANY_PORT, "replay_endpoint": ANY_PORT}
    told = parse_config({**plain.model_dump(), "name": "bench-events", "events": events}, "bench")
    ratios: list[float] = []
    with ExitStack() as stack:
        clients: list[KVCacheClient] = []
        for config in (plain, told):
            cluster = stack.enter_context(KVCacheCluster.launch(config))
            clients.append(stack.enter_context(cluster.client()))
        there = cluster.coordinator_statistics()
        assert there is not None
        assert there.events is not None
        places = there.events["endpoint"], there.events["replay_endpoint"]
        subscriber = stack.enter_context(KVEventSubscriber(*places))
        for number in range(rounds):
            without, with_events = (decode_us(client, number, num_steps) for client in clients)
            subscriber.poll(0.0)
            ratios.append(with_events / without)
    return Row(
        workload="C5",
        what="a step with 256 decodes, 4 workers: events on against off",
        figures={OURS: Figure(tuple(ratios), "times")},
        peer_name="",
        goal="<= 1.3 times",
    )


def decode_us(client: KVCacheClient, seed: int, num_steps: int) -> float:
    """Return microseconds a step of 256 decodes."""
    with Decodes(client, seed) as decodes:

        def run() -> None:
            for _ in range(num_steps):
                decodes.step()

        return per_step_us(run, num_steps)


def encode_row(num_batches: int) -> Row:
    """Measure the blocks per second that become payloads."""
    codec, translator = EventCodec(()), EventTranslator([GroupKind("full")])
    rates = []
    for seed in range(num_batches):
        events = stored(seed)
        start_s = time.perf_counter()
        codec.encode_wire(1.0, translator.translate(events))
        rates.append(BLOCKS_AT_ONCE / (time.perf_counter() - start_s) / 1e6)
    return Row(
        workload="C5",
        what=f"events of {BLOCKS_AT_ONCE} stored blocks encoded, million blocks a second",
        figures={OURS: Figure(tuple(rates), "million blocks/s")},
        peer_name="",
        goal=">= 1 million blocks/s",
    )


def subscriber_row(rounds: int, num_batches: int) -> Row:
    """Measure the blocks per second from a publisher's process into a subscriber's state."""
    rates = [blocks_into_subscriber(seed, num_batches) / 1e6 for seed in range(rounds)]
    return Row(
        workload="C5",
        what="stored blocks, published by a process of its own, in a subscriber's state (exact)",
        figures={OURS: Figure(tuple(rates), "million blocks/s")},
        peer_name="",
        goal="subscriber exact",
    )


def blocks_into_subscriber(seed: int, num_batches: int) -> float:
    """Return blocks a second; raises RuntimeError where the subscriber's state is another one."""
    link = ProcessLink(
        PublisherSettings("kv@bench@bench"),
        [GroupKind("full")],
        SocketSettings(ANY_PORT, ANY_PORT),
        SystemClock(),
    )
    link.open(PATIENCE_S)
    batches = [stored(seed * num_batches + i) for i in range(num_batches)]
    try:
        with KVEventSubscriber(*link.endpoints) as subscriber:
            link.send(
                pack_frame("begin", 0, 1.0, pack_state((), (BLOCK_TOKENS,), bytes(32))),
                is_state=True,
            )
            subscriber.wait_for(0, PATIENCE_S)
            start_s = time.perf_counter()
            for batch in batches:
                link.send(pack_frame("batch", 1.0, pack_events(batch)))
            num_blocks = num_batches * BLOCKS_AT_ONCE
            while subscriber.statistics().num_blocks.get("GPU", 0) < num_blocks:
                link.poll()
                subscriber.poll(0.01)
                if time.perf_counter() - start_s > PATIENCE_S:
                    raise RuntimeError(f"still {subscriber.statistics()} of {num_blocks} blocks")
            taken_s = time.perf_counter() - start_s
            while link.statistics().get("last_seq") != subscriber.last_seq:
                link.poll()
                if time.perf_counter() - start_s > PATIENCE_S:
                    raise RuntimeError("the publisher does not say how far it is")
            if link.statistics()["checksum"] != subscriber.checksum:
                raise RuntimeError("the subscriber's state is not the publisher's")
            return num_blocks / taken_s
    finally:
        link.close()


def stored(seed: int) -> Sequence[CacheEvent]:
    """One chain of blocks that no other seed has."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 100_000, BLOCKS_AT_ONCE * BLOCK_TOKENS)
    digests = PackedDigests(random.bytes(32 * BLOCKS_AT_ONCE), 32)
    namespace = Namespace(0, None, None, None)
    event = BlocksStored(0, "device", digests, None, int32_array(tokens), BLOCK_TOKENS, namespace)
    return [event]
