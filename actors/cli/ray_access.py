"""Why the Ray cluster that a command would join cannot be joined: asked in a second, and in words.

Ray itself tries for minutes where nothing listens, and for twenty seconds where its token is not
the one that is expected, and then says in both cases that it could not connect. Below sessions.py,
which joins, and doctor_network.py, which only says. Refuses to join, and to guess: what it cannot
tell is Ray's to say.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from typing import Any

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
