"""`kvcache clear`: forget everything cached, safely.

Asks first, and refuses without a terminal to ask. With a drain running requests finish, then the
model epoch advances: for weights that have changed.
"""

from __future__ import annotations

import json
import sys
import time

from actors.cli.clusters import open_cluster
from actors.cli.launching import say
from actors.cli.pinning import ADMIN_CLIENT
from actors.cli.tables import print_json
from actors.cluster import KVCacheCluster
from kvcache.base.errors import ConfigurationError, DeadlineError, ExhaustedError, NotRunningError
from kvcache.manager.statistics import ManagerStatistics

POLL_S = 0.2


def clear(name: str | None, *, drain: bool, yes: bool, timeout_s: float, as_json: bool) -> None:
    """Empty a running cluster's cache.

    Raises ConfigurationError without a terminal to ask, or if the answer is no,
    ExhaustedError where blocks are in use and it is no drain, DeadlineError for a drain that takes
    longer than `timeout_s`: it goes on.
    """
    with open_cluster(name) as cluster:
        manager = _manager(cluster)
        if not yes:
            confirm(cluster.name, manager, drain=drain)
        with cluster.client(ADMIN_CLIENT) as client:
            if client.reset_prefix_cache(drain=drain):
                pass
            elif not drain:
                raise ExhaustedError(
                    f"{cluster.name} is not cleared: {_manager(cluster).users()}: let them end, or "
                    "pass --drain, which waits for them and ends pins"
                )
            else:
                _await_drained(cluster, manager.model_epoch, timeout_s)
        after = _manager(cluster)
    if as_json:
        epochs = {"model_epoch_before": manager.model_epoch, "model_epoch": after.model_epoch}
        forgotten = {"num_forgotten_blocks": manager.core.num_cached_blocks}
        print_json(json.dumps({"name": cluster.name, **forgotten, **epochs}))
        return
    print(
        f"{cluster.name} is cleared: {manager.core.num_cached_blocks:,} blocks forgotten, model "
        f"epoch {after.model_epoch}"
    )


def _manager(cluster: KVCacheCluster) -> ManagerStatistics:
    statistics = cluster.coordinator_statistics()
    if statistics is None or statistics.manager is None:
        raise NotRunningError(f"{cluster.name} has no cache just now: wait until it is ready")
    return statistics.manager


def confirm(name: str, manager: ManagerStatistics, *, drain: bool) -> None:
    """Ask on the terminal; anything but yes is no. Raises ConfigurationError for no, and where
    there is no terminal."""
    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"clearing {name} forgets {manager.core.num_cached_blocks:,} blocks, and there is no "
            "terminal to ask on: pass --yes"
        )
    more = ", ends all pins, and advances the model epoch" if drain else ""
    say(f"this forgets {manager.core.num_cached_blocks:,} cached blocks of {name}{more}")
    print("go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ConfigurationError(f"{name} is left as it is: the question was not answered with yes")


def _await_drained(cluster: KVCacheCluster, epoch_before: int, timeout_s: float) -> None:
    """Wait until the running requests have left, and the cache is empty."""
    say(f"{cluster.name} drains: nothing hits any more, running requests finish")
    give_up_s = time.monotonic() + timeout_s
    while (manager := _manager(cluster)).is_draining or manager.model_epoch == epoch_before:
        if time.monotonic() > give_up_s:
            raise DeadlineError(
                f"{cluster.name} still drains after {timeout_s:g} s, {manager.users()}: it goes on "
                "by itself, look with `kvcache status`"
            )
        time.sleep(POLL_S)
