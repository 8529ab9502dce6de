"""The operations of a walk as data: the same operation is applied to every core.

Requests have names and blocks have places, so that block ids may differ. `repr` of an operation is
its line in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.manager.cache_blocks import KVCacheBlocks
from kvcache.protocol.step import ResumedRequest, StepRequest, StepResult
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import LoRARequest, Request
from tests.agreement.content import Forward, Origin
from tests.agreement.side import Facts, Side

Tokens = tuple[int, ...]


def shape_of(blocks: KVCacheBlocks) -> Facts:
    """How many blocks are where, which are null, and how many have no hash."""
    return {
        "blocks": [[bool(block) for block in ids] for ids in blocks.get_block_ids()],
        "unhashed": [len(ids) for ids in blocks.get_unhashed_block_ids()],
    }


@dataclass(frozen=True)
class LookUp:
    """get_computed_blocks of a request that is not admitted; its hit must be true."""

    origin: Origin
    tokens: Tokens

    def apply(self, side: Side) -> Facts:
        epoch = side.manager.model_epoch
        request = self.origin.request("probe", self.tokens, epoch)
        blocks, hit = side.manager.get_computed_blocks(request)
        forward = Forward("probe", self.origin, self.tokens, hit, hit, last_own=hit)
        if hit:
            side.truth.look_at(forward, blocks.get_block_ids(), epoch)
        return {"hit tokens": hit, **shape_of(blocks)}


@dataclass(frozen=True)
class Admit:
    """get_computed_blocks and allocate_slots of a new request."""

    name: str
    origin: Origin
    tokens: Tokens
    max_new: int
    num_external: int = 0
    num_lookahead: int = 0
    num_encoder: int = 0
    delays_caching: bool = False
    skips_reading: bool = False
    hints: tuple[CacheHint, ...] = ()

    def apply(self, side: Side) -> Facts:
        manager, num_tokens = side.manager, len(self.tokens)
        request = self.origin.request(
            self.name,
            self.tokens,
            manager.model_epoch,
            skips_reading=self.skips_reading,
        )
        request.hints = self.hints
        found, hit = manager.get_computed_blocks(request)
        start = min(hit + self.num_external, num_tokens - 1)
        num_new = min(self.max_new, num_tokens - start)
        blocks = manager.allocate_slots(
            request,
            num_new,
            hit,
            found if hit else None,
            num_lookahead_tokens=self.num_lookahead,
            delay_cache_blocks=self.delays_caching,
            num_external_computed_tokens=max(0, start - hit),
            num_encoder_tokens=self.num_encoder,
        )
        facts: Facts = {"hit tokens": hit, "has room": blocks is not None, "found": shape_of(found)}
        if blocks is not None:
            request.num_computed_tokens = start + num_new
            side.requests[self.name] = request
            facts |= {"scheduled": num_new, **shape_of(blocks)}
        return facts


@dataclass(frozen=True)
class Extend:
    """allocate_slots of a running request: settle its drafts, append, schedule more."""

    name: str
    settled: int
    appended: Tokens
    num_new: int
    num_drafts: int = 0
    num_lookahead: int = 0
    delays_caching: bool = False

    def apply(self, side: Side) -> Facts:
        request = side.requests[self.name]
        request.append_output_token_ids(list(self.appended))
        request.num_computed_tokens = self.settled
        blocks = side.manager.allocate_slots(
            request,
            self.num_new + self.num_drafts,
            num_draft_tokens=self.num_drafts,
            num_lookahead_tokens=self.num_lookahead,
            delay_cache_blocks=self.delays_caching,
        )
        if blocks is None:
            return {"has room": False}
        request.num_computed_tokens = self.settled + self.num_new
        return {"has room": True, **shape_of(blocks)}


@dataclass(frozen=True)
class CacheBlocks:
    name: str
    num_tokens: int

    def apply(self, side: Side) -> Facts:
        side.manager.cache_blocks(side.requests[self.name], self.num_tokens)
        return {}


@dataclass(frozen=True)
class Free:
    name: str
    hints: tuple[CacheHint, ...] = ()

    def apply(self, side: Side) -> Facts:
        if self.hints:
            side.requests[self.name].hints = self.hints
        side.manager.free(side.requests.pop(self.name))
        return {}


@dataclass(frozen=True)
class FreeBlockHashes:
    name: str

    def apply(self, side: Side) -> Facts:
        side.manager.free_block_hashes(side.requests[self.name])
        return {}


@dataclass(frozen=True)
class ForkCall:
    """fork; the child has the parent's computed tokens and more of its own."""

    parent: str
    child: str
    origin: Origin
    tokens: Tokens

    def apply(self, side: Side) -> Facts:
        parent = side.requests[self.parent]
        epoch = parent.namespace.model_epoch
        child = self.origin.request(self.child, self.tokens, epoch)
        blocks = side.manager.fork(parent, child)
        if blocks is None:
            return {"has room": False}
        side.requests[self.child] = child
        return {"has room": True, **shape_of(blocks)}


@dataclass(frozen=True)
class PinPrefix:
    name: str
    origin: Origin
    tokens: Tokens
    ttl_s: float

    def apply(self, side: Side) -> Facts:
        lora = self.origin.lora
        pin = side.pins[self.name] = side.manager.pin_prefix(
            list(self.tokens),
            self.ttl_s,
            lora=None if lora is None else LoRARequest(lora, f"/{lora}"),
            cache_salt=self.origin.salt,
            tenant=self.origin.tenant,
        )
        return {"pin": (pin.pin_id, pin.num_tokens, pin.num_blocks, pin.expires_at_s)}


@dataclass(frozen=True)
class Unpin:
    name: str

    def apply(self, side: Side) -> Facts:
        return {"unpinned": side.manager.unpin_prefix(side.pins[self.name])}


@dataclass(frozen=True)
class Wait:
    """Advance time; the next call lets pins expire."""

    seconds: float

    def apply(self, side: Side) -> Facts:
        side.clock.advance(self.seconds)
        return {}


@dataclass(frozen=True)
class EvictBlocks:
    """evict_blocks: places `(group, column)` of a running request's tables, or of a hit."""

    places: tuple[tuple[int, int], ...]
    name: str = ""
    origin: Origin = field(default_factory=Origin)
    tokens: Tokens = ()

    def apply(self, side: Side) -> Facts:
        tables = side.manager.get_block_ids(self.name)
        if not self.name:
            request = self.origin.request("probe", self.tokens, side.manager.model_epoch)
            tables = side.manager.get_computed_blocks(request)[0].get_block_ids()
        ids = [tables[group][i] for group, i in self.places if i < len(tables[group])]
        side.manager.evict_blocks([block for block in ids if block])
        return {"evicted": len(ids)}


@dataclass(frozen=True)
class ResetPrefixCache:
    drain: bool

    def apply(self, side: Side) -> Facts:
        return {"done": side.manager.reset_prefix_cache(drain=self.drain)}


@dataclass(frozen=True)
class BeginModelEpoch:
    def apply(self, side: Side) -> Facts:
        return {"epoch": side.manager.begin_model_epoch()}


@dataclass(frozen=True)
class Step:
    """A whole step; `line` is its line in the log."""

    request: StepRequest = field(repr=False)
    line: str = ""

    def apply(self, side: Side) -> Facts:
        result = side.manager.step(self.request)
        if self.request.failed_step >= 0:
            side.truth.fail(self.request.client_id, self.request.failed_step)
        side.patches = result.patches
        return facts_of(result)


def facts_of(result: StepResult) -> Facts:
    """All of a result except block ids."""
    back = zip(
        result.rolled_back_slots.tolist(),
        result.rolled_back_computed.tolist(),
        result.rolled_back_tokens.tolist(),
        strict=True,
    )
    return {
        "admitted slots": result.admitted_slots.tolist(),
        "hit tokens": result.num_hit_tokens.tolist(),
        "scheduled": result.num_scheduled_tokens.tolist(),
        "rows scheduled": result.running_scheduled.tolist(),
        "no room": result.no_room,
        "forked slots": result.forked_slots.tolist(),
        "withdrawn": sorted(result.withdrawn),
        "rolled back": sorted(back),
        "waiting": (result.waiting_for_load, result.retry_later),
    }


def _evict_unknown(side: Side) -> None:
    side.manager.evict_blocks([1, 1 << 20])


def _fork_unknown(side: Side) -> object:
    return side.manager.fork(Request("unknown", [1, 2]), Request("child", [1, 2, 3]))


def _allocate_nothing(side: Side) -> object:
    return side.manager.allocate_slots(Request("unknown", [1, 2]), 0)


def _allocate_too_much(side: Side) -> object:
    return side.manager.allocate_slots(Request("unknown", [1, 2]), 3)


def _adopt_what_is_not_there(side: Side) -> object:
    num_groups = len(side.manager.create_empty_block_list().get_block_ids())
    blocks = KVCacheBlocks([[1] for _ in range(num_groups)])
    return side.manager.allocate_slots(Request("unknown", list(range(40))), 1, 4, blocks)


def _cache_unknown(side: Side) -> None:
    side.manager.cache_blocks(Request("unknown", [1, 2]), 1)


def _finish_unknown(side: Side) -> object:
    return side.manager.step(StepRequest("unknown#1", 1, finished=("unknown",)))


def _resume_unknown(side: Side) -> object:
    resumed = (ResumedRequest("unknown", 1),)
    return side.manager.step(StepRequest("unknown#1", 1, resumed=resumed))


MISTAKES: dict[str, Callable[[Side], object]] = {
    "evict an unknown block": _evict_unknown,
    "fork an unknown request": _fork_unknown,
    "allocate nothing": _allocate_nothing,
    "allocate behind the tokens": _allocate_too_much,
    "adopt what is not there": _adopt_what_is_not_there,
    "cache an unknown request": _cache_unknown,
    "finish an unknown request": _finish_unknown,
    "resume an unknown request": _resume_unknown,
}


@dataclass(frozen=True)
class Mistake:
    """A call that must be refused with the same text and change nothing."""

    what: str
    is_mistake: bool = field(default=True, repr=False)

    def apply(self, side: Side) -> Facts:
        MISTAKES[self.what](side)
        raise AssertionError(f"not refused: {self.what}")
