"""Forking a request: a child that starts with all its parent has computed, in blocks they share.

Used by the per-request calls and by the batched step. Takes a slot, and no block: which blocks are
shared, and who copies when one of them writes, is the core's. Refuses parents without blocks
(unknown, preempted, swapped out) and children that do not continue what the parent has computed.

    parent   tokens 0 ......... C | what it computes next         C: own tokens computed so far
    child    ───── shared ──────▶ | its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcache.core import Core, ForkOrigin, NewestState, TableChange
from kvcache.errors import RequestError
from kvcache.manager.request_table import KnownRequest, RequestTable
from kvcache.request import Request


class Forked(NamedTuple):
    """A child in its slot, and its tables."""

    known: KnownRequest
    changes: Sequence[TableChange]


class Forks:
    """Seats children beside their parents."""

    def __init__(self, table: RequestTable, core: Core) -> None:
        """Seat in `table`; `core` shares the blocks."""
        self._table = table
        self._core = core

    def seat(self, parent: KnownRequest, child: Request, num_tokens: int) -> Forked | None:
        """Let `child` start with the first `num_tokens` tokens of a running parent.

        None, unchanged, if no slot is free. Both have been checked.

        Raises:
            RequestError: the parent has no blocks for so many tokens; nothing was changed.
        """
        if not self._table.num_free:
            return None
        num_own = self._table.num_own(parent.slot)
        newest = NewestState(num_own, num_tokens - num_own)
        changes = self._core.fork(parent.request, child, ForkOrigin(num_tokens, newest))
        known = self._table.admit(child, parent.client_index, num_tokens, parent.num_encoder_tokens)
        child.num_computed_tokens = num_tokens
        return Forked(known, changes)

    def seat_copy(self, parent: KnownRequest, child_id: str) -> Forked | None:
        """Do `seat` with a child that has the parent's tokens, up to what is computed of them."""
        self._table.sync(parent.slot)
        request, num_computed = parent.request, self._table.num_computed(parent.slot)
        child = copied(request, child_id)
        return self.seat(parent, child, min(num_computed, request.num_tokens))


def copied(request: Request, request_id: str) -> Request:
    """Return a request with the tokens and all else of another one, nothing of it computed."""
    tokens = request.all_token_ids
    copy = Request(
        request_id,
        tokens[: request.num_prompt_tokens],
        lora=request.lora,
        mm_positions=request.mm_positions,
        mm_hashes=request.mm_hashes,
        cache_salt=request.cache_salt,
        skip_reading_prefix_cache=request.skip_reading_prefix_cache,
        block_hasher=request.block_hasher,
        tenant=request.namespace.tenant,
        model_epoch=request.namespace.model_epoch,
    )
    copy.append_output_token_ids(tokens[request.num_prompt_tokens :])
    return copy


def require_continuation(parent: Request, child: Request, max_model_len: int) -> None:
    """Raise RequestError unless `child` begins with all that is computed of `parent`."""
    what = f"request {child.request_id} cannot be forked from {parent.request_id}"
    num_computed = parent.num_computed_tokens
    if not num_computed:
        raise RequestError(
            f"{what}, of which nothing is computed: set its num_computed_tokens first"
        )
    if child.namespace != parent.namespace or _items(child, num_computed) != _items(
        parent, num_computed
    ):
        raise RequestError(
            f"{what}: its LoRA, salt, tenant, model epoch or images differ: make it with those of "
            "the parent"
        )
    if not num_computed <= child.num_tokens <= max_model_len:
        raise RequestError(
            f"{what}: it has {child.num_tokens} tokens, {num_computed} are computed of the parent "
            f"and the model takes {max_model_len}: give it at least the computed ones"
        )
    own, shared = child.all_token_ids[:num_computed], parent.all_token_ids[:num_computed]
    differs = np.flatnonzero(own != shared)
    if len(differs):
        place = int(differs[0])
        raise RequestError(
            f"{what}: token {place} is {int(own[place])}, that of the parent {int(shared[place])}: "
            f"begin with the {num_computed} computed tokens of the parent"
        )
    if child.num_computed_tokens not in (0, num_computed):
        raise RequestError(
            f"{what}: it has {child.num_computed_tokens} computed tokens, its parent "
            f"{num_computed}: leave them at 0"
        )


def _items(request: Request, num_tokens: int) -> list[tuple[int, int, str]]:
    """Return the multimodal items that reach into the first tokens."""
    items = zip(request.mm_positions, request.mm_hashes, strict=True)
    return [(p.offset, p.length, h) for p, h in items if p.offset < num_tokens]
