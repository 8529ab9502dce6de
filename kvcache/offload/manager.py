"""The interface of a tier: a manager, and handlers.

The manager decides on the coordinator's side: keys are looked up, stored and loaded, bytes are
never seen. Handlers copy bytes on the workers' side, one for every pair of media between which they
can. Between *prepare* and *complete* of a transfer its slots do not change. The tiers of this
package are `TierManager`s; external tiers implement this and are registered by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from kvcache.base.arguments import as_text, check_fields, check_kind
from kvcache.base.errors import InvalidInputError
from kvcache.core import OffloadAnswer
from kvcache.offload.canonical import ByteRows, CanonicalKVCaches
from kvcache.offload.events import OffloadingEvent
from kvcache.offload.keys import OffloadKey
from kvcache.offload.specs import LoadStoreSpec
from kvcache.offload.statistics import TierStatistics

NO_PARAMS: Mapping[str, str | int | float | bool] = MappingProxyType({})


@dataclass(frozen=True)
class ReqContext:
    """A request as tiers see it: its id, and information from its caller.

    Raises InvalidInputError for an empty id.
    """

    req_id: str
    params: Mapping[str, str | int | float | bool] = field(default_factory=lambda: NO_PARAMS)

    def __post_init__(self) -> None:
        check_fields(self, as_text, "req_id", error=InvalidInputError)
        check_kind("params", self.params, Mapping)


@dataclass(frozen=True)
class PrepareStoreOutput:
    """Keys to store and their places. `keys_to_store` are in the caller's order, `store_spec` has
    one destination for each; `evicted_keys` were evicted for them."""

    keys_to_store: tuple[OffloadKey, ...]
    store_spec: LoadStoreSpec
    evicted_keys: tuple[OffloadKey, ...]


class OffloadingManager(ABC):
    """The state of one tier. One user, one thread, never blocks. A raise changes nothing.

    Keys of one call belong to one chain of blocks, in order, unless said otherwise.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, ctx: ReqContext | None = None) -> OffloadAnswer:
        """Return whether a key can be loaded. Changes nothing but statistics.

        HIT: yes. HIT_PENDING: it is being stored; delay the request. RETRY: not known yet, ask
        again in a later step. MISS: no.
        """

    @abstractmethod
    def prepare_load(
        self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None
    ) -> LoadStoreSpec:
        """Protect keys until `complete_load`, and return their places, one source per key.

        Loads of one key are counted. Raises InvalidInputError unless all keys are hits.
        """

    @abstractmethod
    def complete_load(self, keys: Sequence[OffloadKey]) -> None:
        """End a load of keys: they can be evicted again, as the most recently used.

        Raises InvalidInputError if one of them is not being loaded.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make keys the most recently used. Skips unknown ones."""

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """Make room for missing keys; they are pending until `complete_store`.

        Keys already here count as used. None if there is no room for all of them.
        """

    @abstractmethod
    def complete_store(self, keys: Sequence[OffloadKey], success: bool = True) -> None:
        """End the store of keys: they are hits from now on.

        Without success, keys that were not stored yet vanish; others stay. Raises
        InvalidInputError for a key whose store was never prepared.
        """

    def on_new_request(self, ctx: ReqContext) -> None:  # noqa: B027
        """Called for a new request. Does nothing unless overridden."""

    def on_request_finished(self, ctx: ReqContext) -> None:  # noqa: B027
        """Called when a request has ended. Does nothing unless overridden."""

    def on_schedule_end(self) -> None:  # noqa: B027
        """Called after each step. Does nothing unless overridden."""

    @abstractmethod
    def take_events(self) -> tuple[OffloadingEvent, ...]:
        """Return the events since the last call, in order."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Drop every key, with events. Slots that jobs use are kept for them."""

    @abstractmethod
    def statistics(self) -> TierStatistics:
        """Return frozen statistics."""

    def shutdown(self) -> None:  # noqa: B027
        """End all use of this tier. Does nothing unless overridden."""


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
