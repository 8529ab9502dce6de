"""A simple model of every attention kind's block tables, with random forwards.

Replaces a manager: a list per slot and group, and a list of free blocks. Content checking must find
the deliberate mistakes (`Mistakes`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvcache.protocol.commands import BlockTablePatch
from kvcache.protocol.messages import JobReport
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from tests.worker.worker_support import Harness, Row, make_config, patch, write_expected

MAX_LEN = 48
NUM_SLOTS = 4
NUM_DRAFTS = 2
MAX_ENCODER_TOKENS = 10

FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)
MLA = MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=8)
WINDOW = SlidingWindowSpec(block_size=2, num_kv_heads=4, head_size=4, sliding_window=5)
CHUNK = ChunkedLocalAttentionSpec(block_size=4, num_kv_heads=2, head_size=4, attention_chunk_size=8)
CROSS = CrossAttentionSpec(
    block_size=4, num_kv_heads=2, head_size=4, max_encoder_tokens=MAX_ENCODER_TOKENS
)
ALIGN = MambaSpec(
    block_size=8,
    shapes=((3, 5), (2, 2, 2)),
    dtypes=("float16", "float32"),
    mamba_cache_mode="align",
    num_speculative_blocks=NUM_DRAFTS,
    page_size_padded=128,
)
NONE = MambaSpec(
    block_size=16,
    shapes=((16,), (7,)),
    dtypes=("float32", "bfloat16"),
    num_speculative_blocks=NUM_DRAFTS,
    page_size_padded=128,
)

KINDS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FULL,),
    "mla": (MLA,),
    "window": (WINDOW,),
    "chunk": (CHUNK,),
    "cross": (FULL, CROSS),
    "align": (ALIGN,),
    "none": (NONE,),
    "full, window, chunk": (FULL, WINDOW, CHUNK),
    "full, chunk, align": (FULL, CHUNK, ALIGN),
    "mla, window, align": (MLA, WINDOW, ALIGN),
    "full, cross, none": (FULL, CROSS, NONE),
}


Span: TypeAlias = tuple[int, int, int]
"""The start of a row, the end of its own tokens, and the end of its drafts."""


@dataclass(frozen=True)
class Mistakes:
    """Possible mistakes of a manager, in columns and tokens; 0 is correct."""

    state_column: int = 0
    chunk_tokens: int = 0
    encoder_tokens: int = 0


@dataclass
class Running:
    """A request in a slot. `own_end` and `num_drafts` are those of its last forward."""

    request_id: str
    tokens: list[int]
    computed: int = 0
    own_end: int = 0
    num_drafts: int = 0
    num_encoder: int = 0
    tables: list[list[int]] = field(default_factory=list)


class RandomForwards:
    """Random requests on one worker, by tables of `specs`."""

    def __init__(
        self, seed: int, specs: Sequence[KVCacheSpec], mistakes: Mistakes, device: str
    ) -> None:
        self.rng = random.Random(seed)
        self.specs = specs
        self.mistakes = mistakes
        groups = tuple(
            KVCacheGroupSpec((f"{spec.kind}.{i}.a", f"{spec.kind}.{i}.b"), spec)
            for i, spec in enumerate(specs)
        )
        self.harness = Harness.make(
            make_config(groups, num_blocks=400),
            is_content_checking=True,
            max_model_len=MAX_LEN,
            max_num_seqs=NUM_SLOTS,
            device=device,
        )
        self.free = list(range(1, 400))
        self.running: dict[int, Running] = {}
        self.jobs = 0

    def step(self) -> JobReport:
        """End some requests, run some and admit some; return the forward's report."""
        rng = self.rng
        rows: list[Row] = []
        patches: list[BlockTablePatch] = []
        verify: list[tuple[int, int]] = []
        gone: list[int] = []
        for slot in list(self.running):
            request = self.running[slot]
            if rng.random() < 0.08 or request.computed >= MAX_LEN - 8:
                verify.append((slot, request.computed))
                gone += [b for table in self.running.pop(slot).tables for b in table if b]
            elif rng.random() < 0.9:
                rows.append(self._run_on(slot, request, patches))
        for slot in range(NUM_SLOTS):
            if slot not in self.running and rng.random() < 0.6:
                rows.append(self._admit(slot, patches))
        self.free += gone  # only now: the old tables were verified first
        rng.shuffle(self.free)
        rng.shuffle(rows)
        self.jobs += 1
        return self.harness.run(*patches, write_expected(self.jobs, rows, verify))

    def _admit(self, slot: int, patches: list[BlockTablePatch]) -> Row:
        rng = self.rng
        self.jobs += 1
        tokens = [rng.randrange(100) for _ in range(rng.randint(1, 30))]
        request = Running(f"r{self.jobs}", tokens, tables=[[] for _ in self.specs])
        if any(spec.keeps_encoder_tokens for spec in self.specs):
            request.num_encoder = rng.randint(0, MAX_ENCODER_TOKENS)
        self.running[slot] = request
        external = rng.choice((0, 0, rng.randrange(len(tokens))))
        end = rng.randint(external + 1, len(tokens))
        self._reserve(slot, request, (external, end, end), patches)
        request.computed = request.own_end = end
        return Row(
            slot,
            tokens[:end],
            0,
            end,
            key=b"salt",
            external=external,
            encoder=request.num_encoder,
            encoder_key=request.request_id.encode() if request.num_encoder else b"",
        )

    def _run_on(self, slot: int, request: Running, patches: list[BlockTablePatch]) -> Row:
        rng = self.rng
        accepted = rng.randint(0, request.num_drafts)
        request.computed = request.own_end + accepted
        # Accepted drafts become the request's own tokens, rejected ones never were.
        del request.tokens[max(request.computed, self._num_own(request)) :]
        if request.computed == len(request.tokens):
            request.tokens.append(rng.randrange(100))
        start = request.computed
        own_end = rng.randint(start + 1, min(len(request.tokens), start + 12))
        drafts = 0
        if own_end == len(request.tokens):
            drafts = rng.choice((0, 0, 1, NUM_DRAFTS))
            request.tokens += [rng.randrange(100) for _ in range(drafts)]
        self._free_skipped(request, start)
        self._reserve(slot, request, (start, own_end, own_end + drafts), patches)
        told = rng.randint(max(0, start - 2), start)
        request.own_end, request.num_drafts = own_end, drafts
        request.computed = own_end + drafts
        return Row(
            slot,
            request.tokens[told : own_end + drafts],
            start,
            own_end + drafts - start,
            is_new=False,
            token_start=told,
            drafts=drafts,
        )

    def _num_own(self, request: Running) -> int:
        return len(request.tokens) - request.num_drafts

    def _free_skipped(self, request: Running, computed: int) -> None:
        for spec, table in zip(self.specs, request.tables, strict=True):
            wrong = self.mistakes.chunk_tokens if spec.kind == "chunked_local" else 0
            for column in range(spec.num_skipped_tokens(computed + wrong) // spec.block_size):
                if column < len(table) and table[column]:
                    self.free.append(table[column])
                    table[column] = 0

    def _reserve(
        self, slot: int, request: Running, span: Span, patches: list[BlockTablePatch]
    ) -> None:
        for group, spec in enumerate(self.specs):
            table = request.tables[group]
            total, kept = self._columns(spec, request, span)
            new = [self.free.pop() if c in kept else 0 for c in range(len(table), total)]
            if new:
                patches.append(patch(slot, new, group=group, first=len(table)))
                table += new

    def _columns(
        self, spec: KVCacheSpec, request: Running, span: Span
    ) -> tuple[int, range | set[int]]:
        """Return the length of a table, and which of its columns need a block."""
        size, (start, own_end, end) = spec.block_size, span
        if spec.keeps_encoder_tokens:
            length = -(-request.num_encoder // size)
            return length, range(length - self.mistakes.encoder_tokens)
        if spec.num_state_blocks is None:
            first = spec.num_skipped_tokens(start) // size
            return -(-end // size), range(first, MAX_LEN)
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none":
            return 1 + NUM_DRAFTS - self.mistakes.state_column, range(1 + NUM_DRAFTS)
        total = -(-end // size) + NUM_DRAFTS
        written = (own_end - 1) // size + self.mistakes.state_column
        read = {(start - 1) // size} if start else set()
        return total, read | set(range(written, total))


def play(
    seed: int,
    specs: Sequence[KVCacheSpec],
    mistakes: Mistakes,
    num_steps: int,
    device: str = "cpu",
) -> str:
    """Return the error of the first failed forward, or nothing."""
    forwards = RandomForwards(seed, specs, mistakes, device)
    for _ in range(num_steps):
        report = forwards.step()
        if not report.ok:
            return report.detail
    compared = forwards.harness.worker.statistics().num_bytes_compared
    return "" if compared else "nothing was compared"
