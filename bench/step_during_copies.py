"""A worker in its own process, one step after the other, with and without transfers.

A step is timed as a coordinator sees it: from sending the message to receiving the acknowledgement,
with the worker's forward in between. Messages go over a socket, because a worker that waits for one
has to get Python's lock back from the copying thread.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.base.clock import SystemClock
from kvcache.protocol.commands import BlockTablePatch, Command, Load, Store
from kvcache.protocol.messages import Ack, Finished, FinishedAck, Grant, Message, StepCommands
from kvcache.protocol.wire import decode, encode
from kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

NUM_ROWS = 16
NUM_LAYERS = 4
JOB_BLOCKS_BYTES = 8 << 20
"""Most bytes of one store or load."""

PAUSE_S = 0.001
"""Pause between two steps, as for a forward on a device: the worker's own thread is idle."""

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 24
INCARNATION = "bench"


class OtherCopies:
    """An unrelated process that copies all the time. It slows steps down only through the memory
    and the processors. A context manager."""

    def __enter__(self) -> OtherCopies:
        context = multiprocessing.get_context("spawn")
        started = context.Event()
        self._process = context.Process(target=_copy_for_ever, args=(started,), daemon=True)
        self._process.start()
        started.wait(60)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()


def _copy_for_ever(started: Event) -> None:
    sources = np.ones(JOB_BLOCKS_BYTES * 4, np.uint8)
    destinations = np.zeros_like(sources)
    started.set()
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        np.copyto(destinations, sources)


def make_config(block_bytes: int, num_blocks: int) -> KVCacheConfig:
    """Return `num_blocks` blocks on the device and as many slots in host memory."""
    page = block_bytes // NUM_LAYERS
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=page // 64, dtype="float16")
    names = tuple(f"layer.{i}" for i in range(NUM_LAYERS))
    tensors = tuple(
        KVCacheTensor(
            size=num_blocks * page,
            shared_by=(name,),
            offset=i * page,
            block_stride=block_bytes,
            layer_stride=page,
        )
        for i, name in enumerate(names)
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=(KVCacheGroupSpec(names, spec),),
        host_blocks=num_blocks,
        layout="block_first",
    )


class Wire:
    """Whole messages over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        payload = encode(message)
        self._socket.sendall(len(payload).to_bytes(HEADER_BYTES, "little") + payload)

    def receive(self) -> Message | None:
        """Return the next message, None when the other end is gone."""
        header = self._read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return None
        return decode(self._read(int.from_bytes(header, "little")), MAX_MESSAGE_BYTES)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self._socket.recv(size - len(data))):
            data += more
        return data


def serve(connection: socket.socket, config: KVCacheConfig) -> None:
    """Be the worker, until the other end is gone. Steps' forwards are begun and ended at once."""
    import torch

    from kvcache.worker import KVCacheWorker, WorkerSettings

    torch.set_num_threads(1)
    settings = WorkerSettings(
        rank=0,
        kv_cache_config=config,
        fingerprint="plan",
        layout_fingerprint="layout",
        incarnation=INCARNATION,
        max_num_seqs=NUM_ROWS,
        max_model_len=1024,
    )
    reading, writing = os.pipe()

    def on_news() -> None:
        os.write(writing, b"0")

    worker = KVCacheWorker(settings, clock=SystemClock(), on_news=on_news)
    wire = Wire(connection)
    while True:
        ready, _, _ = select.select([wire, reading], [], [])
        replies: list[Message] = []
        if reading in ready:
            os.read(reading, 4096)
            replies += worker.on_tick()
        if wire in ready:
            message = wire.receive()
            if message is None:
                break
            replies += worker.on_message(message)
            if isinstance(message, StepCommands) and message.client_id:
                worker.begin_forward(message.epoch, message.seq, timeout_s=60.0)
                worker.end_forward(message.epoch, message.seq)
        for reply in replies:
            wire.send(reply)
    worker.close()


class StepDuringCopies:
    """The coordinator's end. A context manager."""

    def __init__(self, block_bytes: int, pool_bytes: int) -> None:
        self._num_blocks = max(NUM_ROWS * 4, pool_bytes // block_bytes)
        self._job_blocks = max(1, min(JOB_BLOCKS_BYTES // block_bytes, self._num_blocks // 5))
        self._config = make_config(block_bytes, self._num_blocks)
        self._seq = self._job = self._num_stores = 0
        self._open_jobs: set[int] = set()
        self.moved_bytes = 0

    def __enter__(self) -> StepDuringCopies:
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve, args=(theirs, self._config), daemon=True)
        self._process.start()
        theirs.close()
        self._wire = Wire(ours)
        self._wire.send(Grant("bench", INCARNATION, 1, "plan"))
        self._wire.receive()
        self._send("", self._job_command(is_store=True))  # what loads read
        self._settle()
        return self

    def __exit__(self, *exception: object) -> None:
        self._wire.close()
        self._process.join(timeout=60)

    def steps(
        self, count: int, *, copies_every: int = 0, pause_s: float = PAUSE_S, is_busy: bool = False
    ) -> list[float]:
        """Return how long steps took, in seconds, with a pause before each.

        Before every so many of them a store and a load are started, unless two are under way; 0:
        never. `is_busy`: there are always two, also in the pauses.
        """
        took: list[float] = []
        for number in range(count):
            if copies_every > 0 and number % copies_every == 0:
                self._start_copies()
            # Blocks that no job uses: a forward would wait for those that are being loaded.
            block_ids = int32_array([self._num_blocks - 1 - number % NUM_ROWS] * NUM_ROWS)
            rows = int32_array(range(NUM_ROWS))
            patch = BlockTablePatch(rows, rows * 0, rows * 0, rows * 0 + 1, block_ids)
            self._pause(pause_s, is_busy=is_busy)
            start_s = time.perf_counter()
            self._await(self._send("bench", patch))
            took.append(time.perf_counter() - start_s)
        self._settle()
        return took

    def _start_copies(self) -> None:
        """Start a load and a store unless two copies are under way."""
        if len(self._open_jobs) < 2:
            commands = [self._job_command(is_store=bool(i)) for i in range(2)]
            self._await(self._send("", *commands))

    def _pause(self, pause_s: float, *, is_busy: bool) -> None:
        """Let time go by; start copies whenever some have ended, if it `is_busy`."""
        end_s = time.perf_counter() + pause_s
        if not is_busy:
            time.sleep(pause_s)
        while (left_s := end_s - time.perf_counter()) > 0:
            self._start_copies()
            if select.select([self._wire], [], [], left_s)[0]:
                self._take(self._wire.receive())

    def _job_command(self, *, is_store: bool) -> Command:
        """Load from the first slots into the first blocks, or store the next blocks to unused
        slots: there are never three stores under way."""
        self._job += 1
        self._open_jobs.add(self._job)
        size = self._job_blocks
        loaded = int32_array(range(1, 1 + size))
        stored = loaded + size
        if not is_store:
            return Load(self._job, "host", loaded, loaded)
        self._num_stores += 1
        slots = loaded if self._num_stores == 1 else stored + size * (self._num_stores % 3)
        return Store(self._job, "host", stored, int32_array(slots))

    def _send(self, client_id: str, *commands: Command) -> int:
        self._seq += 1
        step = self._seq if client_id else 0
        self._wire.send(StepCommands("bench", "plan", 1, self._seq, client_id, step, commands))
        return self._seq

    def _await(self, seq: int) -> None:
        """Wait for the acknowledgement of a message; take reports on the way."""
        while True:
            reply = self._wire.receive()
            self._take(reply)
            if isinstance(reply, Ack) and reply.seq >= seq:
                return

    def _settle(self) -> None:
        """Wait for all jobs."""
        while self._open_jobs:
            self._take(self._wire.receive())

    def _take(self, reply: Message | None) -> None:
        if reply is None:
            raise RuntimeError("the worker has died: see its message above")
        if isinstance(reply, Finished):
            self._finish([job.job_id for job in reply.jobs])
            for job in reply.jobs:
                if not job.ok:
                    raise RuntimeError(f"a transfer failed: {job.detail}")
                self.moved_bytes += job.num_bytes

    def _finish(self, job_ids: Sequence[int]) -> None:
        self._open_jobs.difference_update(job_ids)
        self._wire.send(FinishedAck("bench", 1, tuple(job_ids)))
