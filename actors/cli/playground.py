"""Where a replay runs: on a new cluster, on a running one, or in this process alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from actors.cli.clusters import ray_session, require_plan
from actors.cli.command import interrupted_by_sigterm, say
from actors.step_client import StepClient
from kvcache.base.errors import ConfigurationError, DeadlineError, NotRunningError, WorkerLostError
from kvcache.config import ClusterConfig, layer_specs, load_config
from kvcache.coordinator.settings import CoordinatorStatistics, OffloadStatistics
from kvcache.planner.grouping import get_kv_cache_groups, merge_rank_specs
from kvcache.protocol.messages import FailedForward
from kvcache.protocol.step import StepRequest, StepResult
from kvcache.replay.limits import EngineLimits, ModelTraits
from kvcache.replay.stepper import CacheCounters, ForwardProgress, Stepper, TierCounters

if TYPE_CHECKING:
    from actors.clusters.cluster import KVCacheCluster
    from kvcache.worker.statistics import WorkerStatistics

_STATISTICS_INTERVAL_S = 1.0
_SEND_AGAIN_S = 0.1


@dataclass(frozen=True)
class Playground:
    """The stepper that the engine drives, its limits, and a title."""

    title: str
    stepper: Stepper
    limits: EngineLimits


Look: TypeAlias = (
    "Callable[[], tuple[CoordinatorStatistics | None, Sequence[WorkerStatistics | None]]]"
)
"""Asks a cluster for the statistics of its coordinator and its ranks, None for a process that
does not answer."""


class ClientStepper:
    """A cluster behind its client. `look` asks for statistics that the client does not get.

    `return_s`: how long a cluster that has lost a process may take to serve steps again, as
    `DeadlinesConfig.return_s`. `tell` gets a line for each wait.
    """

    def __init__(
        self,
        client: StepClient,
        look: Look,
        *,
        return_s: float,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._client = client
        self._look = look
        self._return_s = return_s
        self._tell = tell
        self._counters = CacheCounters(0, 0, 0, 0.0)
        self._bytes_checked_before = 0
        self._failures_before: tuple[FailedForward, ...] = ()
        self._submitted = StepRequest()

    def submit(self, step: StepRequest) -> int:
        self._submitted = step
        return self._client.submit(step)

    def wait_result(self, step: int) -> StepResult:
        """Wait for the coordinator's answer. If it refuses the step because a rank is silent,
        nothing has happened and the epoch continues: send the step again."""
        give_up_s = time.monotonic() + self._return_s
        is_told = False
        while True:
            try:
                return self._client.wait_result(step)
            except WorkerLostError as error:
                if not self._client.is_attached:
                    raise
                if not is_told:
                    is_told = True
                    self._tell(f"{error}: waiting, {self._return_s:.0f} s at most")
                if time.monotonic() > give_up_s:
                    raise DeadlineError(f"step {step} is refused repeatedly: {error}") from error
            time.sleep(_SEND_AGAIN_S)
            step = self._client.submit(self._submitted)

    def wait_finished(self, step: int) -> None:
        """Wait until every rank has run the step's forward."""
        self._client.wait_finished(step)

    def attach(self) -> None:
        """Attach again. Earlier checks still count."""
        client = self._client
        checked, failures = client.bytes_checked, client.failures
        give_up_s = time.monotonic() + self._return_s
        self._tell(f"a process of the cluster is lost: waiting, {self._return_s:.0f} s at most")
        while True:
            try:
                client.attach()
                break
            except (DeadlineError, WorkerLostError) as error:
                if time.monotonic() > give_up_s:
                    raise
                self._tell(f"still waiting: {error}")
        self._tell("the cluster serves again: all running requests come back")
        self._bytes_checked_before += checked
        self._failures_before += failures

    def progress(self) -> ForwardProgress:
        """Return the progress that the client knows of."""
        client = self._client
        return ForwardProgress(
            finished_step=client.finished_step,
            bytes_checked=self._bytes_checked_before + client.bytes_checked,
            failures=(*self._failures_before, *client.failures),
        )

    def statistics(self) -> CacheCounters:
        """Ask the cluster; return the last known statistics if the coordinator has none or is
        away."""
        try:
            statistics, workers = self._look()
        except (DeadlineError, NotRunningError, WorkerLostError):
            return self._counters
        # Every rank executes the same copies; a replaced one has counted fewer.
        copies = max((w.num_blocks_copied for w in workers if w is not None), default=0)
        if statistics is not None and statistics.manager is not None:
            core = statistics.manager.core
            share = 1 - core.num_free_blocks / core.num_blocks if core.num_blocks else 0.0
            tiers = _tier_counters(statistics.offload)
            self._counters = CacheCounters(
                core.num_blocks, core.num_evictions, copies, share, tiers
            )
        return self._counters


def _tier_counters(offload: OffloadStatistics | None) -> TierCounters | None:
    if offload is None:
        return None
    host, disk = offload.tiers.host, offload.tiers.disk
    return TierCounters(
        offload.num_loaded_tokens,
        offload.num_fetched_tokens,
        host.stored_bytes,
        host.loaded_bytes,
        0 if disk is None else disk.stored_bytes,
        0 if disk is None else disk.loaded_bytes,
        offload.num_swapped_out,
        offload.num_swapped_in,
        offload.num_swap_saved_tokens,
    )


@contextmanager
def open_playground(
    config_path: Path | None, name: str | None, is_local: bool
) -> Iterator[Playground]:
    """Yield where to play; afterwards stop what was started for it.

    Raises ConfigurationError if the choices contradict each other, and the errors of starting or
    connecting.
    """
    if name is not None and (is_local or config_path is not None):
        other = "--local" if is_local else "--config"
        raise ConfigurationError(
            f"--name {name} plays on a running cluster, {other} on a new one: give one of them"
        )
    if name is not None:
        with _running_cluster(name) as ground:
            yield ground
    elif config_path is None:
        raise ConfigurationError(
            "nothing to play on: give --config FILE for a new cluster, or --name NAME for a "
            "running one"
        )
    elif is_local:
        with _local_cluster(load_config(config_path)) as ground:
            yield ground
    else:
        with _own_cluster(load_config(config_path)) as ground:
            yield ground


@contextmanager
def _local_cluster(config: ClusterConfig) -> Iterator[Playground]:
    """Everything in this process, without Ray."""
    from actors.local import LocalCluster

    with LocalCluster(config) as cluster, cluster.client("replay") as client:
        workers = [one.worker for one in cluster.workers]
        stepper = ClientStepper(
            client,
            lambda: (cluster.coordinator.statistics(), [w.statistics() for w in workers]),
            return_s=config.deadlines.return_s,
        )
        limits = _limits(config, cluster.plan.max_model_len)
        yield Playground(f"{config.name}, in this process", stepper, limits)


@contextmanager
def _own_cluster(config: ClusterConfig) -> Iterator[Playground]:
    """A cluster on Ray for the duration of the replay."""
    from actors.clusters.cluster import KVCacheCluster

    with (
        ray_session(may_start=True),
        interrupted_by_sigterm(),
        KVCacheCluster.launch(config, on_progress=say) as cluster,
    ):
        with _client_of(cluster) as ground:
            yield ground
        say(f"stopping {config.name}")


@contextmanager
def _running_cluster(name: str) -> Iterator[Playground]:
    """A running cluster, which keeps running afterwards."""
    from actors.clusters.cluster import KVCacheCluster

    with (
        ray_session(may_start=False),
        interrupted_by_sigterm(),
        _client_of(KVCacheCluster.connect(name)) as ground,
    ):
        yield ground


@contextmanager
def _client_of(cluster: KVCacheCluster) -> Iterator[Playground]:

    limits = _limits(cluster.config, require_plan(cluster.status()).max_model_len)
    with cluster.client("replay") as client:

        def look() -> tuple[CoordinatorStatistics | None, Sequence[WorkerStatistics | None]]:
            told = cluster.statistics()
            return told.coordinator, told.workers

        return_s = cluster.config.deadlines.return_s
        stepper = ClientStepper(client, look, return_s=return_s, tell=say)
        yield Playground(cluster.name, stepper, limits)


def _limits(config: ClusterConfig, max_model_len: int) -> EngineLimits:
    groups = get_kv_cache_groups(
        merge_rank_specs(layer_specs(config)),
        disable_hybrid_kv_cache_manager=config.cache.disable_hybrid_manager,
        warn=lambda warning: None,  # the plan has warned already
    )
    return EngineLimits(
        max_model_len=max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        stall_s=config.stall_s,
        statistics_interval_s=_STATISTICS_INTERVAL_S,
        model=ModelTraits.of(groups),
    )
