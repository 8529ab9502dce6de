"""`kvcache launch` and `stop`: a cluster that outlives one command."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.cli.command import ConfigOption, NameOption, command
from actors.cli.tables import say
from kvcache.base.errors import DeadlineError, KVCacheError, NotRunningError

if TYPE_CHECKING:
    from actors.clusters.cluster import KVCacheCluster
    from actors.clusters.replicas import KVCacheReplicas

_WATCH_INTERVAL_S = 2.0


@command
def launch(
    config: ConfigOption,
    name: Annotated[
        str | None,
        typer.Option("--name", "-n", help="Name of the cluster (default: the configuration's)."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when ready; the cluster stays.")
    ] = False,
) -> None:
    """Start a cluster and keep it until SIGTERM or Ctrl-C; with --detach, return when ready."""
    from actors.cli.clusters import ray_session
    from actors.clusters.cluster import KVCacheCluster
    from actors.clusters.replicas import KVCacheReplicas
    from kvcache.config import load_config, parse_config

    settings = load_config(config)
    if name is not None:
        settings = parse_config({**settings.model_dump(), "name": name}, "command line")
    has_replicas = settings.parallel.data_parallel_size > 1
    kind: type[KVCacheReplicas | KVCacheCluster]
    kind = KVCacheReplicas if has_replicas else KVCacheCluster
    with ray_session(may_start=not detach), interrupted_by_sigterm():
        launched = kind.launch(settings, detached=detach, on_progress=say)
        clusters = list(launched) if isinstance(launched, KVCacheReplicas) else [launched]
        _say_where_they_log(clusters)
        if detach:
            say(f"{settings.name} is running: `kvcache stop --name {settings.name}` ends it")
            return
        say(f"{settings.name} is running: Ctrl-C or SIGTERM ends it")
        try:
            say(_watch(clusters))
        except KeyboardInterrupt:
            say(f"stopping {settings.name}")
        finally:
            # A shutdown has its own deadlines.
            with handling(signal.SIG_IGN, signal.SIGTERM, signal.SIGINT):
                launched.stop()
    say(f"{settings.name} has stopped")


@command
def stop(name: NameOption = None) -> None:
    """Stop a running cluster and remove everything it started."""
    from actors.cli.clusters import find_launched, names_under, only_cluster, ray_session
    from actors.clusters.shutdown import ClusterParts, take_down
    from actors.connect import is_actor_known
    from actors.names import coordinator_name

    with ray_session(may_start=False):
        name = name or only_cluster()
        try:
            find_launched(name).stop()
        except DeadlineError:
            hanging = [n for n in names_under(name) if is_actor_known(coordinator_name(n))]
            if not hanging:
                raise
            say(f"the coordinator of {name} does not answer: ending its actors by name")
            for each in hanging:
                take_down(ClusterParts.found(each))
    say(f"{name} has stopped")


def _say_where_they_log(clusters: list[KVCacheCluster]) -> None:
    """Print the paths of the coordinators' logs, if known."""
    for cluster in clusters:
        with suppress(KVCacheError):
            status = cluster.status()
            if status.log_path:
                say(f"log of {cluster.name}: {status.coordinator_node.host}:{status.log_path}")


def _watch(clusters: list[KVCacheCluster]) -> str:
    """Wait until a cluster ends by itself, and return why. A restarting coordinator has not
    ended."""
    while True:
        time.sleep(_WATCH_INTERVAL_S)
        for cluster in clusters:
            try:
                status = cluster.status()
            except NotRunningError:
                return f"{cluster.name} was stopped by another command"
            except DeadlineError:
                continue
            if status.state == "failed":
                raise NotRunningError(f"{cluster.name} has failed: {status.problem}")


def interrupted_by_sigterm() -> AbstractContextManager[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does. Use it inside `ray_session`, which sets
    its own handler."""
    return handling(signal.default_int_handler, signal.SIGTERM)


@contextmanager
def handling(handler: Any, *numbers: int) -> Iterator[None]:
    """Handle these signals with `handler` during the `with` block. Main thread only."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
