"""Which bytes a LoRA adapter has: tells adapters of one name and path apart.

vLLM's block hashes cover an adapter's name and path, and a path may hold other weights tomorrow.
Blocks outlive the engine, so their keys cover the content of the adapter's files, too, which is
read once per adapter. Size and time of a file are not enough: a retrained adapter has the same
size, and images and package builds set times. Lives in the scheduler's process, imports nothing of
vLLM.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.base.logs import get_logger

logger = get_logger(__name__)

_WEIGHTS = "adapter_model"
_FILES = (_WEIGHTS, "adapter_config", "new_embeddings")
_PIECE_BYTES = 1 << 20
EVENT_BYTES = 8
"""Of a vLLM digest, the last ones name the block in cache events."""

Signature = tuple[tuple[str, int, int, int, int], ...]


@dataclass(frozen=True)
class _Adapter:
    """An adapter as it was first seen. `revision` is empty if its blocks are not kept."""

    signature: Signature
    revision: bytes


class AdapterRevisions:
    """The content of each adapter, read when its first request comes.

    An adapter whose files change in a running engine is served by vLLM with the old bytes or the
    new ones, so from then on its blocks are neither stored nor loaded.
    """

    def __init__(self) -> None:
        self._adapters: dict[tuple[str, int], _Adapter] = {}

    def revision_of(self, adapter: Any) -> bytes | None:
        """Return what tells an adapter's content apart, None if its blocks are not kept. For a
        request without one (`adapter` None) that is empty."""
        if adapter is None:
            return b""
        key = adapter.lora_path, int(adapter.lora_int_id)
        known = self._adapters.get(key)
        directory = Path(adapter.lora_path).expanduser()
        signature = _signature(directory)
        if known is None:
            known = _Adapter(signature, self._read(adapter, directory, signature))
            self._adapters[key] = known
        elif known.revision and known.signature != signature:
            self._refuse(adapter, "its files have changed: start the engine again")
            known = self._adapters[key] = _Adapter(signature, b"")
        return known.revision or None

    def _read(self, adapter: Any, directory: Path, signature: Signature) -> bytes:
        """Return the hash of an adapter's files; empty if it has none that can be read."""
        if not any(name.startswith(_WEIGHTS) for name, *_ in signature):
            self._refuse(adapter, f"no {_WEIGHTS} is there: name a local directory that has one")
            return b""
        told = hashlib.sha256(repr(getattr(adapter, "is_3d_lora_weight", False)).encode())
        try:
            for name, size, *_ in signature:
                told.update(f"|{name}|{size}|".encode())
                with (directory / name).open("rb") as file:
                    while piece := file.read(_PIECE_BYTES):
                        told.update(piece)
        except OSError as error:
            self._refuse(adapter, f"its files cannot be read ({error.strerror})")
            return b""
        if _signature(directory) != signature:
            self._refuse(adapter, "its files are being written: start the engine again")
            return b""
        return told.digest()

    def _refuse(self, adapter: Any, why: str) -> None:
        logger.warning(
            "blocks of LoRA adapter %r in %s are not kept: %s",
            adapter.lora_name,
            adapter.lora_path,
            why,
        )


def digest_below(digest: bytes, origin: bytes) -> bytes:
    """Return the digest under which a block of this origin, adapter and weights, is kept; without
    one, vLLM's own. The last bytes stay, so that events name the block as vLLM does."""
    if not origin:
        return digest
    return hashlib.sha256(digest + origin).digest()[:-EVENT_BYTES] + digest[-EVENT_BYTES:]


def _signature(directory: Path) -> Signature:
    """Return name, size, inode and times of an adapter's files, sorted."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(_FILES) and entry.is_file():
                    told = entry.stat()
                    times = told.st_mtime_ns, told.st_ctime_ns
                    found.append((entry.name, told.st_size, told.st_ino, *times))
    except OSError:
        return ()
    return tuple(sorted(found))
