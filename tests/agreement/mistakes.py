"""Variants of the reference core: broken ones that the suite must catch, one that it must allow.

Each changes one thing by public methods only, so that its own books still add up and nothing but
the comparison, or the truth in the workers' blocks, can give it away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcache.commands import Command, Copy, Unlabel
from kvcache.core import (
    BlocksRemoved,
    CacheEvent,
    CacheHit,
    Core,
    EventSink,
    ReferenceKind,
    Reservation,
    TableChange,
)
from kvcache.errors import BlockError
from kvcache.manager.core_registry import CORES, CoreFactory, CoreSettings
from kvcache.managers.block_core import BlockCore
from kvcache.request import Request

VARIANT = "variant"


class HitsOneBlockLess(BlockCore):
    """Long hits lose their last block."""

    def look_up(self, request: Request) -> CacheHit:
        hit = super().look_up(request)
        num_tokens = hit.num_tokens - self.hash_block_size
        if num_tokens < 2 * self.hash_block_size:
            return hit
        return CacheHit(tuple(ids[:-1] for ids in hit.block_ids), num_tokens)


class LookingIsUsing(BlockCore):
    """What was looked up last is evicted last, although nobody took it."""

    found: CacheHit | None = None

    def look_up(self, request: Request) -> CacheHit:
        self.found = super().look_up(request)
        return self.found

    def free(self, request: Request) -> None:
        super().free(request)
        found, self.found = self.found, None
        if found is not None and found.num_tokens:
            try:
                self.pin(found)
            except BlockError:  # it is gone meanwhile
                return
            self.unpin(found)


class LeaksBlocks(BlockCore):
    """Of every fifth request that goes a block stays behind."""

    num_freed = 0

    def free(self, request: Request) -> None:
        held = [block for block in self.block_ids(request.request_id)[0] if block]
        self.num_freed += 1
        if held and self.num_freed % 5 == 0:
            self.pool.touch(held[:1], ReferenceKind.TRANSFER)
        super().free(request)


class KeepsOneBlockFree(BlockCore):
    """The last free block is given to nobody."""

    def reserve(
        self, request: Request, reservation: Reservation, hit: CacheHit | None = None
    ) -> list[TableChange] | None:
        spare = reservation.num_spare_blocks + 1
        return super().reserve(request, reservation._replace(num_spare_blocks=spare), hit)


class MixesTenants(BlockCore):
    """Tenants find each other's blocks, whose digests are the same."""

    def look_up(self, request: Request) -> CacheHit:
        stranger = Request(
            request.request_id,
            request.all_token_ids,
            lora=request.lora,
            mm_positions=request.mm_positions,
            mm_hashes=request.mm_hashes,
            cache_salt=request.cache_salt,
            skip_reading_prefix_cache=request.skip_reading_prefix_cache,
            block_hasher=request.block_hasher,
            model_epoch=request.namespace.model_epoch,
        )
        return super().look_up(stranger)


class SealsWhatFailed(BlockCore):
    """What a failed step was to write can be hit."""

    def fail_steps(self, client_id: str, from_step: int) -> None:
        self.complete_steps(client_id, 1 << 30)


class ForgetsCopies(BlockCore):
    """A fork's shared block is swapped, and its bytes stay where they were."""

    def take_commands(self) -> list[Command]:
        return [command for command in super().take_commands() if not isinstance(command, Copy)]


class ForgetsUnlabels(BlockCore):
    """Labels outlive their blocks' contents."""

    def take_commands(self) -> list[Command]:
        return [command for command in super().take_commands() if not isinstance(command, Unlabel)]


class GivesCopiesBackEmpty(BlockCore):
    """Not a mistake: of several blocks of one content only the first outlives its requests."""

    def free(self, request: Request) -> None:
        held = {block for ids in self.block_ids(request.request_id) for block in ids if block}
        super().free(request)
        copies = [block for block in sorted(held) if self._is_unused_copy(block)]
        if copies:
            self.pool.forget_copies(copies)

    def _is_unused_copy(self, block: int) -> bool:
        table, digest = self.pool.contents.table_of(block), self.pool.digest(block)
        if table is None or digest is None or self.pool.num_references(block):
            return False
        return block in table.copies.get(digest, ())


class _ForgetfulSink:
    """Drops every third event of removed blocks."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._num_removed = 0

    def emit(self, event: CacheEvent) -> None:
        if isinstance(event, BlocksRemoved):
            self._num_removed += 1
            if self._num_removed % 3 == 0:
                return
        self._sink.emit(event)


def made_from(core_class: type[BlockCore]) -> CoreFactory:
    """Return what makes a core of this class from the settings of a manager."""

    def make(settings: CoreSettings) -> Core:
        core = core_class(
            settings.kv_cache_config,
            none_hash=settings.none_hash,
            enable_caching=settings.enable_caching,
            use_eagle=settings.use_eagle,
            policy_name=settings.eviction_policy,
            events=settings.events,
            offload=settings.offload,
            zero_new_blocks=settings.zero_new_blocks,
            has_workers=settings.has_workers,
        )
        core.use_slots(settings.slots)
        return core

    return make


def _forgetting_events(settings: CoreSettings) -> Core:
    return CORES["blocks"](replace(settings, events=_ForgetfulSink(settings.events)))


def with_variant(factory: CoreFactory) -> Mapping[str, CoreFactory]:
    """Return the cores there are, and one more under the name `VARIANT`."""
    return {**CORES, VARIANT: factory}


@dataclass(frozen=True)
class Planted:
    """A mistake, and what the suite says of it (a regular expression)."""

    name: str
    factory: Callable[[CoreSettings], Core]
    message: str
    configurations: Sequence[str] = ("full", "full, window")


MISTAKES = (
    Planted(
        "hits one block less", made_from(HitsOneBlockLess), "disagree.*(hit tokens|pin|evicted)"
    ),
    Planted("evicts another victim", made_from(LookingIsUsing), "disagree"),
    Planted("forgets an event", _forgetting_events, "disagree.*events|stays stored|stored"),
    Planted("leaks a block", made_from(LeaksBlocks), "disagree.*free blocks"),
    Planted("keeps one block free", made_from(KeepsOneBlockFree), "disagree"),
    Planted("mixes tenants", made_from(MixesTenants), "not what its tokens demand|disagree"),
    Planted("seals what failed", made_from(SealsWhatFailed), "disagree|is labelled"),
    Planted("forgets copies", made_from(ForgetsCopies), "not what its tokens demand|disagree"),
    Planted("forgets to unlabel", made_from(ForgetsUnlabels), "label"),
)
