"""Step 4: many requests at once on two ranks, one message per scheduling step.

The loop decides what runs: first running requests, then new ones while there is room, one chunk of
a prompt at a time. One `StepRequest` has it all. The coordinator answers with slots, hits, and the
requests without room, and every rank gets the same commands. The pool is too small for all: the
last request is *preempted*, which frees its blocks, and comes back with most of its prompt still
cached.

    step n     ──▶ completed n-1, running rows with their new tokens, preempted, new, resumed
               ◀── slots, hits, (epoch, seq): `begin_forward` with these sets a rank's tables

The cluster is in this process. On Ray it is `KVCacheCluster`, and nothing else in the loop changes
(examples/02_ray_cluster.py, 03_embed_in_your_engine.py).

    .venv/bin/python examples/engine/guide/04_steps.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tiny_model import (
    HEAD_SIZE,
    MAX_TOKENS,
    NUM_HEADS,
    NUM_LAYERS,
    TinyModel,
    attend,
    generate_from_scratch,
    promise,
)

from actors.local import LocalCluster
from kvcache import (
    NO_SLOT,
    NO_STEP,
    NewRequest,
    ResumedRequest,
    RunningRequests,
    RunningRow,
    StepRequest,
    StepResult,
)
from kvcache.config import parse_config

NUM_RANKS = 2
BLOCK_SIZE = 4
CHUNK = 16
NUM_NEW = 10
NUM_BLOCKS = 31
SYSTEM = list(range(10, 26))


@dataclass
class Generation:
    """A request as the loop sees it. The coordinator knows the first `num_told` tokens."""

    name: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    slot: int = NO_SLOT
    num_computed: int = 0
    num_told: int = 0
    num_preemptions: int = 0

    @property
    def is_done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.tokens) == len(self.prompt) + NUM_NEW


@dataclass(frozen=True)
class Row:
    """A forward's part of the request in `slot`: positions [start, end)."""

    slot: int
    start: int
    end: int


class Engine:
    """Schedules steps and runs their forwards on all ranks."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._client = cluster.client()
        self._model = TinyModel()
        self._completed = NO_STEP
        self.num_hit_tokens = 0

    def generate(self, requests: Sequence[Generation]) -> None:
        """Run all requests to the end."""
        waiting, running = list(requests), list[Generation]()
        finished: tuple[str, ...] = ()
        while waiting or running or finished:
            new = [request for request in waiting if not request.num_preemptions]
            resumed = [request for request in waiting if request.num_preemptions]
            if running and resumed:
                new, resumed = [], resumed[:1]  # preempted requests come back first
            result = self._client.step(
                StepRequest(
                    completed_step=self._completed,
                    finished=finished,
                    running=RunningRequests.from_rows([tell(request) for request in running]),
                    resumed=tuple(ResumedRequest(request.name, CHUNK) for request in resumed),
                    new=tuple(
                        NewRequest(request.name, np.array(request.tokens, np.int32), CHUNK)
                        for request in new
                    ),
                )
            )
            rows = self._rows(result, running, [*resumed, *new])
            self._forward(result, rows)
            self._completed = result.step
            admitted = [request for request in (*resumed, *new) if request.slot != NO_SLOT]
            running += admitted
            waiting = [request for request in waiting if request.slot == NO_SLOT]
            finished = tuple(request.name for request in running if request.is_done)
            running = [request for request in running if not request.is_done]
            if not result.running_scheduled.all():
                waiting.insert(0, self._preempt(running.pop()))

    def _rows(
        self, result: StepResult, running: Sequence[Generation], asked: Sequence[Generation]
    ) -> list[tuple[Generation, Row]]:
        """Return the rows of this step."""
        rows = []
        for request, has_room in zip(running, result.running_scheduled.tolist(), strict=True):
            if has_room:
                end = min(len(request.tokens), request.num_computed + CHUNK)
                rows.append((request, Row(request.slot, request.num_computed, end)))
        places = zip(
            result.admitted_slots, result.num_hit_tokens, result.num_scheduled_tokens, strict=True
        )
        for request, (slot, num_hit, num_now) in zip(asked, places, strict=True):
            request.slot = int(slot)
            if request.slot != NO_SLOT:
                request.num_told = len(request.tokens)
                self.num_hit_tokens += int(num_hit)
                rows.append((request, Row(request.slot, int(num_hit), int(num_hit + num_now))))
        return rows

    def _preempt(self, request: Generation) -> Generation:
        """Preempt a running request; its unreported tokens are sampled again."""
        result = self._client.step(
            StepRequest(completed_step=self._completed, preempted_recompute=(request.name,))
        )
        self._forward(result, [])
        self._completed = result.step
        print(f"  step {result.step}: no room, {request.name} gives its blocks up")
        del request.tokens[request.num_told :]
        request.slot, request.num_computed = NO_SLOT, 0
        request.num_preemptions += 1
        return request

    def _forward(self, result: StepResult, rows: Sequence[tuple[Generation, Row]]) -> None:
        """Compute the rows of a step on all ranks, layer by layer, and sample."""
        workers = [embedded.worker for embedded in self._cluster.workers]
        for worker in workers:
            worker.begin_forward(result.epoch, result.seq, timeout_s=10.0)
        hidden = [self._model.embed(r.tokens[row.start : row.end], row.start) for r, row in rows]
        for layer in range(NUM_LAYERS):
            parts = [
                self._attend(rank, layer, hidden, [row for _, row in rows])
                for rank in range(NUM_RANKS)
            ]
            # The sum over ranks; an all-reduce if ranks are processes.
            hidden = [sum(row_parts, old) for old, *row_parts in zip(hidden, *parts, strict=True)]
        for worker in workers:
            worker.end_forward(result.epoch, result.seq)
        for (request, row), states in zip(rows, hidden, strict=True):
            request.num_computed = row.end
            if row.end == len(request.tokens):
                request.tokens.append(self._model.next_token(states))

    def _attend(
        self, rank: int, layer: int, hidden: Sequence[torch.Tensor], rows: Sequence[Row]
    ) -> list[torch.Tensor]:
        """Return the contribution of this rank's heads to each row's hidden states."""
        worker = self._cluster.workers[rank].worker
        pages, table = worker.kv_caches[f"layers.{layer}"], worker.block_tables.tensor(0)
        share = NUM_HEADS // NUM_RANKS
        heads = slice(rank * share, (rank + 1) * share)
        queries, places = [], []
        for states, row in zip(hidden, rows, strict=True):  # all rows write before one reads
            query, key, value = self._model.project(layer, states, heads)
            positions = torch.arange(row.end)
            blocks, offsets = (
                table[row.slot].long()[positions // BLOCK_SIZE],
                positions % BLOCK_SIZE,
            )
            pages[blocks[row.start :], 0, offsets[row.start :]] = key
            pages[blocks[row.start :], 1, offsets[row.start :]] = value
            queries.append(query)
            places.append((blocks, offsets))
        return [
            self._model.merge(layer, attend(q, pages[b, 0, o], pages[b, 1, o]), heads)
            for q, (b, o) in zip(queries, places, strict=True)
        ]


def tell(request: Generation) -> RunningRow:
    """Return the row of a running request: its sampled tokens, and how many it computes next."""
    new = tuple(request.tokens[request.num_told :])
    request.num_told = len(request.tokens)
    return RunningRow(request.slot, min(CHUNK, len(request.tokens) - request.num_computed), new)


def main() -> None:
    page = 2 * BLOCK_SIZE * NUM_HEADS // NUM_RANKS * HEAD_SIZE * 8
    config = parse_config(
        {
            "name": "guide",
            "model": {
                "name": "tiny",
                "max_model_len": MAX_TOKENS // 2,
                "dtype": "float64",
                "layers": [
                    {
                        "kind": "full",
                        "count": NUM_LAYERS,
                        "num_kv_heads": NUM_HEADS,
                        "head_size": HEAD_SIZE,
                    }
                ],
            },
            "cache": {
                "block_size": BLOCK_SIZE,
                "memory_per_rank": (NUM_BLOCKS + 1) * page * NUM_LAYERS,
            },
            "parallel": {"tensor_parallel_size": NUM_RANKS},
        }
    )
    requests = [
        Generation(f"r{n}", [*SYSTEM, *range(30 + n, 30 + n + 7 * (n % 3 + 1))]) for n in range(6)
    ]
    for request in requests:
        request.tokens = list(request.prompt)
    with LocalCluster(config) as cluster, cluster.client("figures") as statistics:
        engine = Engine(cluster)
        engine.generate(requests)
        promise(statistics.usage() == 0.0, "no block is in use at the end")
    model = TinyModel()
    for request in requests:
        output = request.tokens[len(request.prompt) :]
        print(f"{request.name}: {output}, preempted {request.num_preemptions} times")
        expected = generate_from_scratch(model, request.prompt, NUM_NEW)
        promise(output == expected, f"the tokens are the same as without a cache, {expected}")
    print(f"{engine.num_hit_tokens} tokens were cached when a request was let in")
    promise(any(request.num_preemptions for request in requests), "the pool was too small for all")


if __name__ == "__main__":
    main()
