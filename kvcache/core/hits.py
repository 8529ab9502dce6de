"""Hits: how much of a prompt is cached for a request.

A walk follows the prompt down the tree while the tokens match and every prefix group has its
blocks. Then each other kind shortens the hit to its own longest one, by its rule (`kinds/`), until
all kinds agree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from kvcache.base.errors import RequestError
from kvcache.core.columns import columns_of, search_of
from kvcache.core.kinds.registry import first_read, longest
from kvcache.core.kinds.rule import FULL, KIND, LENGTH, SIZE, STATE
from kvcache.core.machine import CORE, INT, INTS, address_of, inner, kernel, routine
from kvcache.core.names import *
from kvcache.core.prefix_tree import are_tokens, find_child, is_sealed, is_visible
from kvcache.requests.request import Request


class GroupPath(NamedTuple):
    """The blocks of group `g` on the last walk's path of `depth` units, as a client sees them."""

    core: Any
    g: int
    depth: int
    client: int


@inner
def is_cached(blocks: Any, i: int) -> bool:
    """Return whether block `i` of a group can be hit."""
    c = columns_of(blocks.core)
    s = search_of(blocks.core)
    unit = (i + 1) * c.group[blocks.g, LENGTH] - 1
    if unit >= blocks.depth:
        return False
    n = s.path[unit]
    owner = np.int64(c.node[n, OWNER + 2 * blocks.g])
    if c.node[n, BLOCK + 2 * blocks.g] == 0 or not is_visible(blocks.core, owner, blocks.client):
        return False
    # A forward reads its initial state before any row of its step writes one.
    return (
        c.group[blocks.g, KIND] != STATE
        or owner < c.number[OPENED]
        or is_sealed(blocks.core, owner)
    )


@routine
def walk(
    core: Any, root: int, client: int, first: int, other: int, keys: Any, tokens: Any, limit: int
) -> int:
    """Write the nodes of the longest matching path to `path`, as far as every prefix group has its
    blocks; return its length in units, at most `limit`.

    `keys` has the extra keys of each unit. If it is empty, the first unit has `first`, all others
    have `other`.
    """
    c = columns_of(core)
    s = search_of(core)
    node, path, unit, num_groups = c.node, s.path, c.tokens.shape[1], len(c.group)
    n, u, is_each = np.int64(root), np.int64(0), len(keys) > 0
    has_prefix_groups, sealed_below = c.number[NUM_PREFIX_GROUPS] > 0, c.number[SEALED_BELOW]
    at = address_of(tokens, 0)
    while u < limit:
        own = np.int64(keys[u]) if is_each else (first if u == 0 else other)
        # The first part of `find_child`, inlined: it nearly always suffices.
        parent, n = n, np.int64(node[n, CHILD])
        if n == 0 or (node[n, KEYS] >> 1) != own or not are_tokens(c.tokens, n, at):
            n = find_child(core, parent, own, at)
        if n == 0:
            break
        if has_prefix_groups:
            is_whole = True
            for g in range(num_groups):
                length = np.int64(c.group[g, LENGTH])
                if c.group[g, KIND] == FULL and (length == 1 or (u + 1) % length == 0):
                    owner = node[n, OWNER + 2 * g]
                    if node[n, BLOCK + 2 * g] == 0 or (
                        owner >= sealed_below and not is_visible(core, owner, client)
                    ):
                        is_whole = False
            if not is_whole:
                break
        path[u] = n
        u += 1
        at += 4 * unit
    return u


@routine
def fit(core: Any, depth: int, max_tokens: int, client: int) -> int:
    """Return the number of tokens of a path that all groups can reuse, at most `max_tokens`. Write
    their blocks to `found`, null for those that are not read."""
    c = columns_of(core)
    s = search_of(core)
    unit, num_groups, step = c.tokens.shape[1], len(c.group), c.number[STEP_TOKENS]
    length = max_tokens
    if c.number[NUM_PREFIX_GROUPS]:
        length = min(length, depth * unit)
    length -= length % step
    extra = step if c.number[IS_EAGLE] else np.int64(0)
    num_others, num_agreed, g = num_groups - c.number[NUM_PREFIX_GROUPS], np.int64(0), np.int64(0)
    while length > 0 and num_agreed < num_others:
        if c.group[g, KIND] != FULL:
            size, blocks = np.int64(c.group[g, SIZE]), GroupPath(core, g, depth, client)
            end = longest(
                c.group[g], is_cached, blocks, length // size, step // size, extra // size
            )
            num_agreed = num_agreed + 1 if end * size == length else np.int64(1)
            length = end * size
        g = g + 1 if g + 1 < num_groups else np.int64(0)
    whole = length
    length = max(np.int64(0), length - extra)
    for g in range(num_groups):
        size, of_block = np.int64(c.group[g, SIZE]), np.int64(c.group[g, LENGTH])
        end = length // size
        start = min(end, first_read(c.group[g], whole // size, extra // size))
        for i in range(start):
            s.found[g, i] = 0
        for i in range(start, end):
            s.found[g, i] = c.node[s.path[(i + 1) * of_block - 1], BLOCK + 2 * g]
    return length


@routine
def find(
    core: Any, root: int, client: int, first: int, other: int, keys: Any, tokens: Any, limit: int
) -> Any:
    """Write a hit to `found`, and its nodes to `path`. Return how many of the first `limit` tokens
    are a hit (see `fit`), and how many units of them are in the tree. Without a root nothing is
    cached, and only groups that need no block can hit."""
    unit, depth = columns_of(core).tokens.shape[1], np.int64(0)
    if root:
        depth = walk(core, root, client, first, other, keys, tokens, limit // unit)
    length = fit(core, depth, limit, client)
    return length, min(depth, length // unit)


@routine
def are_found(core: Any, length: int, ids: Any) -> bool:
    """Return whether `ids` are the blocks of `length` tokens in `found`, group after group."""
    c, s = columns_of(core), search_of(core)
    at = np.int64(0)
    for g in range(len(c.group)):
        end = length // c.group[g, SIZE]
        if at + end > len(ids):
            return False
        for i in range(end):
            if ids[at + i] != s.found[g, i]:
                return False
        at += end
    return at == len(ids)


@kernel(types.UniTuple(INT, 2), CORE, INT, INT, INT, INT, INTS, INTS, INT)
def look_up(
    core: Any, root: int, client: int, first: int, other: int, keys: Any, tokens: Any, limit: int
) -> Any:
    """Do `find`."""
    return find(core, root, client, first, other, keys, tokens, limit)


def stale_hit(request: Request, num_tokens: int) -> RequestError:
    """Return the error for a hit that a look-up does not find any more."""
    return RequestError(
        f"request {request.request_id}: the cache has changed since its {num_tokens} computed "
        "tokens were found: call get_computed_blocks again"
    )
