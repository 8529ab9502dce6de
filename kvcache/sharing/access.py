"""Who may connect: a file of CURVE keys, the same on every node.

Without it, only processes of this machine may connect, because blocks hold what users have written.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import zmq

from kvcache.base.curve import CurveKeys, generate_curve_keys
from kvcache.base.errors import ConfigurationError, shown

_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_OWN_MACHINE = re.compile(r"127\.[0-9.]+|\[::1\]|localhost")


def require_address(address: str) -> tuple[str, int]:
    """Return host and port of `tcp://HOST:PORT`; raises ConfigurationError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise ConfigurationError(f"{shown(address)} is no address: write tcp://HOST:PORT")
    return match[1], int(match[2])


def require_guarded(address: str, has_keys: bool) -> None:
    """Raise ConfigurationError for an address on the network without keys."""
    host, _ = require_address(address)
    if not has_keys and not _OWN_MACHINE.fullmatch(host):
        raise ConfigurationError(
            f"{address} is on the network, and there are no keys: pass a file of keys, the same on "
            "every node, which kvcache vllm-coordinator --keys FILE makes"
        )


def read_keys(path: str) -> CurveKeys:
    """Return the keys in a file; raises ConfigurationError."""
    try:
        mode = os.stat(path).st_mode
        values = json.loads(Path(path).read_bytes())
        keys = CurveKeys(**{name: value.encode() for name, value in values.items()})
        for key in vars(keys).values():
            zmq.utils.z85.decode(key)
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
    values = {name: key.decode() for name, key in vars(keys).items()}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(values, file)
    except OSError as error:
        raise ConfigurationError(f"keys {path!r}: {error.strerror}") from error
    return keys
