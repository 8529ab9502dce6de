"""The KV cache inside your own actors: a tiny transformer that reads and writes it.

In an engine the process that runs a rank of the model also holds that rank's KV cache. Here every
`Engine` actor is one of two tensor-parallel ranks. It embeds the cache's worker:

    class Engine(WorkerMethods):                      the cluster's calls: kvcache_...
        self.kvcache = EmbeddedWorker(...)            the rank: tensors, block tables, connection

    worker = self.kvcache.worker
    worker.begin_forward(epoch, seq, timeout_s)       the step's blocks are in the tables now
    worker.kv_caches["layers.0"]                      (blocks, key/value, block size, heads, size)
    worker.block_tables.tensor(group)                 (slots, columns): block ids of each request
    worker.end_forward(epoch, seq)

The model is random but seeded, of two layers of full attention; each rank has half of the heads.
The driver schedules, embeds, adds up the ranks' results for each layer, and decodes greedily. Then
it runs the same prompts without a cache, every token from the start each time. The output must be
the same, although parts of the prompts were found instead of computed.

    .venv/bin/python examples/03_embed_in_your_engine.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch

from actors import (
    WORKER_CONCURRENCY_GROUPS,
    EmbeddedWorker,
    KVCacheClient,
    KVCacheCluster,
    WorkerMethods,
    connect_peer,
)
from kvcache import (
    NO_SLOT,
    NO_STEP,
    NewRequest,
    RunningRequests,
    RunningRow,
    StepRequest,
    StepResult,
)
from kvcache.config import ClusterConfig, parse_config

FloatArray = npt.NDArray[np.float32]

NUM_RANKS = 2
NUM_LAYERS = 2
NUM_HEADS = 4
HEAD_SIZE = 8
HIDDEN_SIZE = NUM_HEADS * HEAD_SIZE
VOCABULARY_SIZE = 64
BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
CHUNK_TOKENS = 48
NUM_OUTPUT_TOKENS = 8
FORWARD_TIMEOUT_S = 20.0


def make_config() -> ClusterConfig:
    """Return the cluster's configuration. It could be a YAML file: see configs/."""
    return parse_config(
        {
            "name": "embedded-example",
            "model": {
                "name": "tiny-random",
                "max_model_len": MAX_MODEL_LEN,
                "dtype": "float32",
                "layers": [
                    {
                        "kind": "full",
                        "count": NUM_LAYERS,
                        "num_kv_heads": NUM_HEADS,
                        "head_size": HEAD_SIZE,
                    }
                ],
            },
            "cache": {"block_size": BLOCK_SIZE, "memory_per_rank": "1MiB"},
            "parallel": {"tensor_parallel_size": NUM_RANKS},
        }
    )


# --- the model


class Model:
    """The model without attention. Equal seeds give equal weights in every process."""

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random) / HIDDEN_SIZE**0.5

        self.embedding = weights(VOCABULARY_SIZE, HIDDEN_SIZE)
        self.positions = weights(MAX_MODEL_LEN, HIDDEN_SIZE)
        # Of each layer: hidden -> query, key, value of each head; and back, head by head.
        self.to_qkv = weights(NUM_LAYERS, 3, NUM_HEADS, HIDDEN_SIZE, HEAD_SIZE)
        self.to_hidden = weights(NUM_LAYERS, NUM_HEADS, HEAD_SIZE, HIDDEN_SIZE)
        self.to_logits = weights(VOCABULARY_SIZE, HIDDEN_SIZE)

    def embed(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Return the hidden states of tokens at positions from `start` on; `(n, hidden)`."""
        return self.embedding[list(token_ids)] + self.positions[start : start + len(token_ids)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the score of every word after the last of these hidden states."""
        return self.to_logits @ normalize(hidden[-1])


def normalize(hidden: torch.Tensor) -> torch.Tensor:
    """Scale every hidden state to the same length."""
    return torch.nn.functional.rms_norm(hidden, (HIDDEN_SIZE,))


def project(weights: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return query, key and value of these heads: `(3, n, heads, head_size)`."""
    return torch.einsum("kheq,ne->knhq", weights, normalize(hidden))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention of the last positions over all: `(n, heads, head_size)`.

    `query` is `(n, heads, head_size)`, `key` and `value` are `(m, heads, head_size)`, m >= n.
    """
    num_queries, num_keys = len(query), len(key)
    scores = torch.einsum("nhq,mhq->hnm", query, key) / HEAD_SIZE**0.5
    is_visible = torch.ones(num_queries, num_keys).tril(num_keys - num_queries).bool()
    shares = scores.masked_fill(~is_visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hnm,mhq->nhq", shares, value)


def generate_without_cache(model: Model, prompt: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """Return output and last scores, recomputing every token each time: no blocks, no ranks.

    The cached computation is compared with this one.
    """
    token_ids = list(prompt)
    logits = torch.empty(0)
    for _ in range(NUM_OUTPUT_TOKENS):
        hidden = model.embed(token_ids, start=0)
        for layer in range(NUM_LAYERS):
            query, key, value = project(model.to_qkv[layer], hidden)
            heads = attend(query, key, value)
            hidden = hidden + torch.einsum("nhq,hqe->ne", heads, model.to_hidden[layer])
        logits = model.logits(hidden)
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :], logits


# --- a rank


@dataclass(frozen=True)
class Row:
    """A forward's part of the request in `slot`: positions [start, end)."""

    slot: int
    start: int
    end: int


@ray.remote(num_cpus=0.1, concurrency_groups=WORKER_CONCURRENCY_GROUPS)
class Engine(WorkerMethods):
    """One rank of the model, and of the KV cache."""

    def __init__(self, config: ClusterConfig, place: int) -> None:
        torch.set_num_threads(1)
        self.kvcache = EmbeddedWorker(config, place, connect_peer)

    def load_weights(self) -> int:
        """Keep the weights of this rank's heads; return the rank.

        The launch decides which rank an actor is (by node and GPU), so this comes after it.
        """
        rank = self.kvcache.worker.settings.rank
        share = NUM_HEADS // NUM_RANKS
        model = Model()
        self._to_qkv = model.to_qkv[:, :, rank * share : (rank + 1) * share]
        self._to_hidden = model.to_hidden[:, rank * share : (rank + 1) * share]
        return rank

    def begin(self, epoch: int, seq: int, rows: Sequence[Row]) -> None:
        """Open the forward of a step; the tables then have its blocks."""
        self.kvcache.worker.begin_forward(epoch, seq, FORWARD_TIMEOUT_S)
        self._rows = rows

    def run_layer(self, layer: int, hidden: FloatArray) -> FloatArray:
        """Return this rank's part of a layer's output, `(n, hidden)`."""
        worker = self.kvcache.worker
        cache = worker.kv_caches[f"layers.{layer}"]
        table = worker.block_tables.tensor(0)  # full attention only: one KV cache group
        query, key, value = project(self._to_qkv[layer], torch.tensor(hidden))
        sizes = [row.end - row.start for row in self._rows]

        # First every row writes, then every row reads: a request may have hit blocks that
        # another row of the same step fills.
        new = zip(self._rows, key.split(sizes), value.split(sizes), strict=True)
        for row, row_key, row_value in new:
            blocks, offsets = locate(table[row.slot], row.start, row.end)
            cache[blocks, 0, offsets] = row_key
            cache[blocks, 1, offsets] = row_value

        heads = []
        for row, row_query in zip(self._rows, query.split(sizes), strict=True):
            blocks, offsets = locate(table[row.slot], 0, row.end)
            heads.append(attend(row_query, cache[blocks, 0, offsets], cache[blocks, 1, offsets]))
        part = torch.einsum("nhq,hqe->ne", torch.cat(heads), self._to_hidden[layer])
        return part.numpy()

    def end(self, epoch: int, seq: int) -> None:
        """Close the forward, and serve the coordinator's messages."""
        self.kvcache.worker.end_forward(epoch, seq)
        self.kvcache.poll()


def locate(table: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block id and offset in the block of the positions [start, end) of one request."""
    positions = torch.arange(start, end)
    return table[positions // BLOCK_SIZE].long(), positions % BLOCK_SIZE


# --- the driver


@dataclass
class Generation:
    """A request as the driver sees it.

    `token_ids` has prompt and output; the coordinator knows the first `num_told`, and the cache
    has `num_computed`. `logits`: the scores that chose the last token.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    slot: int = NO_SLOT
    num_hit: int = 0
    num_told: int = 0
    num_computed: int = 0
    logits: torch.Tensor | None = None

    @property
    def output(self) -> list[int]:
        """The tokens decoded so far."""
        return self.token_ids[self.num_prompt :]

    @property
    def is_done(self) -> bool:
        """Whether it has all its output."""
        return len(self.output) == NUM_OUTPUT_TOKENS

    @property
    def num_next(self) -> int:
        """How many tokens its next step computes: a chunk of the prompt, or one when decoding."""
        return min(CHUNK_TOKENS, len(self.token_ids) - self.num_computed)


class Driver:
    """Schedules steps, runs their forwards on all ranks, and decodes greedily."""

    def __init__(self, client: KVCacheClient, engines: Sequence[Any], model: Model) -> None:
        """Set up the driver; `engines` are in rank order."""
        self._client = client
        self._engines = engines
        self._model = model
        self._completed_step = NO_STEP
        self.num_computed_tokens = 0

    def generate(self, prompts: Mapping[str, Sequence[int]]) -> list[Generation]:
        """Run these prompts together until each has its output; return them."""
        everything = [Generation(name, list(p), len(p)) for name, p in prompts.items()]
        running: list[Generation] = []
        new = everything
        while new or running:
            rows, result = self._schedule(running, new)
            running, new = [*running, *new], []
            hidden = self._forward(running, rows, result.epoch, result.seq)
            self._completed_step = result.step  # every rank has written its bytes
            for request, part in zip(running, hidden, strict=True):
                self._sample(request, part)
            self._finish([request for request in running if request.is_done])
            running = [request for request in running if not request.is_done]
        return everything

    def _schedule(
        self, running: Sequence[Generation], new: Sequence[Generation]
    ) -> tuple[list[Row], StepResult]:
        """Request the next step; return each request's part of it, and the answer."""
        result = self._client.step(
            StepRequest(
                completed_step=self._completed_step,
                running=running_rows(running),
                new=tuple(
                    NewRequest(request.request_id, as_int32(request.token_ids), CHUNK_TOKENS)
                    for request in new
                ),
            )
        )
        is_room = not result.no_room and bool(result.running_scheduled.all())
        promise(is_room, "there is room: otherwise wait, or preempt a request")
        for index, request in enumerate(new):
            request.slot = int(result.admitted_slots[index])
            request.num_hit = request.num_computed = int(result.num_hit_tokens[index])
        granted = [
            *(request.num_next for request in running),
            *result.num_scheduled_tokens.tolist(),
        ]
        rows = []
        for request, num_tokens in zip([*running, *new], granted, strict=True):
            start, end = request.num_computed, request.num_computed + num_tokens
            rows.append(Row(request.slot, start, end))
            request.num_computed = end
            request.num_told = len(request.token_ids)
            self.num_computed_tokens += num_tokens
        return rows, result

    def _forward(
        self, requests: Sequence[Generation], rows: Sequence[Row], epoch: int, seq: int
    ) -> Sequence[torch.Tensor]:
        """Run the model for these rows on all ranks; return the last hidden states of each row.

        Hidden states travel as numpy arrays, which Ray carries well. (A real engine adds up with
        an all-reduce between its ranks instead of going through its driver.)
        """
        self._ask_all("begin", epoch, seq, rows)
        embedded = [
            self._model.embed(request.token_ids[row.start : row.end], row.start)
            for request, row in zip(requests, rows, strict=True)
        ]
        hidden = torch.cat(embedded)
        for layer in range(NUM_LAYERS):
            parts = self._ask_all("run_layer", layer, hidden.numpy())
            hidden = hidden + torch.from_numpy(np.sum(parts, axis=0))
        self._ask_all("end", epoch, seq)
        return hidden.split([row.end - row.start for row in rows])

    def _sample(self, request: Generation, hidden: torch.Tensor) -> None:
        """Append the likeliest token, if all tokens are computed."""
        if request.num_computed == len(request.token_ids):
            request.logits = self._model.logits(hidden)
            request.token_ids.append(int(request.logits.argmax()))

    def _finish(self, done: Sequence[Generation]) -> None:
        """Free requests: their blocks stay cached until others need them.

        Such a step computes nothing, so it needs no forward and is complete at once. (The
        next step could also do this, as in 02_ray_cluster.py.)
        """
        if done:
            names = tuple(request.request_id for request in done)
            result = self._client.step(
                StepRequest(completed_step=self._completed_step, finished=names)
            )
            self._completed_step = result.step

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank at once; return the answers in order of ranks."""
        calls = [getattr(engine, method).remote(*arguments) for engine in self._engines]
        return list(ray.get(calls, timeout=2 * FORWARD_TIMEOUT_S))


def running_rows(running: Sequence[Generation]) -> RunningRequests:
    """Return the rows of a step: one per running request."""
    return RunningRequests.from_rows(
        [
            RunningRow(request.slot, request.num_next, tuple(request.token_ids[request.num_told :]))
            for request in running
        ]
    )


def as_int32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return `values` as an int32 array, as steps need them."""
    return np.array(values, dtype=np.int32)


# --- the demonstration


def main() -> None:
    ray.init(include_dashboard=False, log_to_driver=False)
    config = make_config()
    engines = [Engine.remote(config, place) for place in range(NUM_RANKS)]
    with KVCacheCluster.launch(config, worker_actors=engines) as cluster:
        ranked = cluster.workers  # your actors, in order of ranks
        ranks = ray.get([engine.load_weights.remote() for engine in ranked])
        promise(ranks == [0, 1], "every actor knows its rank")
        print(
            f"{NUM_RANKS} actors hold {NUM_HEADS // NUM_RANKS} of {NUM_HEADS} heads each, ", end=""
        )
        print(f"and {cluster.status().num_blocks} blocks of {BLOCK_SIZE} tokens")
        with cluster.client() as client:
            compare(Driver(client, ranked, Model()))

    # Stopping the cluster closed the workers inside the actors. The actors are yours: they live on
    # until you end them.
    ray.shutdown()
    print("\nAll as promised.")


def compare(driver: Driver) -> None:
    """Run conversations with the cache, and compare each with its output without one."""
    random = np.random.default_rng(seed=1)
    system, *questions = (random.integers(VOCABULARY_SIZE, size=n).tolist() for n in (70, 9, 6, 12))

    print("\nTwo conversations with the same 70 tokens before their questions start together:")
    first = driver.generate({"ann": system + questions[0], "bob": system + questions[1]})
    report(first)
    ann, bob = first
    promise((ann.num_hit, bob.num_hit) == (0, 48), "the second finds what the first is computing")
    print("  Ann's first chunk is 48 tokens. Bob found them while she computed them: in a forward")
    print("  every row writes its keys and values before any row reads.")

    print("\nAnn asks on, and Cid starts with the same 70 tokens:")
    second = driver.generate({"ann-2": ann.token_ids + questions[2], "cid": system + questions[2]})
    report(second)
    promise([r.num_hit for r in second] == [80, 64], "all full blocks that were computed are found")

    total = sum(request.num_computed for request in [*first, *second])
    print(f"\nOf {total} tokens {driver.num_computed_tokens} were computed, the others found.")
    promise(driver.num_computed_tokens == total - 48 - 80 - 64, "found tokens are not computed")


def report(requests: Sequence[Generation]) -> None:
    """Print the output, and compare it with the same model without a cache."""
    model = Model()
    for request in requests:
        expected, logits = generate_without_cache(model, request.token_ids[: request.num_prompt])
        print(
            f"  {request.request_id}: {request.num_hit} of {request.num_prompt} prompt tokens ",
            end="",
        )
        print(f"found; output {request.output}")
        promise(request.output == expected, f"without the cache it is the same, not {expected}")
        promise(request.logits is not None, "something was sampled")
        if request.logits is not None:
            difference = float((request.logits - logits).abs().max())
            print(
                f"    without cache: the same; scores differ by at most {difference:.0e} (rounding)"
            )
            promise(difference < 1e-4, "scores differ by rounding only")


def promise(holds: bool, what: str) -> None:
    """End the example with exit status 1 unless the promise `what` holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")


if __name__ == "__main__":
    main()
