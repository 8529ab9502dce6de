"""The rules of each attention kind alone: the longest hit, and skipped blocks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvcache.core.kinds.registry import longest_hit, next_skip, num_skipped, rule_of
from kvcache.core.kinds.rule import NEVER
from kvcache.core.machine import INT, INTS, kernel
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    ceil_div,
)
from tests.core.builders import chunked, cross, full, mamba, window

SPECS = {
    "full": full(4),
    "window 1": window(1),
    "window 6": window(6),
    "window 9/2": window(9, 2),
    "window 17": window(17),
    "chunk 8": chunked(8),
    "chunk 12/2": chunked(12, 2),
    "states": mamba(block_size=4),
    "one state": mamba("none"),
    "encoder": cross(),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def first_needed(spec: KVCacheSpec, end: int, extra: int) -> int:
    """Return the first block that must be there for a hit of `end` blocks."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, end - max(1, ceil_div(spec.sliding_window - 1, spec.block_size)) - extra)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        size, chunk = spec.block_size, spec.attention_chunk_size
        return end * size // chunk * chunk // size
    if isinstance(spec, MambaSpec):
        return end - 1
    return 0


def longest_of_all(
    spec: KVCacheSpec, there: list[bool], limit: int, step: int, extra: int
) -> range:
    """Try every length, the longest first."""
    for end in range(limit - limit % step, 0, -step) if not spec.keeps_encoder_tokens else ():
        start = first_needed(spec, end, extra)
        if all(there[start:end]):
            return range(start, end)
    return range(0)


@each_spec
def test_the_longest_hit_is_the_first_that_holds_of_all(spec: KVCacheSpec) -> None:
    rng = random.Random(5)
    for _ in range(400):
        there = [rng.random() < rng.choice((0.5, 0.8, 0.95)) for _ in range(rng.randint(0, 14))]
        limit, step = rng.randint(0, len(there)), rng.choice((1, 1, 2, 3))
        extra = rng.choice((0, step)) if spec.supports_eagle else 0
        found = longest_hit(
            spec, np.array(there, np.bool_), limit, num_extra_blocks=extra, alignment_blocks=step
        )
        expected = longest_of_all(spec, there, limit, step, extra)
        assert (found.start, found.stop) == (expected.start, expected.stop), (there, limit, step)


def test_a_hit_reaches_no_further_than_the_blocks_that_there_are() -> None:
    assert longest_hit(full(), np.ones(3, np.bool_), 9) == range(3)


@kernel(INT, INTS, INT)
def skipped_of(rule: Any, num_computed: int) -> int:
    return num_skipped(rule, num_computed)


@kernel(INT, INTS, INT)
def next_skip_of(rule: Any, num_kept: int) -> int:
    return next_skip(rule, num_kept)


@each_spec
def test_blocks_are_skipped_as_specs_say_and_when_it_is_foretold(spec: KVCacheSpec) -> None:
    rule = rule_of(spec, spec.block_size)
    kept = 0
    for computed in range(100):
        skipped = spec.num_skipped_tokens(computed) // spec.block_size
        assert skipped_of(rule, computed) == skipped
        assert (computed >= next_skip_of(rule, kept)) == (skipped > kept)
        kept = skipped
    assert next_skip_of(rule_of(full(), 4), 5) == NEVER
