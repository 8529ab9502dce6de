"""The engine's process dies, and another one continues with a warm cache.

Here the coordinator is no actor: it runs inside the process that schedules, so a step needs no hop
to reach it. The state to keep is elsewhere: blocks and their labels are with the workers, which are
detached actors. This example starts an engine's process, which computes a prompt, kills it with
SIGKILL, and takes the cluster over:

    EmbeddedCluster.launch(config)        the first process
    EmbeddedCluster.take_over(name)       the next one: a new epoch, fenced, rebuilt from the labels

If the old coordinator only hung and still lives, workers no longer obey it: its next call raises
SupersededError.

    .venv/bin/python examples/07_take_over.py

It joins the Ray cluster that runs on this machine or that RAY_ADDRESS names. If there is none, it
starts one and ends it again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import ray

from actors import EmbeddedCluster, KVCacheClient
from kvcache import NewRequest, StepRequest

CONFIG_PATH = Path(__file__).parents[1] / "configs" / "cpu_tp2.yaml"

PROMPT = np.arange(1000, 1100, dtype=np.int32)
"""100 tokens: six full blocks of 16, and four tokens that are never cached."""

FIRST = "first"


def main() -> None:
    ray.init(log_to_driver=False, include_dashboard=False)
    address = ray.get_runtime_context().gcs_address

    print("An engine's process launches a cluster, its coordinator inside")
    first = subprocess.Popen(
        [sys.executable, __file__, FIRST],
        env={**os.environ, "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        text=True,
    )
    with first:
        promise(first.stdout is not None, "it can be heard")
        name = "" if first.stdout is None else first.stdout.readline().strip()
        promise(bool(name), "it has computed the prompt")
        print(f"  process {first.pid} has computed a prompt of {len(PROMPT)} tokens on {name!r}")
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    print("  it is killed; the workers live on\n")

    print(f"Another process, {os.getpid()}, takes the cluster over")
    with EmbeddedCluster.take_over(name) as cluster, cluster.client() as client:
        statistics = cluster.statistics().coordinator
        num_kept = 0 if statistics is None else statistics.num_kept_blocks
        print(f"  epoch {client.epoch}: {num_kept} blocks are on both ranks what they were")
        num_hit = compute(client, "again")
        print(f"  the same prompt: {num_hit} of {len(PROMPT)} tokens found, the rest is computed")
        promise(client.epoch == 2, "the epoch of the process that died is over")
        promise(num_hit == 96, "every full block is found")
        promise(client.bytes_checked > 0, "what was found is read, and compared")
        promise(client.failures == (), "no byte was wrong")
        print(f"  {client.bytes_checked} bytes compared with what the tokens demand: all right")
    ray.shutdown()
    print("\nStopped, nothing is left. All as promised.")


def be_the_first() -> None:
    """Launch, compute, print the cluster's name, and wait."""
    cluster = EmbeddedCluster.launch(CONFIG_PATH)
    compute(cluster.client(), "first")
    print(cluster.name, flush=True)
    signal.pause()


def compute(client: KVCacheClient, request_id: str) -> int:
    """Compute the prompt and finish it; return how many of its tokens were found in the cache."""
    new = NewRequest(request_id, PROMPT, max_new_tokens=len(PROMPT))
    result = client.step(StepRequest(new=(new,)))
    client.wait_finished(result.step)
    done = client.step(StepRequest(completed_step=result.step, finished=(request_id,)))
    client.wait_finished(done.step)
    return int(result.num_hit_tokens[0])


def promise(holds: bool, what: str) -> None:
    """End the example with exit status 1 unless the promise `what` holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")


if __name__ == "__main__":
    if sys.argv[1:] == [FIRST]:
        be_the_first()
    else:
        main()
