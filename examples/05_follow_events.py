"""Following a cache: events, as routers read them, and an exact index of the cached blocks.

A cluster with `events: {enabled: true}` publishes the blocks that its cache stores and removes. A
follower asks for the full state when it joins, and later for any event it missed, so its index is
exact. Checksums prove that: publisher and follower have the same checksum of the state at the same
number. Shown here:

    1   a prompt is computed, and its blocks appear           4   another follower joins, late
    2   others need its blocks, and it is evicted             5   the coordinator is lost
    3   the same again, but salted                                and another one continues

    .venv/bin/python examples/05_follow_events.py

Everything but the publisher runs in this process, without Ray. `kvcache watch` and `kvcache events
dump` follow in the same way, from the command line.
"""

from __future__ import annotations

import socket
import sys
import time

import numpy as np

from actors import KVCacheClient
from actors.local import LocalCluster
from kvcache import NewRequest, StepRequest
from kvcache.config import ClusterConfig, parse_config
from kvcache.events.prefix_index import PrefixIndex
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.events.subscription import Update
from kvcache.events.wire_events import RemovedEvent, StoredEvent

PROMPT_TOKENS = 20 * 16
PATIENCE_S = 30.0


def main() -> None:
    prompts = [np.arange(i * 1000, i * 1000 + PROMPT_TOKENS, dtype=np.int32) for i in range(5)]
    index = PrefixIndex()

    def learn(update: Update) -> None:
        index.follow("replica", update)
        describe(update)

    with (
        LocalCluster(config_of()) as cluster,
        KVEventSubscriber(*endpoints_of(cluster), on_update=learn) as subscriber,
    ):
        with cluster.client() as client:
            print("A prompt of 20 blocks is computed:")
            play(client, "first", prompts[0])
            become_exact(cluster, subscriber)
            promise(cached(index, prompts[0]) == 20, "all of its blocks are cached")

            print("\nThree more, in a pool of 64 blocks:")
            for i in (1, 2, 3):
                play(client, f"more-{i}", prompts[i])
            become_exact(cluster, subscriber)
            promise(cached(index, prompts[3]) == 20, "the last one is cached")
            promise(cached(index, prompts[0]) < 20, "the first one was evicted")

            print("\nA prompt with a salt is found by the same salt only:")
            play(client, "salted", prompts[4], salt="tenant-7")
            become_exact(cluster, subscriber)
            promise(cached(index, prompts[4], "tenant-7") == 20, "a prompt with the salt finds it")
            promise(cached(index, prompts[4]) == 0, "no other prompt does")

        print("\nA follower joins late, and gets the whole state at once:")
        with KVEventSubscriber(*endpoints_of(cluster), on_update=describe) as late:
            become_exact(cluster, late)
            promise(late.statistics().num_restatements == 1, "the whole state came as one batch")

        print("\nThe coordinator is lost, another one begins over the live workers:")
        before, blocks = subscriber.last_seq, subscriber.statistics().num_blocks
        cluster.restart_coordinator()
        become_exact(cluster, subscriber)
        promise(before is not None, "there were events before")
        promise(subscriber.last_seq is not None, "there are events now")
        promise((subscriber.last_seq or 0) > (before or 0), "its numbers go on above")
        promise(subscriber.statistics().num_blocks == blocks, "every block is known as before")
        with cluster.client("again") as client:
            play(client, "after", prompts[0])
            become_exact(cluster, subscriber)
            promise(cached(index, prompts[0]) == 20, "and it is followed as the one before")
    print("\nAll as promised.")


def config_of() -> ClusterConfig:
    """A small model, a small pool, and a publisher at two ports that are free."""
    block = 2 * 16 * 2 * 8 * 2  # keys and values of 16 tokens, two heads of eight halves
    live, replay = free_ports(2)
    return parse_config(
        {
            "name": "events-example",
            "model": {
                "name": "tiny",
                "max_model_len": 512,
                "layers": [{"kind": "full", "num_kv_heads": 2, "head_size": 8}],
            },
            "cache": {"memory_per_rank": 65 * block},
            "events": {
                "enabled": True,
                # Fixed ports: followers find the next coordinator's publisher where this one was.
                "endpoint": f"tcp://127.0.0.1:{live}",
                "replay_endpoint": f"tcp://127.0.0.1:{replay}",
                "heartbeat_s": 0.5,
            },
            "content_check": {"enabled": True},
        }
    )


def free_ports(count: int) -> list[int]:
    """Ask the system for free ports."""
    found = [socket.socket() for _ in range(count)]
    for each in found:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in found]
    for each in found:
        each.close()
    return ports


def endpoints_of(cluster: LocalCluster) -> tuple[str, str]:
    """Return the publisher's addresses: the live stream, and the one for missed events.

    `kvcache status --json` shows the same.
    """
    statistics = cluster.coordinator.statistics().events or {}
    return statistics["endpoint"], statistics["replay_endpoint"]


def play(client: KVCacheClient, name: str, prompt: np.ndarray, salt: str | None = None) -> None:
    """Compute a prompt and finish it."""
    new = NewRequest(name, prompt, max_new_tokens=len(prompt), cache_salt=salt)
    completed = -1
    # An engine without work sends an empty step, so that its last one is sealed.
    for request in ({"new": (new,)}, {"finished": (name,)}, {}):
        step = client.submit(StepRequest(**request, completed_step=completed))
        client.wait_finished(step)
        completed = step


def become_exact(cluster: LocalCluster, subscriber: KVEventSubscriber) -> None:
    """Follow until the state equals the publisher's at the same number, and the coordinator's own
    tables."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        cluster.pump()
        subscriber.poll(0.01)
        told = cluster.coordinator.statistics().events or {}
        manager = cluster.coordinator.manager
        num_sealed = 0 if manager is None else manager.statistics().core.num_sealed_blocks
        if (
            (subscriber.last_seq, subscriber.checksum)
            == (told.get("last_seq"), told.get("checksum"))
            and subscriber.is_exact
            and subscriber.statistics().num_blocks.get("GPU", 0) == num_sealed
        ):
            break
        promise(time.monotonic() < give_up_s, "the follower is exact")
    print(f"  exact at {subscriber.last_seq}: {num_sealed} blocks, {subscriber.checksum:016x}")


def cached(index: PrefixIndex, prompt: np.ndarray, salt: str | None = None) -> int:
    """Return how many leading blocks of a prompt the replica has."""
    return index.match(prompt, cache_salt=salt)[0].storage_blocks


def describe(update: Update) -> None:
    """Print the events of a batch, without heartbeats."""
    said = []
    for event in update.batch.events:
        if isinstance(event, StoredEvent):
            said.append(f"{len(event.block_hashes)} stored")
        elif isinstance(event, RemovedEvent):
            said.append(f"{len(event.block_hashes)} removed")
        else:
            said.append("a snapshot")
    if said:
        print(f"  {update.seq}: {', '.join(said)}")


def promise(holds: bool, what: str) -> None:
    """End the example with exit status 1 unless the promise `what` holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")


if __name__ == "__main__":
    main()
