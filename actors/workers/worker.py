"""The worker actor, and the actor methods that make any actor a worker.

    launcher     ──kvcache_report, kvcache_allocate──▶ worker
    coordinator  ──kvcache_attach, kvcache_watch─────▶ worker ──socket──▶ coordinator

`WorkerActor` only keeps its rank's cache, and serves it from a thread. An engine's own actor
becomes a worker by inheriting `WorkerMethods` and polling. Every method forwards to
`EmbeddedWorker`. Each process with a handle of such an actor imports this module, so it imports
torch only when a worker is made: otherwise a restarted coordinator would need a second or two more.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from actors.connect import connect_peer, this_node
from actors.loop import ServiceLoop, calm_garbage_collector, end_this_process
from actors.metrics_export import MetricsReporter
from actors.names import OUR_LOGGERS
from actors.reports import ProcessStatistics, WorkerReport
from actors.transport import Endpoint
from kvcache.base.arguments import as_int
from kvcache.base.errors import RequestError, shown
from kvcache.base.logs import log_to_stderr
from kvcache.config import ClusterConfig
from kvcache.metrics import RankTraffic, Sample, worker_samples
from kvcache.planner import Plan
from kvcache.protocol.labels import LabelSet

if TYPE_CHECKING:
    from actors.workers.embedding import EmbeddedWorker
    from kvcache.worker.statistics import WorkerStatistics

CONTROL = "kvcache_control"
MAIL = "kvcache_mail"
SENTINEL = "kvcache_sentinel"

WORKER_CONCURRENCY_GROUPS = {CONTROL: 1, MAIL: 1, SENTINEL: 2}
"""What an actor with `WorkerMethods` passes to `ray.remote(concurrency_groups=...)`.

Control calls must not queue behind the engine's own calls. A sentinel call lasts as long as its
epoch, and two of them overlap when the epoch changes.
"""


LONGEST_WAIT_S = 1.0
"""Longest wait of one poll; ticks and wake-ups end it earlier."""

CLOSE_TIMEOUT_S = 2.0


class WorkerMethods:
    """Makes an actor a worker of a cluster. Set `self.kvcache` before the launch:

        @ray.remote(concurrency_groups=WORKER_CONCURRENCY_GROUPS)
        class Engine(WorkerMethods):
            def __init__(self, config, place):
                self.kvcache = EmbeddedWorker(config, place, connect_peer)

    Then pass the handles, in order of places, to
    `KVCacheCluster.launch(config, worker_actors=...)`.
    """

    kvcache: EmbeddedWorker

    @ray.method(concurrency_group=CONTROL)
    def kvcache_report(self, num_sharing: int) -> WorkerReport:
        """Return this rank's layers, its memory, and its node."""
        gpu_ids = [str(gpu) for gpu in ray.get_gpu_ids()]
        return self.kvcache.report(this_node(), gpu_ids, num_sharing)

    @ray.method(concurrency_group=CONTROL)
    def kvcache_allocate(self, rank: int, plan: Plan) -> str:
        """Allocate this rank's part of `plan`; return its fingerprint, recomputed."""
        return self.kvcache.allocate(rank, plan)

    @ray.method(concurrency_group=CONTROL)
    def kvcache_attach(self, endpoint: Endpoint) -> None:
        """Connect to the coordinator at `endpoint`."""
        self.kvcache.attach(endpoint)
        self.kvcache.poll_until_granted()
        report_worker(self.kvcache)

    @ray.method(concurrency_group=CONTROL)
    def kvcache_allocate_again(self, rank: int, plan: Plan) -> str:
        """As `kvcache_allocate`, but for a replacement: if its directory is unusable, the rank
        serves without files."""
        self.kvcache.must_have_files = False
        allocate: Any = self.kvcache_allocate  # a plain method here
        fingerprint: str = allocate(rank, plan)
        return fingerprint

    @ray.method(concurrency_group=CONTROL)
    def kvcache_assignment(self) -> tuple[int, Plan, WorkerReport]:
        """Return the allocated rank and plan, and the report made before, for a restarted
        coordinator. Raises NotRunningError before `kvcache_allocate`."""
        return self.kvcache.assignment()

    @ray.method(concurrency_group=MAIL)
    def kvcache_deliver(self, payload: bytes) -> None:
        """Take a message that arrives as an actor call (fallback transport)."""
        self.kvcache.mailbox.put(payload)

    @ray.method(concurrency_group=CONTROL)
    def kvcache_statistics(self) -> tuple[WorkerStatistics, ProcessStatistics]:
        """Return the statistics of the rank and of its connection."""
        return self.kvcache.worker.statistics(), self.kvcache.statistics()

    @ray.method(concurrency_group=CONTROL)
    def kvcache_keep_memory(self) -> str:
        """Make the node's memory service keep this rank's host memory again; return the error,
        empty if it succeeded."""
        return self.kvcache.worker.keep_host_memory()

    @ray.method(concurrency_group=CONTROL)
    def kvcache_labels(self) -> LabelSet:
        """Return this rank's labels of all its blocks."""
        return self.kvcache.worker.collect_labels()

    @ray.method(concurrency_group=CONTROL)
    def kvcache_read(self, layer_name: str, block_id: int) -> bytes:
        """Return the bytes of one layer's page of one block; for a state, those of its tensors in
        order. For tests and inspection."""
        import torch

        worker = self.kvcache.worker
        alone = {name: (tensor,) for name, tensor in worker.kv_caches.items()}
        layers: dict[str, tuple[torch.Tensor, ...]] = {**alone, **worker.state_caches}
        tensors = layers.get(layer_name) if isinstance(layer_name, str) else None
        if tensors is None:
            known = ", ".join(layers)
            raise RequestError(f"there is no layer {shown(layer_name)}: this rank has {known}")
        block_id = as_int("block_id", block_id, 0, len(tensors[0]) - 1, RequestError)
        pages = [tensor[block_id].contiguous().view(torch.uint8) for tensor in tensors]
        return b"".join(page.cpu().numpy().tobytes() for page in pages)

    @ray.method(concurrency_group=SENTINEL)
    def kvcache_watch(self, epoch: int) -> int:
        """Return when a newer epoch watches; otherwise only when the worker closes or dies."""
        return self.kvcache.watch(epoch)

    @ray.method(concurrency_group=CONTROL)
    def kvcache_close(self) -> None:
        """Release connection and tensors, and end sentinel calls."""
        self.kvcache.close()


class WorkerActor(WorkerMethods):
    """A process that only keeps one rank's cache."""

    def __init__(self, config: ClusterConfig, place: int) -> None:
        """Start to serve. Nothing is allocated before the plan arrives."""
        import torch

        from actors.workers.embedding import EmbeddedWorker

        log_to_stderr(OUR_LOGGERS)
        torch.set_num_threads(1)
        self.kvcache = EmbeddedWorker(config, place, connect_peer, is_threaded=True)
        # Not a method of this class: Ray wraps methods for tracing, which would slow down every
        # turn.
        turn = partial(self.kvcache.poll, LONGEST_WAIT_S)
        # A half-executed message must not be read as complete: the process ends, and is replaced.
        self._loop = ServiceLoop(
            f"kvcache-worker-{place}",
            turn,
            self.kvcache.wake,
            max_failures=1,
            on_failure=end_this_process,
        )

    @ray.method(concurrency_group=CONTROL)
    def kvcache_attach(self, endpoint: Endpoint) -> None:
        """Connect to the coordinator at `endpoint`."""
        self.kvcache.attach(endpoint)
        if not self._loop.is_running:
            calm_garbage_collector()
            self._loop.start()
        report_worker(self.kvcache)

    @ray.method(concurrency_group=CONTROL)
    def kvcache_close(self) -> None:
        """Stop serving, then release everything."""
        self._loop.end(CLOSE_TIMEOUT_S)
        self.kvcache.close()


def report_worker(embedded: EmbeddedWorker) -> None:
    """Report the statistics of a rank until it closes, if its configuration wants that. No effect
    when called again."""
    settings, name = embedded.config.metrics, embedded.config.name
    if not settings.enabled or embedded.on_close is not None:
        return

    def collect() -> list[Sample]:
        host = embedded.statistics()
        carried = host.transport
        traffic = RankTraffic(
            carried.sent,
            carried.received,
            host.malformed + host.misdirected + carried.oversized + carried.foreign,
            carried.undeliverable,
            host.faults,
        )
        return worker_samples(name, embedded.worker.statistics(), traffic)

    embedded.on_close = MetricsReporter("kvcache-metrics", collect, settings.interval_s).stop
