"""Prefix-aware routing to two replicas: prompts go where their prefix is cached.

There are questions about six documents, and a replica has room for three. If replicas take turns,
both see all six documents, and each evicts those that are needed next. `PrefixRouter` follows the
events of both, knows which blocks each has, and ranks them:

    score = overlap_weight * blocks that have to be computed + load

The caller reports requests (`begin`, `end`), which count as load and spread unknown prompts.

    .venv/bin/python examples/06_prefix_router.py

Everything but the publishers runs in this process, without Ray. On Ray the same router is an actor:
`actors.routing.router.start_router`; in Ray Serve it is a request router: 08_serve_router.py.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from actors import KVCacheClient
from actors.local import LocalCluster
from actors.routing.router import PrefixRouter
from kvcache import NewRequest, StepRequest
from kvcache.config import ClusterConfig, parse_config

NUM_DOCUMENTS = 6
DOCUMENT_TOKENS = 24 * 16
QUESTION_TOKENS = 24
NUM_ROUNDS = 6
PATIENCE_S = 30.0

Choose = Callable[[str, np.ndarray], str]


class Replica:
    """A cluster with an engine that computes one prompt after the other."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self.name = name
        self.cluster = stack.enter_context(LocalCluster(config_of(name)))
        self.client: KVCacheClient = stack.enter_context(self.cluster.client())

    def endpoints(self) -> tuple[str, str]:
        """Return the addresses at which it publishes cache events."""
        statistics = self.cluster.coordinator.statistics().events or {}
        return statistics["endpoint"], statistics["replay_endpoint"]

    def compute(self, request_id: str, prompt: np.ndarray) -> int:
        """Compute a prompt and finish it; return how many tokens were cached."""
        new = NewRequest(request_id, prompt, max_new_tokens=len(prompt))
        step = self.client.submit(StepRequest(new=(new,)))
        num_hit = int(self.client.wait_result(step).num_hit_tokens[0])
        for request in ({"finished": (request_id,)}, {}):
            self.client.wait_finished(step)
            step = self.client.submit(StepRequest(**request, completed_step=step))
        self.client.wait_finished(step)
        return num_hit


def main() -> None:
    with ExitStack() as stack, PrefixRouter() as router:
        replicas = {name: Replica(name, stack) for name in ("left", "right")}
        for name, replica in replicas.items():
            router.add_replica(name, *replica.endpoints(), heartbeat_s=0.5)
        wait_until(lambda: not any(s.is_stale for s in router.statistics().replicas.values()))

        print("Asked in turn:")
        turns = [*replicas] * NUM_DOCUMENTS * NUM_ROUNDS
        in_turn = ask(replicas, questions(0), lambda request_id, prompt: turns.pop())
        print(f"  {in_turn:.1%} of the tokens were cached")

        print("Asked where the prefix is:")

        def by_prefix(request_id: str, prompt: np.ndarray) -> str:
            best = router.rank(prompt)[0]
            router.begin(request_id, best.name, len(prompt))
            return best.name

        def has_heard(request_id: str, prompt: np.ndarray, name: str) -> None:
            """Report the end of a request, and wait until the router knows its blocks."""
            router.end(request_id)
            wait_until(lambda: knows(router, name, prompt))

        routed = ask(replicas, questions(1_000_000), by_prefix, has_heard)
        print(f"  {routed:.1%} of the tokens were cached")
        for name, state in router.statistics().replicas.items():
            print(
                f"  {name}: {state.known.num_blocks} blocks, exact: {state.known.events.is_exact}"
            )

        best_possible = (NUM_ROUNDS - 1) / NUM_ROUNDS * DOCUMENT_TOKENS
        best_possible /= DOCUMENT_TOKENS + QUESTION_TOKENS
        print(f"No router can do better than {best_possible:.1%}: a document has to be read once.")
        promise(routed > best_possible - 0.01, "every document is computed once")
        promise(in_turn < 0.75 * routed, "in turn, documents push each other out")
    print("\nAll as promised.")


def config_of(name: str) -> ClusterConfig:
    """A small model, and a pool of 100 blocks: three documents of 24, and questions."""
    block = 2 * 16 * 2 * 8 * 2  # keys and values of 16 tokens, two heads of eight halves
    anywhere = "tcp://127.0.0.1:0"
    return parse_config(
        {
            "name": name,
            "model": {
                "name": "tiny",
                "max_model_len": 512,
                "layers": [{"kind": "full", "num_kv_heads": 2, "head_size": 8}],
            },
            "cache": {"memory_per_rank": 101 * block},
            "events": {
                "enabled": True,
                "endpoint": anywhere,
                "replay_endpoint": anywhere,
                "heartbeat_s": 0.5,
            },
            "content_check": {"enabled": True},
        }
    )


def questions(first_token: int) -> list[np.ndarray]:
    """A question about each document, round after round, in an order that changes."""
    choice = random.Random(7)
    prompts = []
    for _ in range(NUM_ROUNDS):
        for document in choice.sample(range(NUM_DOCUMENTS), NUM_DOCUMENTS):
            start = first_token + 10_000 * document
            question = [choice.randrange(50_000) for _ in range(QUESTION_TOKENS)]
            prompts.append(np.array([*range(start, start + DOCUMENT_TOKENS), *question], np.int32))
    return prompts


def ask(
    replicas: dict[str, Replica],
    prompts: Sequence[np.ndarray],
    choose: Choose,
    on_end: Callable[[str, np.ndarray, str], None] = lambda *ignored: None,
) -> float:
    """Compute every prompt on the chosen replica; return the share of cached tokens."""
    num_hit = 0
    for number, prompt in enumerate(prompts):
        request_id = f"{prompts[0][0]}-{number}"
        name = choose(request_id, prompt)
        num_hit += replicas[name].compute(request_id, prompt)
        on_end(request_id, prompt, name)
    return num_hit / sum(map(len, prompts))


def knows(router: PrefixRouter, name: str, prompt: np.ndarray) -> bool:
    """Return whether the router knows that a replica has a prompt."""
    (found,) = router.rank(prompt, among=[name])
    return found.device_blocks == len(prompt) // 16


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for events, which take a few milliseconds."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        promise(time.monotonic() < give_up_s, "the router hears of it")
        time.sleep(0.001)


def promise(holds: bool, what: str) -> None:
    """End the example with exit status 1 unless the promise `what` holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")


if __name__ == "__main__":
    main()
