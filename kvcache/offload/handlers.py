"""Who moves a tier's bytes, on a worker: abstract, because only workers know memory.

A spec brings both sides of a tier together: the manager for the coordinator, handlers for each
worker, one for every pair of media between which it can copy. Refuses to import what copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.offload.canonical import ByteRows, CanonicalKVCaches
from kvcache.offload.manager import OffloadingManager
from kvcache.offload.specs import LoadStoreSpec


@dataclass(frozen=True)
class TransferSpec:
    """One copy: block `i` of `source` to block `i` of `destination`."""

    source: LoadStoreSpec
    destination: LoadStoreSpec


@dataclass(frozen=True)
class TransferResult:
    """How a copy ended. `num_bytes` were moved; `detail` says what went wrong."""

    job_id: int
    success: bool
    num_bytes: int = 0
    detail: str = ""


class OffloadingHandler(ABC):
    """Copies between two media, in the background."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a copy; return at once. False if it cannot be begun: there is no result then."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return what has ended since the last call. Never blocks."""

    @abstractmethod
    def wait(self, job_ids: Sequence[int]) -> None:
        """Block until these jobs have ended; their results are still to be fetched."""


class HandlerRoute(NamedTuple):
    """A handler and the pair of media that it copies between."""

    source_type: type[LoadStoreSpec]
    destination_type: type[LoadStoreSpec]
    handler: OffloadingHandler


class OffloadingSpec(ABC):
    """A tier as it is registered: what the coordinator and what the workers need of it."""

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the tier's manager. The coordinator calls it once."""

    @abstractmethod
    def get_handlers(self, kv_caches: CanonicalKVCaches[ByteRows]) -> Iterator[HandlerRoute]:
        """Yield the handlers of one worker, whose KV caches are these."""
