"""Who may connect: a file of CURVE keys, the same on every node.

Without it, only processes of this machine may connect, because blocks hold what users have written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from kvcache.base.curve import CurveKeys, generate_curve_keys
from kvcache.base.errors import ConfigurationError, shown

_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_OWN_MACHINE = re.compile(r"127\.[0-9.]+|\[::1\]|localhost")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True)
class IndexPlace:
    """Where an index listens, and its keys; without keys, on this machine only.

    Raises ConfigurationError for an address that is none, or on the network without keys.
    """

    address: str
    keys: CurveKeys | None = None

    def __post_init__(self) -> None:
        require_guarded(self.address, self.keys is not None)

    def to_plain(self) -> dict[str, Any]:
        """Return it as values for JSON, secrets among them."""
        return {"address": self.address, "keys": self.keys and _plain(self.keys)}

    @staticmethod
    def of_plain(values: Mapping[str, Any]) -> IndexPlace:
        """Return what `to_plain` was called on."""
        keys = values["keys"]
        return IndexPlace(values["address"], None if keys is None else _keys_of(keys))


def require_name(name: str) -> str:
    """Return the name of a coordinator on Ray; raises ConfigurationError."""
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"{shown(name)} is no name: use 1 to 40 letters, digits, dots, dashes and underscores"
        )
    return name


def require_address(address: str, *, first_port: int = 1) -> tuple[str, int]:
    """Return host and port of `tcp://HOST:PORT`; raises ConfigurationError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not first_port <= int(match[2]) < 1 << 16:
        raise ConfigurationError(f"{shown(address)} is no address: write tcp://HOST:PORT")
    return match[1], int(match[2])


def require_guarded(address: str, has_keys: bool, *, first_port: int = 1) -> None:
    """Raise ConfigurationError for an address on the network without keys."""
    host, _ = require_address(address, first_port=first_port)
    if not has_keys and not _OWN_MACHINE.fullmatch(host):
        raise ConfigurationError(
            f"{address} is on the network, and there are no keys: pass a file of keys, the same on "
            "every node, which kvcache vllm-coordinator --keys FILE makes"
        )


def read_keys(path: str) -> CurveKeys:
    """Return the keys in a file; raises ConfigurationError."""
    try:
        mode = os.stat(path).st_mode
        keys = _keys_of(json.loads(Path(path).read_bytes()))
    except OSError as error:
        raise ConfigurationError(
            f"keys {path!r}: {error.strerror}: make the file with kvcache vllm-coordinator --keys "
            "FILE, and copy it to every node"
        ) from error
    except Exception as error:  # what is wrong may be a secret
        raise ConfigurationError(
            f"keys {path!r}: the file cannot be read: make it again with kvcache vllm-coordinator"
        ) from error
    if mode & 0o077:
        raise ConfigurationError(f"keys {path!r}: others may read the file: run chmod 600 {path}")
    return keys


def make_keys(path: str) -> CurveKeys:
    """Make a file with new keys; raises ConfigurationError."""
    keys = generate_curve_keys()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(_plain(keys), file)
    except OSError as error:
        raise ConfigurationError(
            f"keys {path!r}: cannot be written ({error.strerror}): name a file in a directory that "
            "exists and that you may write to"
        ) from error
    return keys


def _plain(keys: CurveKeys) -> dict[str, str]:
    return {name: key.decode() for name, key in vars(keys).items()}


def _keys_of(values: Mapping[str, str]) -> CurveKeys:
    """Return keys from their plain values; raises any error for values that are none."""
    keys = CurveKeys(**{name: value.encode() for name, value in values.items()})
    for key in vars(keys).values():
        zmq.utils.z85.decode(key)
    return keys
