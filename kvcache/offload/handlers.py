"""The workers' side of a tier, abstract: handlers that copy bytes.

A spec combines both sides of a tier: the manager for the coordinator, and handlers for each worker,
one for every pair of media between which it can copy.
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
    """The result of a copy. `num_bytes` were moved; `detail` describes an error."""

    job_id: int
    success: bool
    num_bytes: int = 0
    detail: str = ""


class OffloadingHandler(ABC):
    """Copies between two media, in the background."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a copy and return at once. False if it cannot begin: there is no result then."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the results since the last call. Never blocks."""

    @abstractmethod
    def wait(self, job_ids: Sequence[int]) -> None:
        """Block until these jobs have ended; their results must still be fetched."""


class HandlerRoute(NamedTuple):
    """A handler and the pair of media that it copies between."""

    source_type: type[LoadStoreSpec]
    destination_type: type[LoadStoreSpec]
    handler: OffloadingHandler


class OffloadingSpec(ABC):
    """A registered tier: its parts for the coordinator and for the workers."""

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the tier's manager. The coordinator calls it once."""

    @abstractmethod
    def get_handlers(self, kv_caches: CanonicalKVCaches[ByteRows]) -> Iterator[HandlerRoute]:
        """Yield the handlers of one worker, whose KV caches are these."""
