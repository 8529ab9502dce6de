"""A second driver of a cluster on Ray: it connects by name, attaches, plays, and may be killed.

python -m tests.chaos.ray_driver ADDRESS NAME GAME (JSON)
"""

from __future__ import annotations

import json
import sys

import ray

from actors import KVCacheCluster
from tests.chaos.game import Dealt, play_game


def main() -> None:
    """Play once."""
    address, name, dealt = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    cluster = KVCacheCluster.connect(name)
    length = cluster.status().max_model_len
    with cluster.client("other") as client:
        print("attached", flush=True)
        play_game(cluster.config, length, client, Dealt(**json.loads(dealt)))
    print("played", flush=True)


if __name__ == "__main__":
    main()
