"""Step 3: the tensors belong to a worker, and the manager's decisions reach it as commands.

In step 2 the loop read the manager's block tables. A worker has its own tables, which only commands
change, inside `begin_forward` of their step. So manager and worker may be different processes. A
worker also copies: two samples of a prompt share its blocks until one writes into the last one.

    .venv/bin/python examples/engine/guide/03_worker.py
"""

from __future__ import annotations

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

from kvcache import (
    FullAttentionSpec,
    KVCacheManager,
    PlanOptions,
    Request,
    SystemClock,
    get_kv_cache_config,
)
from kvcache.protocol.commands import Copy
from kvcache.protocol.messages import Grant, StepCommands
from kvcache.worker import KVCacheWorker, WorkerSettings

BLOCK_SIZE = 4
NUM_NEW = 6
MAX_REQUESTS = 4


class Engine:
    """Manager and worker in one process; messages as a coordinator would send them."""

    def __init__(self) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype="float64"
        )
        specs = {f"layers.{layer}": spec for layer in range(NUM_LAYERS)}
        config = get_kv_cache_config(PlanOptions(MAX_TOKENS), specs, 1 << 20)
        self.manager = KVCacheManager(
            config, MAX_TOKENS, max_num_seqs=MAX_REQUESTS, has_workers=True
        )
        settings = WorkerSettings(0, config, "plan", "layout", "process", MAX_REQUESTS, MAX_TOKENS)
        self._worker = KVCacheWorker(settings, clock=SystemClock())
        self._worker.on_message(Grant("nonce", "process", 1, "plan"))
        self._model = TinyModel()
        self._seq = 0

    def compute(self, request: Request) -> None:
        """Compute the rest of a request, and append the next token."""
        start = request.num_computed_tokens
        given = self.manager.allocate_slots(request, request.num_tokens - start)
        promise(given is not None, "there is room")
        self._seq += 1
        commands = tuple(self.manager.take_commands())
        for command in commands:
            if isinstance(command, Copy):
                what = f"{command.sources.tolist()} to {command.destinations.tolist()}"
                print(f"  before {request.request_id} writes: copy block {what}")
        self._worker.on_message(StepCommands("nonce", "plan", 1, self._seq, "", 0, commands))

        self._worker.begin_forward(1, self._seq, timeout_s=10.0)  # applies tables and copies
        slot = self.manager.slot_of(request.request_id)
        table = self._worker.block_tables.tensor(0)[slot].long()
        positions = torch.arange(request.num_tokens)
        blocks, offsets = table[positions // BLOCK_SIZE], positions % BLOCK_SIZE

        def attention(layer: int, query: torch.Tensor, *new: torch.Tensor) -> torch.Tensor:
            pages = self._worker.kv_caches[f"layers.{layer}"]  # (block, k/v, offset, head, size)
            for part, states in enumerate(new):
                pages[blocks[start:], part, offsets[start:]] = states
            return attend(query, pages[blocks, 0, offsets], pages[blocks, 1, offsets])

        token = self._model.run(request.all_token_ids[start:].tolist(), start, attention)
        self._worker.end_forward(1, self._seq)
        request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids([token])


def main() -> None:
    engine, prompt = Engine(), list(range(10, 24))
    parent = Request("parent", prompt)
    engine.compute(parent)

    child = Request("child", [*prompt, 63])  # another sample: its first token is not the likeliest
    engine.manager.fork(parent, child)
    tables = [engine.manager.get_block_ids(name)[0] for name in ("parent", "child")]
    print(f"forked: parent {tables[0]}, child {tables[1]}")
    promise(tables[0] == tables[1], "they share every block")

    for _ in range(NUM_NEW - 1):
        engine.compute(child)
        engine.compute(parent)
    for request, beginning in ((parent, prompt), (child, [*prompt, 63])):
        output = request.all_token_ids[len(beginning) :].tolist()
        table = engine.manager.get_block_ids(request.request_id)[0]
        print(f"{request.request_id}: blocks {table}, output {output}")
        expected = generate_from_scratch(TinyModel(), beginning, len(output))
        promise(output == expected, "the tokens are the same")
        engine.manager.free(request)


if __name__ == "__main__":
    main()
