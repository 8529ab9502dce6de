"""A cluster on Ray: a coordinator that decides, two workers that hold the bytes, and one client.

An engine calls the coordinator once per scheduling step. Its `StepRequest` names the new requests,
the running ones with their tokens, and the finished ones. The `StepResult` says which requests were
admitted and into which *slot* (a row of the workers' block tables), how many tokens of a prompt
were found in the cache, and which blocks are new. All workers get the same commands, one message
per step.

The engine below is minimal: it computes prompts in chunks, decodes, and finishes. It has no model;
its tokens are made up. Instead the workers run *content-checked forwards*: they write into every
block the bytes that belong to its tokens, and compare every byte that a later step reads.
(03_embed_in_your_engine.py runs a real, tiny model.)

    .venv/bin/python examples/02_ray_cluster.py

It joins the Ray cluster that runs on this machine or that RAY_ADDRESS names. If there is none, it
starts one and ends it again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from actors import KVCacheClient, KVCacheCluster
from kvcache import (
    NO_SLOT,
    NO_STEP,
    NewRequest,
    NotRunningError,
    RunningRequests,
    RunningRow,
    StepRequest,
    StepResult,
)

CONFIG_PATH = Path(__file__).parents[1] / "configs" / "cpu_tp2.yaml"

CHUNK_TOKENS = 48
"""Most tokens of one request that are computed in one step."""

SYSTEM_PROMPT = list(range(1000, 1064))
"""The start of every conversation: 64 tokens, four blocks of 16."""


def main() -> None:
    cluster = KVCacheCluster.launch(CONFIG_PATH, on_progress=lambda line: print(f"  ({line})"))
    with cluster, cluster.client() as client:
        engine = TinyEngine(client)

        print("\nA first request of 108 tokens, alone")
        first = Conversation("first", [*SYSTEM_PROMPT, *range(44)], num_output_tokens=6)
        engine.run([first])
        promise(first.num_hit == 0, "an empty cache has nothing to offer")

        print("\nIts user asks on, and at the same time another user starts a conversation")
        follow_up = Conversation("follow-up", [*first.token_ids, *range(200, 220)], 3)
        stranger = Conversation("stranger", [*SYSTEM_PROMPT, *range(300, 330)], 3)
        engine.run([follow_up, stranger])
        print(f"\n  follow-up: {follow_up.num_hit} tokens found: the prompt of 108, and 4 that")
        print("    were decoded. Every full block that is computed is cached for all requests.")
        print(f"  stranger: {stranger.num_hit} tokens found: the system prompt")
        print("  Blocks that were found are entered in the new tables too: 7 + 2 and 4 + 2.")
        promise(follow_up.num_hit == 112, "the first prompt and its answer are found")
        promise(stranger.num_hit == 64, "the system prompt is found")

        print(f"\nThe workers compared {client.bytes_checked} bytes with what the tokens demand.")
        promise(client.bytes_checked > 0, "forwards are checked")
        promise(client.failures == (), "no byte was wrong")
        show_status(cluster)

    # Leaving the `with` detached the client, then stopped coordinator and workers in order.
    promise(not is_running(cluster.name), "nothing of the cluster is left")
    ray.shutdown()
    print("\nStopped, nothing is left. All as promised.")


@dataclass
class Conversation:
    """A request as the engine sees it.

    `token_ids` has the prompt and the sampled tokens; the coordinator knows the first
    `num_told` of them, and the cache has `num_computed`.
    """

    request_id: str
    token_ids: list[int]
    num_output_tokens: int
    slot: int = NO_SLOT
    num_hit: int = 0
    num_told: int = 0
    num_computed: int = 0
    num_sampled: int = 0

    @property
    def is_done(self) -> bool:
        """Whether it has all its output."""
        return self.num_sampled == self.num_output_tokens

    @property
    def num_next(self) -> int:
        """How many tokens its next step computes: a chunk of the prompt, or one when decoding."""
        return min(CHUNK_TOKENS, len(self.token_ids) - self.num_computed)


class TinyEngine:
    """Runs all requests together to their end, one step after the other."""

    def __init__(self, client: KVCacheClient) -> None:
        self._client = client
        self._completed_step = NO_STEP
        self._finished: list[Conversation] = []

    def run(self, waiting: Sequence[Conversation]) -> None:
        """Admit all of `waiting` and step until they are done; the last step frees them."""
        running: list[Conversation] = []
        new = list(waiting)
        while new or running or self._finished:
            result = self._schedule(running, new)
            running, new = [*running, *new], []

            # The workers run the forward of this step now. With your own model, run it here. In
            # this example the workers report that they have written and compared every byte.
            self._client.wait_finished(result.step)
            self._completed_step = result.step

            for request in running:
                sample(request)
            self._finished = [request for request in running if request.is_done]
            running = [request for request in running if not request.is_done]

    def _schedule(self, running: list[Conversation], new: list[Conversation]) -> StepResult:
        """Request the next step and record its result."""
        result = self._client.step(
            StepRequest(
                completed_step=self._completed_step,
                finished=tuple(request.request_id for request in self._finished),
                running=running_rows(running),
                new=tuple(
                    NewRequest(
                        request.request_id,
                        np.array(request.token_ids, dtype=np.int32),
                        max_new_tokens=CHUNK_TOKENS,
                    )
                    for request in new
                ),
            )
        )
        num_blocks = len(result.patches.block_ids)
        print(f"  step {result.step}: {num_blocks} block(s) entered in block tables")
        for request in self._finished:
            print(f"    {request.request_id}: finished, its blocks may be reused or found again")
        promise(bool(result.running_scheduled.all()), "there is room: otherwise preempt a request")
        for request in running:
            advance(request, request.num_next)
        promise(result.no_room == (), "there is room: otherwise try again later")
        for index, request in enumerate(new):
            request.slot = int(result.admitted_slots[index])
            request.num_hit = request.num_computed = int(result.num_hit_tokens[index])
            print(f"    {request.request_id}: slot {request.slot}, ", end="")
            print(f"{request.num_hit} of {len(request.token_ids)} prompt tokens found")
            advance(request, int(result.num_scheduled_tokens[index]))
        return result


def running_rows(running: Sequence[Conversation]) -> RunningRequests:
    """Return the rows of a step: one per running request."""
    return RunningRequests.from_rows(
        [
            RunningRow(request.slot, request.num_next, tuple(request.token_ids[request.num_told :]))
            for request in running
        ]
    )


def advance(request: Conversation, num_tokens: int) -> None:
    """Record that the step computes `num_tokens` more and sends all tokens."""
    start = request.num_computed
    request.num_computed += num_tokens
    request.num_told = len(request.token_ids)
    what = "decodes" if request.num_sampled else "prefills"
    print(f"    {request.request_id}: {what} positions [{start}, {request.num_computed})")


def sample(request: Conversation) -> None:
    """Append a made-up token, if all tokens of the request are computed."""
    if request.num_computed == len(request.token_ids):
        request.token_ids.append(5000 + request.num_sampled)
        request.num_sampled += 1


def show_status(cluster: KVCacheCluster) -> None:
    """Print what `kvcache status` would show of the cluster."""
    status = cluster.status()
    print(f"\nStatus of {status.name}: {status.state}, {status.num_blocks} blocks per rank")
    for rank, worker in zip(status.ranks, cluster.statistics().workers, strict=True):
        promise(worker is not None, "every rank answers")
        if worker is not None:
            print(f"  rank {rank.rank}: process {rank.process_id}, ", end="")
            print(f"{worker.num_forwards} forwards, {worker.pool_bytes >> 20} MiB")
    promise(status.state == "ready", "the cluster is well")


def is_running(name: str) -> bool:
    """Return whether a cluster of this name can be found."""
    try:
        KVCacheCluster.connect(name)
    except NotRunningError:
        return False
    return True


def promise(holds: bool, what: str) -> None:
    """End the example with exit status 1 unless the promise `what` holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")


if __name__ == "__main__":
    main()
