"""Plans, workers and messages for the tests of the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.clock import VirtualClock
from kvcache.protocol.commands import BlockTablePatch, Command, Label, WriteExpected
from kvcache.protocol.messages import Finished, Grant, JobReport, Message, StepCommands
from kvcache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    Layout,
    SlidingWindowSpec,
)
from kvcache.worker import CopyEngine, KVCacheWorker, WorkerSettings

FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4, dtype="float16")
WINDOW = SlidingWindowSpec(
    block_size=4, num_kv_heads=2, head_size=4, dtype="float16", sliding_window=6
)


def full_groups(num_layers: int = 2) -> tuple[KVCacheGroupSpec, ...]:
    return (KVCacheGroupSpec(tuple(f"layer.{i}" for i in range(num_layers)), FULL),)


def hybrid_groups() -> tuple[KVCacheGroupSpec, ...]:
    """Two pools, each shared by a full and a window layer; the window's blocks are half as long,
    with twice as many heads, so that pages have equal sizes."""
    window = replace(WINDOW, block_size=2, num_kv_heads=4)
    return (
        KVCacheGroupSpec(("full.0", "full.1"), FULL),
        KVCacheGroupSpec(("window.0", "window.1"), window),
    )


def make_config(
    groups: tuple[KVCacheGroupSpec, ...],
    num_blocks: int = 16,
    layout: Layout = "block_first",
    host_blocks: int = 0,
) -> KVCacheConfig:
    """Lay the groups' layers out by hand, pool `i` shared by layer `i` of each group."""
    page = max(group.kv_cache_spec.page_size_bytes for group in groups)
    num_pools = max(len(group.layer_names) for group in groups)
    tensors = tuple(
        KVCacheTensor(
            size=num_blocks * page,
            shared_by=tuple(g.layer_names[i] for g in groups if i < len(g.layer_names)),
            offset=i * page if layout == "block_first" else i * num_blocks * page,
            block_stride=num_pools * page if layout == "block_first" else page,
            layer_stride=page if layout == "block_first" else num_blocks * page,
        )
        for i in range(num_pools)
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        host_blocks=host_blocks,
        layout=layout,
    )


def make_settings(config: KVCacheConfig, **changes: Any) -> WorkerSettings:
    settings = WorkerSettings(
        rank=0,
        kv_cache_config=config,
        fingerprint="plan",
        layout_fingerprint="layout",
        incarnation="process-a",
        max_num_seqs=4,
        max_model_len=32,
        digest_bytes=4,
    )
    return replace(settings, **changes)


def ids(*values: int) -> Int32Array:
    return int32_array(values)


def patch(slot: int, blocks: Sequence[int], group: int = 0, first: int = 0) -> BlockTablePatch:
    return BlockTablePatch(ids(slot), ids(group), ids(first), ids(len(blocks)), int32_array(blocks))


def label(block_id: int, digest: bytes = b"abcd") -> Label:
    return Label(
        block_ids=ids(block_id),
        groups=ids(0),
        slots=ids(0),
        digests=digest,
        parent_digests=b"none",
        token_counts=ids(4),
        token_ids=ids(1, 2, 3, 4),
        namespaces=ids(0),
        namespace_names=(b"",),
    )


@dataclass(frozen=True)
class Row:
    """One row of a content-checked forward."""

    slot: int
    tokens: Sequence[int]
    start: int
    count: int
    is_new: bool = True
    token_start: int = 0
    key: bytes = b""
    external: int = 0
    drafts: int = 0
    encoder: int = 0
    encoder_key: bytes = b""


def write_expected(
    job_id: int, rows: Sequence[Row] = (), verify: Sequence[tuple[int, int]] = ()
) -> WriteExpected:
    return WriteExpected(
        job_id=job_id,
        verify_slots=int32_array([slot for slot, _ in verify]),
        verify_lengths=int32_array([length for _, length in verify]),
        slots=int32_array([row.slot for row in rows]),
        is_new=int32_array([int(row.is_new) for row in rows]),
        starts=int32_array([row.start for row in rows]),
        counts=int32_array([row.count for row in rows]),
        token_starts=int32_array([row.token_start for row in rows]),
        token_counts=int32_array([len(row.tokens) for row in rows]),
        token_ids=int32_array([t for row in rows for t in row.tokens]) if rows else EMPTY_INT32,
        content_keys=tuple(row.key for row in rows),
        external_counts=int32_array([row.external for row in rows]),
        draft_counts=int32_array([row.drafts for row in rows]),
        encoder_counts=int32_array([row.encoder for row in rows]),
        encoder_keys=tuple(row.encoder_key for row in rows),
    )


@dataclass
class Harness:
    """A worker, with a coordinator's part: grants, and commands in order."""

    worker: KVCacheWorker
    clock: VirtualClock
    nonce: str = "coordinator-1"
    epoch: int = 1
    seq: int = 0
    reports: dict[int, JobReport] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        config: KVCacheConfig | None = None,
        *,
        is_granted: bool = True,
        copy_engine: CopyEngine | None = None,
        poll: Callable[[float], None] | None = None,
        **changes: Any,
    ) -> Harness:
        clock = VirtualClock()
        settings = make_settings(config or make_config(full_groups()), **changes)
        worker = KVCacheWorker(settings, clock=clock, copy_engine=copy_engine, poll=poll)
        harness = cls(worker, clock)
        if is_granted:
            harness.grant()
        return harness

    def grant(self) -> list[Message]:
        return self.worker.on_message(
            Grant(self.nonce, self.worker.settings.incarnation, self.epoch, "plan")
        )

    def message(self, *commands: Command, seq: int, client_id: str = "engine") -> StepCommands:
        return StepCommands(self.nonce, "plan", self.epoch, seq, client_id, seq, commands)

    def send(self, *commands: Command, client_id: str = "engine") -> list[Message]:
        """Send the next number; return and remember the answer."""
        self.seq += 1
        return self.note(
            self.worker.on_message(self.message(*commands, seq=self.seq, client_id=client_id))
        )

    def note(self, replies: list[Message]) -> list[Message]:
        for reply in replies:
            if isinstance(reply, Finished):
                self.reports.update({job.job_id: job for job in reply.jobs})
        return replies

    def run(self, *commands: Command) -> JobReport:
        """Send a content-checked step, run its forward, return its report."""
        self.send(*commands)
        self.note(self.worker.run_due_forwards())
        job = next(c.job_id for c in commands if isinstance(c, WriteExpected))
        return self.reports[job]

    def forward(self, timeout_s: float = 0.0) -> None:
        """Begin and end the forward of the last message."""
        self.worker.begin_forward(self.epoch, self.seq, timeout_s)
        self.worker.end_forward(self.epoch, self.seq)


def block_bytes(worker: KVCacheWorker, block_id: int) -> bytes:
    """All bytes of one block, layer by layer, as a model runner would read them."""
    tensors: dict[str, tuple[torch.Tensor, ...]] = dict(worker.state_caches)
    tensors |= {name: (tensor,) for name, tensor in worker.kv_caches.items()}
    return b"".join(
        tensor[block_id].contiguous().view(torch.uint8).numpy().tobytes()
        for name in sorted(tensors)
        for tensor in tensors[name]
    )


def fill_block(worker: KVCacheWorker, block_id: int, value: float) -> None:
    for tensor in worker.kv_caches.values():
        tensor[block_id].fill_(value)


def random_bytes(rng: np.random.Generator, rows: int, width: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, (rows, width), dtype=np.uint8))
