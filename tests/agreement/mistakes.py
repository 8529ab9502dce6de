"""Broken variants of the flat core that the suite must catch.

Compiled rules cannot be exchanged. A variant changes the arguments or results of kernels, or
replaces Python code. The state stays consistent, so that only the comparison with the slow core, or
with the workers' blocks, can find the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcache.base.arrays import int32_array
from kvcache.core import (
    BlocksRemoved,
    CacheEvent,
    CacheHit,
    CoreSettings,
    EventSink,
    Reservation,
    TableChange,
    eviction,
    flat_core,
    forks,
    prefix_cache,
    steps,
)
from kvcache.core.columns import OPENED
from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.core.pool import acquire_all
from kvcache.core.prefix_cache import PrefixCache
from kvcache.protocol.commands import Command, Copy, Unlabel
from kvcache.requests.request import Namespace, Request
from tests.agreement.walk import FACTORIES

VARIANT = "variant"


class HitsOneBlockLess(PrefixCache):
    """Long hits lose their last block."""

    def look_up(self, request: Request) -> CacheHit:
        hit = super().look_up(request)
        num_tokens = hit.num_tokens - self.hash_block_size
        if num_tokens < 2 * self.hash_block_size:
            return hit
        return CacheHit(tuple(ids[:-1] for ids in hit.block_ids), num_tokens)


class LookingIsUsing(PrefixCache):
    """The last look-up's blocks are evicted last, although no request took them."""

    def look_up(self, request: Request) -> CacheHit:
        found = super().look_up(request)
        self.pin(found)
        self.unpin(found)
        return super().look_up(request)


class LeaksBlocks(FlatCore):
    """One block of every fifth freed request is leaked."""

    num_freed = 0

    def _forget_row(self, request: Request) -> int:
        held = [block for block in self.block_ids(request.request_id)[0] if block]
        self.num_freed += 1
        if held and self.num_freed % 5 == 0:
            acquire_all(self.store.address, int32_array(held[:1]))
        return super()._forget_row(request)


class KeepsOneBlockFree(FlatCore):
    """The last free block is never allocated."""

    def reserve(
        self, request: Request, reservation: Reservation, hit: CacheHit | None = None
    ) -> list[TableChange] | None:
        spare = reservation.num_spare_blocks + 1
        return super().reserve(request, reservation._replace(num_spare_blocks=spare), hit)


class _RootsOfAll(dict[Namespace, int]):
    """All tenants' namespaces have one root."""

    def get(self, namespace: Namespace, default: Any = None) -> Any:
        return super().get(replace(namespace, tenant=None), default)

    def __setitem__(self, namespace: Namespace, root: int) -> None:
        super().__setitem__(replace(namespace, tenant=None), root)


class MixesTenants(FlatCore):
    """Tenants hit each other's blocks of equal digests."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cache.roots = _RootsOfAll()


class SealsWhatFailed(FlatCore):
    """Blocks of a failed step can be hit."""

    def fail_steps(self, client_id: str, from_step: int) -> None:
        self.complete_steps(client_id, 1 << 30)


class ForgetsCopies(FlatCore):
    """A fork's shared block is replaced, but its bytes are not copied."""

    def take_commands(self) -> list[Command]:
        return [command for command in super().take_commands() if not isinstance(command, Copy)]


class ForgetsUnlabels(FlatCore):
    """Labels outlive their blocks' contents."""

    def take_commands(self) -> list[Command]:
        return [command for command in super().take_commands() if not isinstance(command, Unlabel)]


class CachesInspiteOfAnEviction(PrefixCache):
    """A request that lost a content still makes later ones hittable."""

    def evict(self, block_ids: Sequence[int]) -> None:
        flags = self.store.columns.row[:, flat_core.FLAGS].copy()
        super().evict(block_ids)
        self.store.columns.row[:, flat_core.FLAGS] = flags


class CachesWhatOldWeightsComputed(PrefixCache):
    """Requests that run when the weights change still make blocks hittable."""

    def forget_all(self) -> None:
        flags = self.store.columns.row[:, flat_core.FLAGS].copy()
        super().forget_all()
        self.store.columns.row[:, flat_core.FLAGS] = flags


class HitsWhatItDrains(PrefixCache):
    """A drain does not stop hits."""

    def stop_hits(self) -> None:
        pass


class _ForgetfulSink:
    """Drops every third removal event."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._num_removed = 0

    def emit(self, event: CacheEvent) -> None:
        if isinstance(event, BlocksRemoved):
            self._num_removed += 1
            if self._num_removed % 3 == 0:
                return
        self._sink.emit(event)


class ForgetsAnEvent(FlatCore):
    """Some removed contents stay stored for listeners."""

    def __init__(self, settings: CoreSettings) -> None:
        super().__init__(replace(settings, events=_ForgetfulSink(settings.events)))


_begin = steps.StepTable._begin


def begin_without_its_number(self: Any, client: int, step: int) -> None:
    """Open a step whose states can be read before its end."""
    _begin(self, client, step)
    self._store.cells[OPENED] = 1 << 60


def with_cache(cache_class: type[PrefixCache]) -> CoreFactory:
    """Return the maker of cores whose prefix cache is of this class."""

    def make(settings: CoreSettings) -> FlatCore:
        core = FlatCore(settings)
        core.cache.__class__ = cache_class
        return core

    return make


def with_variant(make: CoreFactory) -> Mapping[str, CoreFactory]:
    """Return all cores, and this one under the name `VARIANT`."""
    return {**FACTORIES, VARIANT: make}


def one_more(kernel: Any, *places: int) -> Callable[..., Any]:
    """Return a kernel that gets one more in these of its arguments."""
    return lambda *args: kernel(*[arg + 1 if i in places else arg for i, arg in enumerate(args)])


@dataclass(frozen=True)
class Planted:
    """A mistake, and the suite's message about it (a regular expression).

    It is a maker of cores, or replacements for functions in modules of the flat core.
    """

    name: str
    message: str
    make: CoreFactory = FlatCore
    patches: tuple[tuple[Any, str, Any], ...] = ()
    configurations: Sequence[str] = ("full", "full, window")


DISAGREE = "disagree"

MISTAKES = (
    Planted(
        "hits one block less", "disagree.*(hit tokens|pin|evicted)", with_cache(HitsOneBlockLess)
    ),
    Planted("evicts another victim", DISAGREE, with_cache(LookingIsUsing)),
    Planted("forgets an event", "disagree.*events|stays stored|stored", ForgetsAnEvent),
    Planted("leaks a block", "disagree.*free blocks", LeaksBlocks),
    Planted("keeps one block free", DISAGREE, KeepsOneBlockFree),
    Planted("mixes tenants", "not what its tokens demand|disagree", MixesTenants),
    Planted("seals what failed", "disagree|is labelled", SealsWhatFailed),
    Planted("forgets copies", "not what its tokens demand|disagree", ForgetsCopies),
    Planted("forgets to unlabel", "label", ForgetsUnlabels),
    Planted("caches in spite of an eviction", DISAGREE, with_cache(CachesInspiteOfAnEviction)),
    Planted("caches what old weights computed", DISAGREE, with_cache(CachesWhatOldWeightsComputed)),
    Planted("hits what it drains", DISAGREE, with_cache(HitsWhatItDrains)),
    Planted(
        "hits states of the open step",
        DISAGREE + "|has not the state",
        patches=((steps.StepTable, "_begin", begin_without_its_number),),
        configurations=("full, states", "losses: full, states"),
    ),
    Planted(
        "takes a shared block for a row's own",
        DISAGREE + "|tokens demand",
        patches=((forks.RowForks, "due_copies", lambda *args: []),),
    ),
    Planted(
        "seals before the step of another client",
        DISAGREE + "|before its parent|label command",
        patches=((steps, "settle_notes", lambda core, notes, serial, waiting: len(notes)),),
    ),
    Planted(
        "leaves rows of a failed step where they are",
        DISAGREE,
        patches=((steps, "rewind_row", lambda *args: None),),
    ),
    Planted(
        "skips one token early",
        DISAGREE + "|lacks tokens",
        patches=(
            (flat_core, "serve_row", one_more(flat_core.serve_row, 2)),
            (flat_core, "run_rows", one_more(flat_core.run_rows, 12)),
        ),
        configurations=("full, window", "full, chunked"),
    ),
    Planted(
        "evicts the newest of its victims first",
        DISAGREE,
        patches=(
            (
                eviction,
                "evict_all",
                lambda core, ids, kept: EVICT_ALL(core, ids[::-1].copy(), kept),
            ),
        ),
        configurations=("forks: full", "forks: full, window"),
    ),
    Planted(
        "matches one token less",
        DISAGREE,
        patches=((prefix_cache, "look_up", lambda *args: LOOK_UP(*args[:-1], args[-1] - 1)),),
    ),
)

EVICT_ALL, LOOK_UP = eviction.evict_all, prefix_cache.look_up
