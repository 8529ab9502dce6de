"""Chooses the rules of a group's attention kind.

Compiled functions branch on the rule's KIND. They call `is_cached(blocks, i)` to ask whether block
`i` can be hit; the core answers from its tree, `longest_hit` from an array. A kind without rules is
refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvcache.base.compiled import array_type
from kvcache.base.errors import ConfigurationError
from kvcache.core.kinds import (
    chunked_local_attention,
    cross_attention,
    full_attention,
    mamba,
    sliding_window,
)
from kvcache.core.kinds.rule import (
    CHUNK,
    COLUMN,
    ENCODER,
    EXTRA,
    FULL,
    KIND,
    LENGTH,
    NEVER,
    NUM_ENTRIES,
    SIZE,
    SPAN,
    STATE,
    WINDOW,
)
from kvcache.core.machine import INT, INTS, inner, kernel, routine
from kvcache.specs import ChunkedLocalAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec


@routine
def num_skipped(rule: Any, num_computed: int) -> int:
    """Return how many leading blocks no token after `num_computed` reads."""
    if rule[KIND] == WINDOW:
        return sliding_window.num_skipped(rule, num_computed)
    if rule[KIND] == CHUNK:
        return chunked_local_attention.num_skipped(rule, num_computed)
    if rule[KIND] == STATE:
        return mamba.num_skipped(rule, num_computed)
    return full_attention.num_skipped(rule, num_computed)


@routine
def next_skip(rule: Any, num_kept: int) -> int:
    """Return the number of computed tokens at which the next block after `num_kept` is skipped."""
    if rule[KIND] == WINDOW:
        return sliding_window.next_skip(rule, num_kept)
    if rule[KIND] == CHUNK:
        return chunked_local_attention.next_skip(rule, num_kept)
    if rule[KIND] == STATE:
        return mamba.next_skip(rule, num_kept)
    return full_attention.next_skip(rule, num_kept)


@inner
def longest(rule: Any, is_cached: Any, blocks: Any, limit: int, step: int, extra: int) -> int:
    """Return the end of a group's longest hit, in blocks: a multiple of `step`, at most `limit`.
    The hit must still be valid after its last `extra` blocks are dropped."""
    if rule[KIND] == WINDOW:
        return sliding_window.longest(rule, is_cached, blocks, limit, step, extra)
    if rule[KIND] == CHUNK:
        return chunked_local_attention.longest(rule, is_cached, blocks, limit, step)
    if rule[KIND] == STATE:
        return mamba.longest(is_cached, blocks, limit, step)
    if rule[KIND] == ENCODER:
        return np.int64(0)
    return full_attention.longest(rule, is_cached, blocks, limit, step)


@routine
def first_read(rule: Any, end: int, extra: int) -> int:
    """Return the first block that is read of a hit that ends at `end` before its last `extra`
    blocks are dropped."""
    if rule[KIND] == WINDOW:
        return sliding_window.first_read(rule, end, extra)
    if rule[KIND] == CHUNK:
        return chunked_local_attention.first_read(rule, end)
    if rule[KIND] == STATE:
        return mamba.first_read(end)
    return full_attention.first_read(rule, end)


@routine
def num_columns(rule: Any, num_slots: int, num_own: int, num_encoder: int) -> int:
    """Return the length of a table with slots for `num_slots` tokens, for a forward that ends after
    `num_own` own tokens, with `num_encoder` encoder tokens."""
    if rule[KIND] == STATE:
        return mamba.num_columns(rule, num_own)
    if rule[KIND] == ENCODER:
        return cross_attention.num_columns(rule, num_encoder)
    return (num_slots + rule[SIZE] - 1) // rule[SIZE]


@inner
def _is_marked(there: Any, i: int) -> bool:
    return there[i] != 0


@kernel(
    types.UniTuple(INT, 2), INTS, array_type("uint8", is_read=True), INT, INT, INT,
    checks_types=True,
)  # fmt: skip
def _longest_read(rule: Any, there: Any, limit: int, step: int, extra: int) -> Any:
    end = longest(rule, _is_marked, there, min(limit, len(there)), step, extra)
    return first_read(rule, end, extra), end


def longest_hit(
    spec: KVCacheSpec,
    is_cached: npt.NDArray[np.bool_],
    max_blocks: int,
    *,
    num_extra_blocks: int = 0,
    alignment_blocks: int = 1,
) -> range:
    """Return the blocks `[start, end)` that a request reads of its longest hit in one group. Blocks
    before `start` are null.

    `is_cached[i]` says whether block `i` can be hit, shape `(blocks,)`. The hit has at most
    `max_blocks` blocks, a multiple of `alignment_blocks`. It must still be valid after the caller
    drops its last `num_extra_blocks`.

    Raises:
        ConfigurationError: the spec's kind has no rules.
    """
    rule = rule_of(spec, spec.block_size)
    there = np.ascontiguousarray(is_cached, np.bool_).view(np.uint8)
    start, end = _longest_read(rule, there, max_blocks, alignment_blocks, num_extra_blocks)
    return range(int(start), int(end))


def rule_of(spec: KVCacheSpec, unit_tokens: int) -> npt.NDArray[np.int32]:
    """Return the rule of a spec; raises ConfigurationError for a kind without rules."""
    rule = np.zeros(NUM_ENTRIES, np.int32)
    rule[SIZE] = rule[COLUMN] = spec.block_size
    rule[LENGTH] = spec.block_size // unit_tokens
    if spec.reads_whole_prefix:
        rule[KIND] = FULL
    elif isinstance(spec, SlidingWindowSpec):
        rule[KIND], rule[SPAN] = WINDOW, min(spec.sliding_window, NEVER)
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        rule[KIND], rule[SPAN] = CHUNK, min(spec.attention_chunk_size, NEVER)
    elif isinstance(spec, MambaSpec):
        rule[KIND], rule[EXTRA] = STATE, spec.num_speculative_blocks
        if spec.mamba_cache_mode == "none":
            rule[COLUMN] = NEVER
    elif spec.keeps_encoder_tokens:
        # A request's own tokens need no column: even an empty table has room for NEVER tokens.
        rule[KIND], rule[COLUMN], rule[EXTRA] = ENCODER, NEVER, -1
    else:
        raise ConfigurationError(
            f"core 'flat' has no rules for KV cache groups of kind {spec.kind!r}: use a spec of a "
            "kind that it knows"
        )
    return rule
