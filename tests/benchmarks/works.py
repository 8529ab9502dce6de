"""The manager's workloads: what each row measures, on what, and what it should reach."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.benchmarks.side_setup import Setup

PROMPT_TOKENS = 32_768
TRUNK_BLOCKS = 2048
CHURN_TURNS = 250
"""Turns of one repetition; the sides alternate between them."""


@dataclass(frozen=True)
class Work:
    """One row: a function of a suite on a setup, its arguments, and what it should reach.

    `bar`: for the reference core now. `goal`: for the fast core.
    """

    workload: str
    what: str
    setup: Setup
    function: str
    arguments: tuple[Any, ...] = ()
    bar: str = ""
    goal: str = ""
    unit: str = "s"
    repetitions: int = 15


@dataclass(frozen=True)
class Sizes:
    """How much of everything: a full run takes minutes, a smoke run seconds."""

    is_smoke: bool
    churn_turns: int

    def prompts(self, num_blocks: int = 20_000, **fields: Any) -> Setup:
        if self.is_smoke:
            return Setup("prompts", num_blocks // 20, prompt_tokens=2048, **fields)
        return Setup("prompts", num_blocks, prompt_tokens=PROMPT_TOKENS, **fields)

    def decoding(self, **fields: Any) -> Setup:
        return Setup("decoding", 20_000 if self.is_smoke else 300_000, **fields)

    def churn(self, **fields: Any) -> Setup:
        if self.is_smoke:
            return Setup("churn", 8_000, size=16, num_warm_up=16, **fields)
        return Setup("churn", 100_000, size=256, num_warm_up=1500, **fields)

    def hostile(self, **fields: Any) -> Setup:
        if self.is_smoke:
            return Setup("hostile", 2_000, size=64, **fields)
        return Setup("hostile", 20_000, size=TRUNK_BLOCKS, **fields)

    def events(self) -> Setup:
        """Digests that both sides compute alike, so that their payloads can be compared."""
        return Setup("events", 4096, PROMPT_TOKENS, has_events=True, hash_algorithm="sha256_cbor")

    def small(self) -> Setup:
        """The smaller pool of G."""
        return self.prompts(10_000)

    def large(self) -> Setup:
        """The larger pool of G, and M's."""
        return self.prompts(40_000 if self.is_smoke else 1_000_000)


def all_works(sizes: Sizes) -> list[Work]:
    """Return the rows of W1 to W9 and M, in the order of the table; G is made of pairs."""
    blocks = PROMPT_TOKENS // 16
    stored = f"build and encode BlockStored of {blocks} blocks"
    memory = f"metadata per block, {sizes.large().num_blocks:,} blocks all cached"
    return [
        *prompt_works(sizes),
        *decode_works(sizes),
        Work("w6", stored, sizes.events(), "encode_stored", goal=">= 35x"),
        *churn_works(sizes),
        *hybrid_works(sizes),
        *hostile_works(sizes),
        Work("m", memory, sizes.large(), "bytes_per_block", (), "", "<= 130 B", "B", 1),
    ]


def prompt_works(sizes: Sizes) -> list[Work]:
    setup, fast = sizes.prompts(), sizes.prompts(hash_algorithm="xxh3_128")
    rows = (
        # workload, what, function, arguments, bar, goal
        ("w1", "hash a fresh 32k prompt, sha256", "hash_fresh", (), "", ">= 2.5x"),
        ("w2", "look up a cached 32k prompt", "look_up_cached", (), ">= 4x", ">= 60x"),
        ("w2", "tokens to hit, cached, array input", "tokens_to_hit", (False,), "", ">= 150x"),
        ("w2", "tokens to hit, cached, list input", "tokens_to_hit", (True,), "", ">= 15x"),
        ("w3", "allocate 32k, evicting, hashed before", "allocate_hashed", (), ">= 4x", ">= 50x"),
        ("w3", "allocate 32k, evicting, hashing", "allocate_hashing", (), ">= 4x", ">= 4x"),
        ("w5", "free 2048 blocks", "free_prompt", (), ">= 2x", ">= 50x"),
    )
    works = [
        Work(workload, what, setup, function, arguments, bar, goal)
        for workload, what, function, arguments, bar, goal in rows
    ]
    return [*works, Work("w1", "hash a fresh 32k prompt, xxh3", fast, "hash_fresh", goal=">= 6x")]


def decode_works(sizes: Sizes) -> list[Work]:
    works = []
    for count, goal in ((256, ">= 25x"), (1024, ">= 40x"), (4096, ">= 50x")):
        if not sizes.is_smoke or count == 256:
            what = f"decode step, {count} requests"
            works += in_a_row_and_cold(
                Work("w4", what, sizes.decoding(), "decode", (count, 16), ">= 4x", goal)
            )
    return works


def in_a_row_and_cold(work: Work) -> list[Work]:
    """Return the row of 16 steps in a row, and the cold one, where the sides alternate by step."""
    what, arguments = f"{work.what}, step by step (cold)", (work.arguments[0], 1)
    cold = replace(work, what=what, arguments=arguments, bar="", goal="", repetitions=31)
    return [work, cold]


def churn_works(sizes: Sizes) -> list[Work]:
    rows = (
        ("array input", sizes.churn(), ">= 10x"),
        ("list input", sizes.churn(is_list=True), ">= 8x"),
        ("with events", sizes.churn(has_events=True), ">= 8x"),
    )
    return [
        churn_turns(Work("w7", what, setup, "serve", (), ">= 4x", goal), sizes.churn_turns)
        for what, setup, goal in rows
    ]


def churn_turns(work: Work, num_turns: int) -> Work:
    """Return the row that serves `num_turns` turns, part by part."""
    part = min(CHURN_TURNS, num_turns)
    what = f"churn, {part} of {num_turns} turns, {work.setup.size} running, {work.what}"
    return replace(work, what=what, arguments=(part,), repetitions=max(1, num_turns // part))


def hybrid_works(sizes: Sizes) -> list[Work]:
    prompts, decodes = sizes.prompts(is_hybrid=True), sizes.decoding(is_hybrid=True)
    works = []
    for count, goal in ((256, ">= 25x"), (1024, ">= 40x")):
        if not sizes.is_smoke or count == 256:
            what = f"hybrid: decode step, {count} requests"
            works += in_a_row_and_cold(Work("w8", what, decodes, "decode", (count, 16), goal=goal))
    rows = (
        ("look up a cached 32k prompt", "look_up_cached", ">= 50x"),
        ("allocate 32k, evicting, hashing", "allocate_hashing", ">= 3.5x"),
        ("allocate 32k, evicting, hashed before", "allocate_hashed", ">= 20x"),
        ("free a 32k prompt", "free_prompt", ">= 6x"),
    )
    works += [
        Work("w8", f"hybrid: {what}", prompts, function, goal=goal) for what, function, goal in rows
    ]
    turns = Work("w8", "hybrid", sizes.churn(is_hybrid=True), "serve", goal=">= 6x")
    return [*works, churn_turns(turns, sizes.churn_turns // 2)]


def hostile_works(sizes: Sizes) -> list[Work]:
    shapes = (
        # function, what, goal with full attention, goal of a hybrid
        ("random_depth", "branches at random depths", ">= 5x", ">= 4x"),
        ("comb", "comb, a branch at every depth", ">= 4x", ">= 2x"),
        ("star", "star, all branch after one block", ">= 3x", ">= 1.2x"),
    )
    arguments = (4 if sizes.is_smoke else 32,)
    full, hybrid = sizes.hostile(), sizes.hostile(is_hybrid=True)
    return [
        *(
            Work("w9", f"full: {what}", full, function, arguments, goal=goal)
            for function, what, goal, _ in shapes
        ),
        *(
            Work("w9", f"hybrid: {what}", hybrid, function, arguments, goal=goal)
            for function, what, _, goal in shapes
        ),
    ]
