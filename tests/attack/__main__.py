"""Attacks from the command line, longer than the tests play them.

    python -m tests.attack messages --minutes 5     broken messages, clusters in this process
    python -m tests.attack sockets --minutes 5      garbage on all sockets of a cluster on Ray
    python -m tests.attack memory-service --minutes 10  its host memory and workers killed

The seed is printed; exit code 1 if something was found.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.chaos.own_ray import ray_of_our_own


def attack_messages(seed: int, give_up_s: float) -> int:
    """Play broken messages of each sender in turn; return the number of rounds."""
    from tests.attack.messages import Storm
    from tests.attack.test_garbage import storm_config

    rounds = 0
    while not rounds or time.monotonic() < give_up_s:
        storm = Storm(storm_config(), seed + rounds)
        for who in ("clients", "workers", "coordinator"):
            getattr(storm, f"break_{who}")(1000)
            storm.check()
        storm.close()
        rounds += 1
    return rounds


def attack_sockets(seed: int, give_up_s: float) -> int:
    """Attack the sockets of a cluster on Ray; return the number of rounds."""
    rounds = 0
    with ray_of_our_own(), tempfile.TemporaryDirectory() as folder:
        from actors import KVCacheCluster
        from tests.attack.siege import besieged, siege_config

        with (
            KVCacheCluster.launch(siege_config(Path(folder))) as cluster,
            besieged(cluster, seed) as siege,
        ):
            print(*siege.sockets, sep="\n", flush=True)
            while not rounds or time.monotonic() < give_up_s:
                siege.attack(100)
                siege.check()
                rounds += 1
            print(*siege.played.most_common(), sep="\n")
    return rounds


def attack_memory_service(seed: int, give_up_s: float) -> int:
    """Kill a cluster's memory service and a worker repeatedly; return how often."""
    rounds = 0
    with ray_of_our_own(), tempfile.TemporaryDirectory() as folder:
        from actors import KVCacheCluster
        from tests.actors.tier_driver import play
        from tests.attack.siege import PROMPTS, kill_service_and_worker, siege_config

        with (
            KVCacheCluster.launch(siege_config(Path(folder))) as cluster,
            cluster.client() as client,
        ):
            while not rounds or time.monotonic() < give_up_s:
                for number in PROMPTS:
                    play(client, number)
                kill_service_and_worker(cluster, (seed + rounds) % 2)
                rounds += 1
            assert client.failures == ()
    return rounds


PARTS: dict[str, Callable[[int, float], int]] = {
    "messages": attack_messages,
    "sockets": attack_sockets,
    "memory-service": attack_memory_service,
}


def main() -> int:
    """Play one part; return 1 if something was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed where not given")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    try:
        rounds = PARTS[arguments.part](seed, time.monotonic() + 60 * arguments.minutes)
    except Exception:
        traceback.print_exc()
        print("FOUND", flush=True)
        return 1
    print(f"{arguments.part}: {rounds} rounds, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
