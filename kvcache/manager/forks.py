"""Forking a request: the child starts with all computed tokens of its parent, in shared blocks.

Used by the per-request calls and by the batched step. A fork takes a slot but no block; the core
decides which blocks are shared and copies one before either request writes to it. A parent must
have blocks, that is be known and running. A child must continue its parent's computed tokens.

    parent   tokens 0 ......... C | what it computes next         C: own tokens computed so far
    child    ───── shared ──────▶ | its own
"""

from __future__ import annotations

import numpy as np

from kvcache.base.errors import RequestError
from kvcache.core import NewestState, TableChange
from kvcache.core.flat_core import FlatCore
from kvcache.manager.request_table import KnownRequest, RequestTable
from kvcache.requests.request import Request


def seat_fork(
    table: RequestTable, core: FlatCore, parent: KnownRequest, child: Request, num_tokens: int
) -> tuple[KnownRequest, list[TableChange]] | None:
    """Start `child` in its own slot with the first `num_tokens` tokens of a running parent.

    Returns the child and its tables, or None, unchanged, if no slot is free. The caller has checked
    both requests.

    Raises:
        RequestError: the parent has no blocks for so many tokens; nothing was changed.
    """
    if not table.num_free_slots:
        return None
    num_own = table.num_own(parent.slot)
    newest = NewestState(num_own, num_tokens - num_own)
    changes = core.fork(parent.request, child, num_tokens, newest)
    row = core.row_of(child.request_id)
    known = table.admit(child, parent.client_index, num_tokens, parent.num_encoder_tokens, row)
    child.num_computed_tokens = num_tokens
    return known, changes


def require_continuation(parent: Request, child: Request, max_model_len: int) -> None:
    """Raise RequestError unless `child` begins with all computed tokens of `parent`."""
    what = f"request {child.request_id} cannot be forked from {parent.request_id}"
    num_computed = parent.num_computed_tokens
    if not num_computed:
        raise RequestError(
            f"{what}, which has no computed tokens: set its num_computed_tokens first"
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
