"""`kvcache launch` and `stop`; find the cluster that a command works on, and connect to Ray.

    named_cluster ── the cluster of a name, or the only one; its error lists the running clusters
    ray_session ──── joins the running Ray (a job's, `ray start`'s), or starts one of its own
    find_refusal ─── why the running Ray cannot be joined, found within a second, in words

A command stops what it has started. If Ray's control service (GCS) dies, Ray ends the process of
every driver with exit code 1. Here, 1 means wrong bytes, so the command ends itself earlier, with
its own code. Ray tries for minutes if nothing listens, and for twenty seconds if the token is
wrong, and then reports in both cases only that it could not connect. `find_refusal` says why; if
it cannot tell, the command passes on Ray's error.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.cli.command import (
    EXIT_CLUSTER,
    ConfigOption,
    NameOption,
    command,
    handling,
    interrupted_by_sigterm,
    say,
)
from kvcache.base.errors import ClusterError, DeadlineError, KVCacheError, NotRunningError

if TYPE_CHECKING:
    from actors.clusters.cluster import KVCacheCluster
    from actors.clusters.replicas import KVCacheReplicas
    from actors.embedded.site import EmbeddedSite
    from actors.reports import ClusterStatus

RAY_WAITS_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112
"""How long Ray waits for an absent control service before it ends processes."""

LOST_S = 0.75 * RAY_WAITS_S
"""How long a command waits for it."""

LOOK_S = LOST_S / 30
"""How often a command checks it."""

PROBE_S = 3.0
"""How long a connection may take to be accepted."""

ANSWER_S = 10.0
"""How long Ray may take to answer the simplest question on an overloaded machine."""

_DIRECTLY = (("grpc.enable_http_proxy", 0),)
"""Connect as Ray does, without a proxy: one that does not know the address would not answer."""

_ANY_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""Ray refuses a caller without a token before it reads the question."""

_TOKEN_PLACES = (
    "the token file that it was started with (RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token unless that "
    "is set), or the token itself (RAY_AUTH_TOKEN)"
)

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
            say(_wait_for_end(clusters))
        except KeyboardInterrupt:
            say(f"stopping {settings.name}")
        finally:
            # A shutdown has its own deadlines.
            with handling(signal.SIG_IGN, signal.SIGTERM, signal.SIGINT):
                launched.stop()
    say(f"{settings.name} has stopped")


@command
def stop(name: NameOption = None) -> None:
    """Stop a running cluster and every process it started; the files of its disk tier stay."""
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


def _wait_for_end(clusters: list[KVCacheCluster]) -> str:
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


@contextmanager
def open_cluster(
    name: str | None,
    *,
    must_serve: bool = True,
    otherwise: str = "call the same from there, or `kvcache status`",
) -> Iterator[KVCacheCluster]:
    """Connect to Ray and yield a running cluster whose coordinator answers. In the `with` block,
    SIGTERM interrupts as Ctrl-C does. Main thread only.

    Raises NotRunningError if no Ray or no such cluster runs, or if its coordinator is embedded in
    an engine's process, which alone can ask it; `otherwise` is the remedy. With `must_serve` also
    raises as `require_plan`.
    """
    from actors.clusters.cluster import KVCacheCluster

    with ray_session(may_start=False), interrupted_by_sigterm():
        cluster = named_cluster(name)
        if not isinstance(cluster, KVCacheCluster):
            raise NotRunningError(
                f"the coordinator of {cluster.name} is in a process of its engine, which alone can "
                f"ask it: {otherwise}"
            )
        if must_serve:
            require_plan(cluster.status())
        yield cluster


def require_plan(status: ClusterStatus) -> ClusterStatus:
    """Return the status unchanged. Raises NotRunningError if the cluster has failed or its
    coordinator does not know its workers yet."""
    if status.state == "failed":
        raise NotRunningError(f"{status.name} has failed: {status.problem}")
    if not status.ranks:
        problem = f" ({status.problem})" if status.problem else ""
        raise NotRunningError(
            f"the coordinator of {status.name} does not know its workers yet{problem}: wait until "
            "`kvcache status` says ready"
        )
    return status


def named_cluster(name: str | None) -> KVCacheCluster | EmbeddedSite:
    """Return a running cluster, by default the only one. The process is connected to Ray.

    Raises NotRunningError, which lists the running clusters, if there is no such cluster.
    """
    from actors.embedded.site import find_cluster

    names = running_clusters()
    if name is None:
        name = only_cluster(names)
    elif name not in names:
        choice = f"choose one of {', '.join(names)}"
        instead = choice if names else "none is, start one with `kvcache launch`"
        raise NotRunningError(f"no cluster named {name!r} is running: {instead}")
    return find_cluster(name)


def running_clusters() -> list[str]:
    """Return the sorted names of the clusters in this Ray cluster."""
    from actors.connect import actor_names
    from actors.names import coordinator_name
    from actors.state import recorded_clusters

    suffix = coordinator_name("")
    named = {name.removesuffix(suffix) for name in actor_names() if name.endswith(suffix)}
    return sorted(named.union(recorded_clusters()))


def only_cluster(names: list[str] | None = None) -> str:
    """Return the name of the only running cluster; raises NotRunningError if there is not one."""
    names = running_clusters() if names is None else names
    if len(names) == 1:
        return names[0]
    if not names:
        raise NotRunningError("no cluster is running: start one with `kvcache launch`")
    raise NotRunningError(
        f"{len(names)} clusters are running: choose one with --name: {', '.join(names)}"
    )


def find_launched(name: str) -> KVCacheCluster | KVCacheReplicas | EmbeddedSite:
    """Return the cluster of a name, or the replicas of one launch. Raises NotRunningError, which
    lists the running clusters, if there is none."""
    from actors.clusters.replicas import KVCacheReplicas

    try:
        return named_cluster(name)
    except NotRunningError as error:
        try:
            return KVCacheReplicas.connect(name)
        except NotRunningError:
            raise error from None


def names_under(name: str) -> list[str]:
    """Return the names of the clusters under a name: one cluster, or the replicas of a launch."""
    return [
        each
        for each in running_clusters()
        if each == name or (each.startswith(f"{name}-dp") and each[len(name) + 3 :].isdigit())
    ]


@contextmanager
def ray_session(*, may_start: bool) -> Iterator[bool]:
    """Connect to Ray for the `with` block; yield whether this command has started it. A process
    that is already connected stays connected.

    Raises NotRunningError if no Ray runs and `may_start` is false. Raises ClusterError if the
    running Ray, or the one that RAY_ADDRESS names, cannot be joined. With `may_start`, a Ray that
    RAY_ADDRESS does not name may belong to another user and is left alone.
    """
    import ray

    if ray.is_initialized():
        yield False
        return
    has_started = not _has_joined(may_start)
    if has_started:
        ray.init(
            address="local",
            logging_level=logging.ERROR,
            log_to_driver=False,
            include_dashboard=False,
        )
    is_over = threading.Event()
    address = ray.get_runtime_context().gcs_address
    watch = threading.Thread(
        target=_watch, args=(address, is_over), name="kvcache-ray-watch", daemon=True
    )
    watch.start()
    try:
        yield has_started
    finally:
        ray.shutdown()  # may wait for the control service, too
        is_over.set()


def _watch(address: str, is_over: threading.Event) -> None:
    """End the process when the control service at `address` has been absent for too long. The main
    thread may hang in a call of Ray, where no exception reaches it."""
    since_s: float | None = None  # first failed check; this process may have been stopped
    while not is_over.wait(LOOK_S):
        why_not = why_unanswered(address)
        now_s = time.monotonic()
        since_s = (since_s or now_s) if why_not else None
        if since_s is not None and now_s - since_s > LOST_S:
            print(
                f"kvcache: the Ray at {address} is lost: its control service (GCS) has not "
                f"answered for {LOST_S:g} s ({why_not}), and everything that ran there ends: "
                "run `ray stop --force`, start Ray again, and launch",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_CLUSTER)


def _has_joined(may_start: bool) -> bool:
    """Join the running Ray. Return False if there is none, which only `may_start` allows."""
    import ray
    from ray.exceptions import RayError

    refusal = find_refusal()
    if refusal is None:
        try:
            ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
        except ConnectionError as error:
            refusal = refusal_behind(error)
        except RayError as error:
            raise ClusterError(f"Ray cannot be joined: {error}") from error
        else:
            return True
    if refusal is not None:
        if refusal.is_named or not may_start:
            raise ClusterError(str(refusal))
        print(f"starting a separate Ray: {refusal.what}", file=sys.stderr, flush=True)
    elif not may_start:
        raise NotRunningError("no Ray cluster is running here: start one with `ray start --head`")
    return False


@dataclass(frozen=True)
class JoinRefusal:
    """What prevents joining, and the remedy. `is_named`: RAY_ADDRESS names this Ray."""

    what: str
    remedy: str
    is_named: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def find_refusal() -> JoinRefusal | None:
    """Check the Ray cluster that would be joined. Return None if it can be joined, or if that is
    unknown because there is none or there are several."""
    # Ray reads this variable too. Only host:port is tried.
    named = os.environ.get("RAY_ADDRESS", "")
    why_not = why_unanswered(named)
    if why_not:
        what = f"RAY_ADDRESS is {named}, and nothing answers there ({why_not})"
        return JoinRefusal(what, "start Ray there, correct it, or unset it", is_named=True)
    if named not in ("", "auto"):
        return refusal_at(named) if ":" in named and "/" not in named else None
    addresses = _local_addresses()
    if addresses:
        return refusal_at(addresses[0]) if len(addresses) == 1 else None
    last = _remembered_address()
    why_not = why_unanswered(last)
    if why_not:
        what = f"the Ray that was started last, at {last}, does not answer ({why_not})"
        return JoinRefusal(
            what, "`ray stop` forgets it, `ray start --head` starts one", is_named=False
        )
    return refusal_at(last) if last else None


def refusal_behind(error: ConnectionError) -> JoinRefusal | None:
    """Return why Ray could not connect, asked at the address that its error names."""
    match = re.search(r" at (\S+:[0-9]+)$", str(error))
    return None if match is None else refusal_at(match[1])


def refusal_at(address: str) -> JoinRefusal | None:
    """Ask the control service at `address` a question, as Ray would. Return None unless it refuses
    the token, hangs, is gone, or has no node here."""
    is_named = os.environ.get("RAY_ADDRESS", "") not in ("", "auto")
    if why_not := why_unanswered(address):
        return _broken(address, why_not, is_named)
    try:
        import grpc
        from ray.exceptions import AuthenticationError
    except ImportError:  # a Ray without tokens, or without its dashboard's packages
        return None
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return None
    try:
        token = _token(is_named)
    except AuthenticationError as error:
        what = f"Ray's token cannot be read: {str(error).partition('. ')[0]}"
        return JoinRefusal(what, f"point to {_TOKEN_PLACES}", is_named)
    except (ImportError, AttributeError, TypeError):  # another version of Ray
        return None
    with grpc.insecure_channel(address, _DIRECTLY) as channel:
        try:
            channel.unary_unary(_ANY_METHOD)(b"", timeout=ANSWER_S, metadata=token)
        except grpc.RpcError as error:
            code = getattr(error, "code", lambda: None)()
            if code is grpc.StatusCode.UNAUTHENTICATED:
                return _refused(address, bool(token), is_named)
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return _broken(address, f"no answer within {ANSWER_S:g} s", is_named)
    return _without_node(address, is_named)


def _token(is_named: bool) -> tuple[tuple[str, str], ...]:
    """Return the headers that Ray would send with this environment, none if tokens are off.
    If the mode is not set, Ray sends a token if it has one, but only to a cluster that it finds
    itself, never to one that RAY_ADDRESS names."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if is_named if mode is None else mode.lower() != "token":
        return ()
    from ray import _raylet

    internals: Any = _raylet
    loader = internals.AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        return ()
    return tuple(loader.get_token_for_http_header().items())


def _refused(address: str, has_token: bool, is_named: bool) -> JoinRefusal:
    if has_token:
        what = f"the Ray at {address} expects another token than this command has"
        return JoinRefusal(what, f"point to {_TOKEN_PLACES}", is_named)
    what = f"the Ray at {address} expects a token, and this command sends none"
    remedy = f"set RAY_AUTH_MODE=token, and point to {_TOKEN_PLACES}"
    return JoinRefusal(what, remedy, is_named)


def _broken(address: str, why: str, is_named: bool) -> JoinRefusal:
    what = f"the Ray at {address} is broken: its control service (GCS) does not answer ({why})"
    remedy = "run `ray stop --force`, start Ray again, and launch"
    return JoinRefusal(what, remedy, is_named)


def _without_node(address: str, is_named: bool) -> JoinRefusal | None:
    """Say that the Ray has no node on this machine, for example because its raylet was killed. A
    command joins through a node, and Ray waits a minute for one. Hosts have many names, so only
    ports are compared."""
    addresses = _local_addresses()
    if addresses is None or address.rpartition(":")[2] in {a.rpartition(":")[2] for a in addresses}:
        return None
    what = f"the Ray at {address} has no node on this machine, or its raylet has died"
    remedy = (
        f"`ray start --address={address}` adds one; if one has died, run `ray stop --force`, "
        "start Ray again, and launch"
    )
    return JoinRefusal(what, remedy, is_named)


def why_unanswered(address: str) -> str:
    """Return why host:port accepts no connection; empty if it does, or for another address."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""


def _local_addresses() -> list[str] | None:
    """Return the addresses of Ray clusters that have a node on this machine, as Ray finds them;
    None if Ray cannot say."""
    try:
        from ray._private.services import find_gcs_addresses
    except ImportError:
        return None
    find: Any = find_gcs_addresses
    return sorted(map(str, find()))


def _remembered_address() -> str:
    """Return the address of the last `ray start`; only `ray stop` removes that record."""
    try:
        from ray._private.utils import read_ray_address
    except ImportError:
        return ""
    read: Any = read_ray_address
    return str(read() or "")
