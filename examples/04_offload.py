"""Tiers below the device: blocks evicted from the pool come back from host memory and files.

The pool below holds 64 blocks, one long prompt. The example runs ten prompts, and each evicts the
one before from the device. Blocks that a completed step has sealed are copied to host memory at
once, and from there to files when host memory gets full. When the first prompt comes again, its
request has to wait (`waiting_for_load`): its blocks are fetched, loaded into free ones and checked,
and the next step finds them like any other cached prefix. Nothing is computed again.

Then the cluster ends, and another one starts with the same directory and takes over the files.

    .venv/bin/python examples/04_offload.py

Everything runs in this process, without Ray. Workers check every byte that is read.
"""

from __future__ import annotations

import sys
import tempfile
import time

import numpy as np

from actors import KVCacheClient
from actors.local import LocalCluster
from kvcache import NewRequest, StepRequest
from kvcache.config import ClusterConfig, parse_config

PROMPT_TOKENS = 60 * 16
PATIENCE_S = 30.0


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        prompts = [np.arange(i * 1000, i * 1000 + PROMPT_TOKENS, dtype=np.int32) for i in range(10)]

        print("A pool of 64 blocks, host memory for 256, files for 1024. Ten prompts of 60 blocks:")
        with LocalCluster(config_of(directory)) as cluster, cluster.client() as client:
            for i, prompt in enumerate(prompts):
                play(client, f"first-{i}", prompt)
            show(cluster)

            print("\nThe last prompt but one again. The device has lost it, host memory has not:")
            num_hit = play(client, "again-8", prompts[8])
            promise(num_hit == PROMPT_TOKENS - 16, f"{num_hit} tokens were not computed again")

            print("\nThe first prompt again. It is in files by now:")
            num_hit = play(client, "again-0", prompts[0])
            promise(num_hit == PROMPT_TOKENS - 16, f"{num_hit} tokens were not computed again")
            show(cluster)
            promise(client.failures == (), "every byte that was read is right")

        print("\nAnother cluster of the same name and model, with the same directory:")
        with LocalCluster(config_of(directory)) as cluster, cluster.client() as client:
            num_hit = play(client, "later-0", prompts[0])
            promise(num_hit == PROMPT_TOKENS - 16, f"{num_hit} tokens come from its files")
            show(cluster)
            promise(client.failures == (), "every byte that was read is right")


def config_of(directory: str) -> ClusterConfig:
    """A small model, a small pool, and two tiers."""
    block = 2 * 16 * 2 * 8 * 2  # keys and values of 16 tokens, two heads of eight halves
    return parse_config(
        {
            "name": "offload-example",
            "model": {
                "name": "tiny",
                "max_model_len": 1008,
                "layers": [{"kind": "full", "num_kv_heads": 2, "head_size": 8}],
            },
            "cache": {"memory_per_rank": 65 * block},
            "offload": {
                "host_memory_per_rank": 256 * block,
                "spare_share": 0.5,  # of host memory, kept free for new blocks
                "disk": {"directory": directory, "capacity_per_rank": 1024 * block},
            },
            "content_check": {"enabled": True},
        }
    )


def play(client: KVCacheClient, name: str, prompt: np.ndarray) -> int:
    """Admit one request, compute it and finish it; return how many of its tokens were cached."""
    new = NewRequest(name, prompt, max_new_tokens=len(prompt))
    give_up_s = time.monotonic() + PATIENCE_S
    num_waits = 0
    completed = -1
    while True:
        step = client.submit(StepRequest(new=(new,), completed_step=completed))
        result = client.wait_result(step)
        client.wait_finished(step)
        completed = step
        if result.admitted_slots[0] >= 0:
            break
        promise(time.monotonic() < give_up_s, f"{name} is admitted")
        num_waits += 1
        time.sleep(0.01)
    num_hit = int(result.num_hit_tokens[0])
    waited = f", after waiting for {num_waits} steps" if num_waits else ""
    print(f"  {name}: {num_hit} of {len(prompt)} tokens found{waited}")
    step = client.submit(StepRequest(finished=(name,), completed_step=completed))
    client.wait_finished(step)
    # An engine without work sends an empty step, so that its last one is sealed.
    client.wait_finished(client.submit(StepRequest(completed_step=step)))
    return num_hit


def show(cluster: LocalCluster) -> None:
    """Print how many blocks each tier has."""
    statistics = cluster.coordinator.statistics().offload
    if statistics is None:
        sys.exit("not as promised: there are tiers")
    host, disk = statistics.tiers.host, statistics.tiers.disk
    print(f"  host memory: {host.num_ready} blocks, {host.num_loaded} loaded")
    if disk is not None:
        print(
            f"  files: {disk.num_ready} blocks, {disk.num_stored} written, {disk.num_loaded} read"
        )
    print(f"  taken over from before: {statistics.num_adopted_blocks} blocks")


def promise(holds: bool, what: str) -> None:
    """End the example with exit status 1 unless the promise `what` holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")


if __name__ == "__main__":
    main()
