"""The prefix tree: each node is one unit of tokens that continues its parent.

*Finding a child.* CHILD is one child of a node, and most nodes have no other. Then a look-up step
is one pointer and one comparison of the unit's tokens. All other children are in `index`. Tokens
are always compared, so a match is exact, and plain prompts need no digest. Extra keys (adapter,
salt, multimodal items) are numbers and are compared as well.

*Lifetime.* A node lives while it has a block, a child, or a row whose newest node it is. When it
loses the last of them it is removed, and then perhaps its parent. A root, one per namespace, lives
until Python drops it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.base.compiled import IS_PLAIN
from kvcache.core.columns import columns_of, logs_of, search_of
from kvcache.core.machine import (
    CORE,
    INT,
    INTS,
    NOTHING,
    address_of,
    are_same,
    are_same_64,
    copy,
    inner,
    int32_at,
    kernel,
    routine,
)
from kvcache.core.names import *


@inner
def _compiled_mix(seed: int, parent: int, keys: int, at: int, unit: int) -> int:
    k = np.uint64(0x9E3779B97F4A7C15)
    h = (np.uint64(seed) ^ np.uint64(parent)) * k
    h = (h ^ np.uint64(keys)) * k
    for j in range(unit):
        h = (h ^ np.uint64(int32_at(at + 4 * j))) * k
        h ^= h >> np.uint64(29)
    return np.int64(h >> np.uint64(20))


def _plain_mix(seed: int, parent: int, keys: int, at: int, unit: int) -> int:
    k, most = 0x9E3779B97F4A7C15, (1 << 64) - 1
    h = ((int(seed) ^ int(parent)) * k) & most
    h = ((h ^ int(keys)) * k) & most
    for j in range(int(unit)):
        h = ((h ^ int32_at(int(at) + 4 * j)) * k) & most
        h ^= h >> 29
    return h >> 20


mix: Any = _plain_mix if IS_PLAIN else _compiled_mix
"""The hash of a child, where its search in `index` begins. It is seeded, so that no client can
provoke collisions. Without a seed, and with the parent's name, it is the name of a prefix."""


@inner
def are_tokens(own: Any, n: int, at: int) -> bool:
    """Return whether line `n` of `own`, a node's tokens, equals the tokens at an address."""
    line, size = address_of(own, n), 4 * own.shape[1]
    return are_same_64(line, at) if size == 64 else are_same(line, at, size)


@inner
def is_child(core: Any, n: int, keys: int, at: int) -> bool:
    """Return whether node `n`, a child of the right parent, has these extra keys and the tokens at
    an address."""
    c = columns_of(core)
    return (c.node[n, KEYS] >> 1) == keys and are_tokens(c.tokens, n, at)


@routine
def find_in_index(core: Any, parent: int, keys: int, at: int) -> int:
    """Return the child that is in `index`, or 0."""
    c = columns_of(core)
    s = search_of(core)
    last = len(s.index) - 1
    i = mix(c.number[SEED], parent, keys, at, c.tokens.shape[1]) & last
    while s.index[i]:
        n = np.int64(s.index[i])
        if c.node[n, PARENT] == parent and is_child(core, n, keys, at):
            return n
        i = (i + 1) & last
    return np.int64(0)


@inner
def find_child(core: Any, parent: int, keys: int, at: int) -> int:
    """Return the child of `parent` with these extra keys and the tokens at an address, or 0."""
    c = columns_of(core)
    n = np.int64(c.node[parent, CHILD])
    if n and is_child(core, n, keys, at):
        return n
    if c.node[parent, CHILDREN] > (1 if n else 0):
        return find_in_index(core, parent, keys, at)
    return np.int64(0)


@inner
def new_node(core: Any) -> int:
    """Return an unused node, or 0 if none is left."""
    c = columns_of(core)
    node, number = c.node, c.number
    n = number[SPARE_NODE]
    if n:
        number[SPARE_NODE] = node[n, CHILD]
        number[NUM_SPARE] -= 1
    else:
        n = number[NEXT_NODE]
        if n >= len(node):
            return np.int64(0)
        number[NEXT_NODE] = n + 1
    for i in range(node.shape[1]):
        node[n, i] = 0
    return n


@routine
def _home(core: Any, n: int) -> int:
    """Return the position in `index` where the search for a node begins."""
    c = columns_of(core)
    at, unit = address_of(c.tokens, n), c.tokens.shape[1]
    keys, last = np.int64(c.node[n, KEYS]) >> 1, len(search_of(core).index) - 1
    return mix(c.number[SEED], c.node[n, PARENT], keys, at, unit) & last


@inner
def _enter(core: Any, n: int) -> None:
    """Put a node into `index`."""
    s = search_of(core)
    last = len(s.index) - 1
    i = _home(core, n)
    while s.index[i]:
        i = (i + 1) & last
    s.index[i] = n


@routine
def add_child(core: Any, parent: int, keys: int, at: int) -> int:
    """Add a child to `parent` with these extra keys and the tokens at an address; return it, or 0
    if no node is left. There is no such child yet."""
    c = columns_of(core)
    n = new_node(core)
    if n == 0:
        return n
    c.node[n, PARENT] = parent
    c.node[n, KEYS] = 2 * keys
    copy(address_of(c.tokens, n), at, c.tokens.shape[1] * 4)
    if c.number[HAS_POLICY] or c.number[LOGS_USES]:
        name = search_of(core).name
        name[n] = mix(np.int64(0), name[parent], keys, at, c.tokens.shape[1])
    c.node[parent, CHILDREN] += 1
    if c.node[parent, CHILD] == 0:
        c.node[parent, CHILD] = n
    else:
        _enter(core, n)
        c.number[NUM_INDEXED] += 1
    return n


@routine
def remove_from_index(core: Any, n: int) -> None:
    """Remove a node from `index`. Later entries move up, so that no search ends too early."""
    c = columns_of(core)
    s = search_of(core)
    last, i = len(s.index) - 1, _home(core, n)
    while s.index[i] != n:
        i = (i + 1) & last
    then = (i + 1) & last
    while s.index[then]:
        m = np.int64(s.index[then])
        if ((then - _home(core, m)) & last) >= ((then - i) & last):
            s.index[i] = m
            i = then
        then = (then + 1) & last
    s.index[i] = 0
    c.number[NUM_INDEXED] -= 1


@routine
def prune(core: Any, n: int) -> None:
    """Remove a node if nothing keeps it alive, and then its parents likewise."""
    c = columns_of(core)
    node, number, num_groups = c.node, c.number, len(c.group)
    while node[n, PARENT] and node[n, CHILDREN] == 0 and node[n, ROWS] == 0:
        for g in range(num_groups):
            if node[n, BLOCK + 2 * g]:
                return
        parent = np.int64(node[n, PARENT])
        if node[parent, CHILD] == n:
            node[parent, CHILD] = 0
        else:
            remove_from_index(core, n)
        node[parent, CHILDREN] -= 1
        node[n, PARENT] = 0
        node[n, CHILD] = number[SPARE_NODE]
        number[SPARE_NODE] = n
        number[NUM_SPARE] += 1
        n = parent


@routine
def is_sealed(core: Any, owner: int) -> bool:
    """Return whether the step with serial `owner` is complete."""
    c = columns_of(core)
    s = search_of(core)
    return owner < c.number[SEALED_BELOW] or s.client[owner & (NUM_STEPS - 1)] == 0


@inner
def is_visible(core: Any, owner: int, client: int) -> bool:
    """Return whether a client may hit blocks that the step with serial `owner` made hittable."""
    c = columns_of(core)
    s = search_of(core)
    if owner < c.number[SEALED_BELOW]:
        return True
    whose = s.client[owner & (NUM_STEPS - 1)]
    return whose == 0 or whose == client


@routine
def forget_content(core: Any, b: int) -> None:
    """Drop a block's content and its entry in the node. The caller moves it in the free list."""
    c = columns_of(core)
    node, number = c.node, c.number
    n = np.int64(c.block[b, NODE])
    c.block[b, NODE] = 0
    for g in range(len(c.group)):
        if node[n, BLOCK + 2 * g] == b:
            if number[LOGS_GONE]:
                _note_gone(core, n, g)
            node[n, BLOCK + 2 * g] = 0
            node[n, OWNER + 2 * g] = 0
            break
    if node[n, CHILDREN] == 0 and node[n, ROWS] == 0:
        prune(core, n)


@routine
def _note_gone(core: Any, n: int, g: int) -> None:
    """Log in `gone` that a node loses its block of group `g`, if that block was sealed."""
    c = columns_of(core)
    s = search_of(core)
    log = logs_of(core)
    at = c.number[NUM_GONE]
    if not is_sealed(core, c.node[n, OWNER + 2 * g]):
        return
    if at >= len(log.gone):
        c.number[IS_FULL] = 1
        return
    log.gone[at, 0], log.gone[at, 1] = c.node[n, BLOCK + 2 * g], g
    copy(address_of(log.gone_digest, at), address_of(s.digest, n), s.digest.shape[1])
    c.number[NUM_GONE] = at + 1


@kernel(INT, CORE)
def new_root(core: Any) -> int:
    """Make a node without a parent; return it, or 0 if no node is left."""
    n = new_node(core)
    search_of(core).name[n] = 0
    return n


@kernel(NOTHING, CORE, INT)
def drop_root(core: Any, n: int) -> None:
    """Give back a root that has no child and is no row's newest node."""
    c = columns_of(core)
    c.node[n, CHILD] = c.number[SPARE_NODE]
    c.number[SPARE_NODE] = n
    c.number[NUM_SPARE] += 1


@kernel(INT, CORE, INT, INT, INTS)
def child_of(core: Any, parent: int, keys: int, tokens: Any) -> int:
    """Return the child with these extra keys and tokens, or 0."""
    return find_child(core, parent, keys, address_of(tokens, 0))


@kernel(INT, CORE, INT, INT, INTS)
def get_or_add_child(core: Any, parent: int, keys: int, tokens: Any) -> int:
    """Return the child with these extra keys and tokens, new if necessary; 0: no node is left."""
    n = find_child(core, parent, keys, address_of(tokens, 0))
    return n if n else add_child(core, parent, keys, address_of(tokens, 0))


@kernel(NOTHING, CORE)
def rebuild_index(core: Any) -> None:
    """Put all nodes that are not their parent's CHILD into an empty `index`."""
    c = columns_of(core)
    for n in range(1, c.number[NEXT_NODE]):
        parent = c.node[n, PARENT]
        if parent and c.node[parent, CHILD] != n:
            _enter(core, n)


@kernel(NOTHING, CORE, INT, INT, INT)
def put_block(core: Any, n: int, g: int, b: int) -> None:
    """Give node `n` a sealed block of a group in which it has none."""
    c = columns_of(core)
    c.node[n, BLOCK + 2 * g] = b
    c.node[n, OWNER + 2 * g] = 0
    c.block[b, NODE] = n
