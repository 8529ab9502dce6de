"""An engine's process with an embedded coordinator, for tests that kill or stop it.

    python embedding_driver.py ADDRESS CONFIGURATION (JSON)

Launches the cluster, computes a prompt, and executes the commands that it reads, line by line;
answers each with a line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import ray

from actors import EmbeddedCluster
from kvcache.base.errors import KVCacheError
from kvcache.config import parse_config
from kvcache.protocol.step import NewRequest, StepRequest

NUM_TOKENS = 40
NUM_HIT_TOKENS = 32


def compute(client: Any, request_id: str, first: int) -> int:
    """Compute a prompt of `NUM_TOKENS` tokens and finish it; return how many of them were hit."""
    tokens = np.arange(first, first + NUM_TOKENS, dtype=np.int32)
    new = NewRequest(request_id, tokens, max_new_tokens=NUM_TOKENS)
    computed = client.step(StepRequest(new=(new,)))
    client.wait_finished(computed.step)
    finished = StepRequest(completed_step=computed.step, finished=(request_id,))
    client.wait_finished(client.step(finished).step)
    return int(computed.num_hit_tokens[0])


def main() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False)
    cluster = EmbeddedCluster.launch(parse_config(json.loads(sys.argv[2])))
    client = cluster.client()
    compute(client, "first", 1000)
    say("ready", epoch=client.epoch)
    for line in sys.stdin:
        try:
            say("done", **obey(line.strip(), cluster, client))
        except KVCacheError as error:
            say("error", type=type(error).__name__, text=str(error))


def obey(order: str, cluster: EmbeddedCluster, client: Any) -> dict[str, Any]:
    """Execute a command."""
    match order:
        case "step":
            return {"step": client.step(StepRequest()).step}
        case "attach":
            client.attach()
            return {}
        case "status":
            return cluster.status().to_dict()
        case "stop":
            cluster.stop()
            return {}
        case "leave":
            cluster.leave()
            return {}
        case _:
            return {"unknown": order}


def say(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


if __name__ == "__main__":
    main()
