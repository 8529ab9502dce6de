"""The cluster that a command is about, in the Ray that runs here.

    named_cluster ── the one of that name, or the only one; an error names those that run
    ray_session ──── joins the Ray that runs (a job's, `ray start`'s), or starts one of its own
    find_refusal ─── why the one that is there cannot be joined, asked in a second, in words

What a command has started it stops. A Ray whose control service (GCS) dies meanwhile ends the
process of every driver with exit code 1, which is for wrong bytes here: the command ends itself
before, with its own. Ray itself tries for minutes where nothing listens, and for twenty seconds
where its token is not the one that is expected, and then says in both cases that it could not
connect. What `find_refusal` cannot tell is Ray's to say.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from actors.cli.command import EXIT_CLUSTER
from actors.clusters.cluster import KVCacheCluster
from actors.clusters.replicas import KVCacheReplicas
from actors.embedded.site import EmbeddedSite, find_cluster
from actors.names import RAY_NAMESPACE, coordinator_name
from actors.reports import ClusterStatus
from actors.state import recorded_clusters
from kvcache.base.errors import ClusterError, NotRunningError

RAY_WAITS_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112
"""How long Ray lets the control service be away, as while it restarts, before it ends processes."""

LOST_S = 0.75 * RAY_WAITS_S
"""How long we let it."""

LOOK_S = LOST_S / 30
"""How often it is looked for."""

PROBE_S = 3.0
"""How long a connection may take to be accepted."""

ANSWER_S = 10.0
"""How long Ray may take to answer the simplest question, on a machine that has too much to do."""

_DIRECTLY = (("grpc.enable_http_proxy", 0),)
"""As Ray connects. A proxy that does not know the address would be silent."""

_ANY_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""Ray refuses a caller without a token before it looks at the question."""

_TOKEN_PLACES = (
    "the token file that it was started with (RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token unless that "
    "is set), or the token itself (RAY_AUTH_TOKEN)"
)


@contextmanager
def open_cluster(name: str | None, *, must_serve: bool = True) -> Iterator[KVCacheCluster]:
    """Yield a running cluster whose coordinator can be asked; connected to Ray meanwhile.

    Raises NotRunningError where no Ray runs, or no such cluster, or where its coordinator is in a
    process of its engine: that alone can ask it. Unless told otherwise, also as `require_plan`.
    """
    with ray_session(may_start=False):
        cluster = named_cluster(name)
        if not isinstance(cluster, KVCacheCluster):
            raise NotRunningError(
                f"the coordinator of {cluster.name} is in a process of its engine, which alone can "
                "ask it: call the same from there, or `kvcache status`"
            )
        if must_serve:
            require_plan(cluster.status())
        yield cluster


def require_plan(status: ClusterStatus) -> ClusterStatus:
    """Return the status of a cluster that can serve; raises NotRunningError for one that has
    failed, or whose coordinator does not know its workers yet."""
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
    """Return a running cluster, default the only one. In a process that is connected to Ray.

    Raises NotRunningError, naming those that run, unless there is one.
    """
    names = running_clusters()
    if name is None:
        name = only_cluster(names)
    elif name not in names:
        raise NotRunningError(f"no cluster named {name!r} is running: {_instead(names)}")
    return find_cluster(name)


def running_clusters() -> list[str]:
    """Return the names of the clusters that run in this Ray cluster, in order."""
    suffix = coordinator_name("")
    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    named = {
        actor["name"].removesuffix(suffix)
        for actor in actors
        if actor["namespace"] == RAY_NAMESPACE and actor["name"].endswith(suffix)
    }
    return sorted(map(str, named.union(recorded_clusters())))


def only_cluster(names: list[str] | None = None) -> str:
    """Return the name of the one cluster that runs; raises NotRunningError unless there is one."""
    names = running_clusters() if names is None else names
    if len(names) == 1:
        return names[0]
    if not names:
        raise NotRunningError("no cluster is running: start one with `kvcache launch`")
    raise NotRunningError(
        f"{len(names)} clusters are running: choose one with --name: {', '.join(names)}"
    )


def find_launched(name: str) -> KVCacheCluster | KVCacheReplicas | EmbeddedSite:
    """Return what runs under a name: a cluster, or the replicas of one launch. Raises
    NotRunningError, naming what does run, if there is nothing."""
    try:
        return named_cluster(name)
    except NotRunningError as error:
        try:
            return KVCacheReplicas.connect(name)
        except NotRunningError:
            raise error from None


def names_under(name: str) -> list[str]:
    """Return the names of what runs under a name: one cluster, or the replicas of one launch."""
    return [
        each
        for each in running_clusters()
        if each == name or (each.startswith(f"{name}-dp") and each[len(name) + 3 :].isdigit())
    ]


def _instead(names: list[str]) -> str:
    if not names:
        return "none is, start one with `kvcache launch`"
    return f"choose one of {', '.join(names)}"


@contextmanager
def ray_session(*, may_start: bool) -> Iterator[bool]:
    """Connect to Ray for the `with` block; yield whether this command has started it. In a process
    that is connected already, it stays so.

    Raises NotRunningError when no Ray runs and `may_start` is false; ClusterError when the one that
    runs, or the one that RAY_ADDRESS names, cannot be joined. One that was not named, perhaps
    somebody else's, is left alone where `may_start`.
    """
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
        ray.shutdown()  # which may wait for the control service, too
        is_over.set()


def _watch(address: str, is_over: threading.Event) -> None:
    """End the process when the control service at `address` has been away for too long. The main
    thread may hang in a call of Ray, where no exception reaches it."""
    since_s: float | None = None  # of the first look in vain, as this process may have stood still
    while not is_over.wait(LOOK_S):
        why_not = why_unanswered(address)
        now_s = time.monotonic()
        since_s = (since_s or now_s) if why_not else None
        if since_s is not None and now_s - since_s > LOST_S:
            print(
                f"kvcache: the Ray at {address} is lost: its control service (GCS) has not "
                f"answered for {LOST_S:g} s ({why_not}), and what runs there ends with it: "
                "`ray stop --force` ends what is left; start Ray again, and launch",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_CLUSTER)


def _has_joined(may_start: bool) -> bool:
    """Join the Ray that runs; False, which happens only with `may_start`, if there is none."""
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
        _pass_over(refusal, may_start)
    elif not may_start:
        raise NotRunningError("no Ray cluster is running here: start one with `ray start --head`")
    return False


def _pass_over(refusal: Refusal, may_start: bool) -> None:
    if refusal.is_named or not may_start:
        raise ClusterError(str(refusal))
    print(f"a Ray of its own is started: {refusal.what}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Refusal:
    """`what` is in the way, with values, and the `remedy`. `is_named`: RAY_ADDRESS asks for it."""

    what: str
    remedy: str
    is_named: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def find_refusal() -> Refusal | None:
    """Look at the Ray cluster that would be joined; None where nothing speaks against it, or
    it cannot be told, as where there is none or there are several."""
    # Ray's own variable is looked at because Ray looks at it, too. Only host:port is tried.
    named = os.environ.get("RAY_ADDRESS", "")
    why_not = why_unanswered(named)
    if why_not:
        what = f"RAY_ADDRESS is {named}, and nothing answers there ({why_not})"
        return Refusal(what, "start Ray there, correct it, or unset it", is_named=True)
    if named not in ("", "auto"):
        return refusal_at(named) if ":" in named and "/" not in named else None
    addresses = _local_addresses()
    if addresses:
        return refusal_at(addresses[0]) if len(addresses) == 1 else None
    last = _remembered_address()
    why_not = why_unanswered(last)
    if why_not:
        what = f"the Ray that was started last, at {last}, does not answer ({why_not})"
        return Refusal(what, "`ray stop` forgets it, `ray start --head` starts one", is_named=False)
    return refusal_at(last) if last else None


def refusal_behind(error: ConnectionError) -> Refusal | None:
    """Say why Ray could not connect, if the place that its error names says why."""
    match = re.search(r" at (\S+:[0-9]+)$", str(error))
    return None if match is None else refusal_at(match[1])


def refusal_at(address: str) -> Refusal | None:
    """Ask the control service at `address` anything, as Ray would; None unless it refuses the
    token, hangs, is gone, or has no node here."""
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
        return Refusal(what, f"point to {_TOKEN_PLACES}", is_named)
    except (ImportError, AttributeError, TypeError):  # a Ray of another time
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
    """Return the headers that Ray would send with this environment: none where its mode is off.
    Where the mode is left open Ray turns it on if there is a token, for a cluster that it finds
    itself; never for one that it is told of."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if is_named if mode is None else mode.lower() != "token":
        return ()
    from ray import _raylet

    internals: Any = _raylet
    loader = internals.AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        return ()
    return tuple(loader.get_token_for_http_header().items())


def _refused(address: str, has_token: bool, is_named: bool) -> Refusal:
    if has_token:
        what = f"the Ray at {address} runs with another token than this command has"
        return Refusal(what, f"point to {_TOKEN_PLACES}", is_named)
    what = f"the Ray at {address} expects a token, and this command sends none"
    remedy = f"set RAY_AUTH_MODE=token, and point to {_TOKEN_PLACES}"
    return Refusal(what, remedy, is_named)


def _broken(address: str, why: str, is_named: bool) -> Refusal:
    what = f"the Ray at {address} is broken: its control service (GCS) does not answer ({why})"
    remedy = "`ray stop --force` ends what is left of it; start Ray again, and launch"
    return Refusal(what, remedy, is_named)


def _without_node(address: str, is_named: bool) -> Refusal | None:
    """Say that no node of a Ray is on this machine, as where its raylet was killed: a command joins
    by one, and Ray waits a minute for it. Hosts have many names, so ports are compared."""
    addresses = _local_addresses()
    if addresses is None or address.rpartition(":")[2] in {a.rpartition(":")[2] for a in addresses}:
        return None
    what = f"the Ray at {address} has no node on this machine, or its raylet has died"
    remedy = (
        f"`ray start --address={address}` adds one; where one has died, `ray stop --force` ends "
        "what is left of it: start Ray again, and launch"
    )
    return Refusal(what, remedy, is_named)


def why_unanswered(address: str) -> str:
    """Say why no connection to host:port is accepted; empty if one is, or it is no such thing."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""


def _local_addresses() -> list[str] | None:
    """Return where Ray clusters that have a node on this machine are served, as Ray finds them;
    None where it cannot be asked."""
    try:
        from ray._private.services import find_gcs_addresses
    except ImportError:
        return None
    find: Any = find_gcs_addresses
    return sorted(map(str, find()))


def _remembered_address() -> str:
    """Return where `ray start` served last, which it writes down and only `ray stop` removes."""
    try:
        from ray._private.utils import read_ray_address
    except ImportError:
        return ""
    read: Any = read_ray_address
    return str(read() or "")
