"""What a tier is to those who use it: keys are looked up, stored and loaded, bytes are never seen.

A tier's manager decides on the coordinator's side; handlers (`handlers.py`) copy on the workers'
side. Between *prepare* and *complete* of a transfer its slots stay what they are. The tiers of this
package are `TierManager`s; tiers from outside implement this and are registered by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvcache.base.arguments import as_text, check_fields, check_kind
from kvcache.base.errors import InvalidInputError
from kvcache.core import OffloadAnswer
from kvcache.offload.events import OffloadingEvent
from kvcache.offload.keys import OffloadKey
from kvcache.offload.specs import LoadStoreSpec
from kvcache.offload.statistics import TierStatistics

NO_PARAMS: Mapping[str, str | int | float | bool] = MappingProxyType({})


@dataclass(frozen=True)
class ReqContext:
    """A request as tiers see it: its id, and what its caller wants tiers to know.

    Raises InvalidInputError for an empty id.
    """

    req_id: str
    params: Mapping[str, str | int | float | bool] = field(default_factory=lambda: NO_PARAMS)

    def __post_init__(self) -> None:
        check_fields(self, as_text, "req_id", error=InvalidInputError)
        check_kind("params", self.params, Mapping)


__all__ = ["OffloadAnswer", "OffloadingManager", "PrepareStoreOutput"]


@dataclass(frozen=True)
class PrepareStoreOutput:
    """What is to be stored where. `keys_to_store` are in the order of the keys that were given, and
    `store_spec` has one destination for each; `evicted_keys` had to go for them."""

    keys_to_store: tuple[OffloadKey, ...]
    store_spec: LoadStoreSpec
    evicted_keys: tuple[OffloadKey, ...]


class OffloadingManager(ABC):
    """The state of one tier. One owner, one thread, never blocks. A raise changes nothing.

    Keys of one call belong to one chain of blocks, in order, unless said otherwise.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, ctx: ReqContext | None = None) -> OffloadAnswer:
        """Say whether a key can be loaded. Changes nothing but statistics.

        HIT: yes. HIT_PENDING: it is being stored; delay the request. RETRY: not known yet, ask
        again in a later step. MISS: no.
        """

    @abstractmethod
    def prepare_load(
        self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None
    ) -> LoadStoreSpec:
        """Protect keys until `complete_load`, and say where they lie, one source per key.

        Loads of one key are counted. Raises InvalidInputError unless all keys are hits.
        """

    @abstractmethod
    def complete_load(self, keys: Sequence[OffloadKey]) -> None:
        """End a load of keys: they may be evicted again, as the most recently used.

        Raises InvalidInputError if one of them is not being loaded.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note that keys are used: they are evicted later. Unknown ones are passed over."""

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """Make room for those keys that are not here; they are pending until `complete_store`.

        What is here already counts as used. None if there is no room for all of them.
        """

    @abstractmethod
    def complete_store(self, keys: Sequence[OffloadKey], success: bool = True) -> None:
        """End the store of keys: they are hits from now on.

        Without success those that were not yet stored vanish, others stay. Raises
        InvalidInputError for a key whose store was never prepared.
        """

    @abstractmethod
    def on_new_request(self, ctx: ReqContext) -> None:
        """A request has come."""

    @abstractmethod
    def on_request_finished(self, ctx: ReqContext) -> None:
        """A request has gone."""

    @abstractmethod
    def on_schedule_end(self) -> None:
        """A step has been decided."""

    @abstractmethod
    def take_events(self) -> tuple[OffloadingEvent, ...]:
        """Return what appeared and disappeared since the last call, in order."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget every key, and say so in the events. What jobs still work on is kept for them."""

    @abstractmethod
    def statistics(self) -> TierStatistics:
        """Return frozen statistics."""

    @abstractmethod
    def shutdown(self) -> None:
        """End for good: nothing is asked of this tier any more."""
