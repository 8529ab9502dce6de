"""The manager's workloads: what each row measures, its setup, and its goal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bench.side_setup import Setup

PROMPT_TOKENS = 32_768
SHORT_TOKENS = (64, 256, 2048)
"""Of prompts for which a call has little to do: 4, 16 and 128 blocks."""
SHORT_AT_ONCE = 16
"""Short prompts that run, or come in a step, at the same time."""

TRUNK_BLOCKS = 2048
IN_A_ROW = 16
"""Calls before the next side takes its turn."""
STEPS_IN_A_ROW = 64
"""Decode steps before the next side takes its turn: each request fills four blocks in them, the
first with what it has in memory gone from the processor's caches."""
MAX_HYBRID_TURNS = 5_000
"""Turns of W8's churn. All conversations grow: with 80,000 blocks for two groups those that run
have no room any more after about 8,000."""

CHURN_TURNS = 250
"""Turns of one repetition; the sides alternate between them."""


@dataclass(frozen=True)
class Work:
    """One row: a function of a suite on a setup, its arguments, and its goal."""

    workload: str
    what: str
    setup: Setup
    function: str
    arguments: tuple[Any, ...] = ()
    goal: str = ""
    unit: str = "s"
    repetitions: int = 15


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run: a full run takes an hour, a smoke run seconds."""

    is_smoke: bool
    churn_turns: int
    flat_requests: int

    def prompts(self, num_blocks: int = 20_000, **fields: Any) -> Setup:
        if self.is_smoke:
            return Setup("prompts", num_blocks // 10, prompt_tokens=2048, **fields)
        return Setup("prompts", num_blocks, prompt_tokens=PROMPT_TOKENS, **fields)

    def short_prompts(self, prompt_tokens: int) -> Setup:
        if self.is_smoke:
            return Setup("short", 2_000, prompt_tokens, size=4)
        return Setup("short", 20_000, prompt_tokens, size=SHORT_AT_ONCE)

    def decoding(self, **fields: Any) -> Setup:
        return Setup("decoding", 40_000 if self.is_smoke else 400_000, **fields)

    def churn(self, num_blocks: int = 100_000, **fields: Any) -> Setup:
        if self.is_smoke:
            return Setup("churn", num_blocks // 12, size=16, num_warm_up=16, **fields)
        return Setup("churn", num_blocks, size=256, num_warm_up=1500, **fields)

    def flat(self) -> Setup:
        """Small enough to be full, and to evict, before anything is counted."""
        warm_up = 640 if self.is_smoke else 6_400
        return Setup("flat", 2_500 if self.is_smoke else 10_000, size=64, num_warm_up=warm_up)

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
    """Return the rows of W1 to W10 and M, in the order of the table; G is made of pairs."""
    blocks = PROMPT_TOKENS // 16
    stored = f"build and encode BlockStored of {blocks} blocks"
    memory = f"metadata per block, {sizes.large().num_blocks:,} blocks all cached"
    return [
        *prompt_works(sizes),
        *decode_works(sizes),
        *hot_and_cold(
            Work("w6", stored, sizes.events(), "encode_stored", (IN_A_ROW,), goal=">= 35x")
        ),
        *churn_works(sizes),
        *hybrid_works(sizes),
        *hostile_works(sizes),
        *short_works(sizes),
        Work("m", memory, sizes.large(), "bytes_per_block", (), "<= 145 B", "B", 1),
    ]


def prompt_works(sizes: Sizes) -> list[Work]:
    setup, fast = sizes.prompts(), sizes.prompts(hash_algorithm="xxh3_128")
    many = IN_A_ROW
    rows = (
        # workload, what, function, arguments, goal
        ("w1", "hash a fresh 32k prompt, sha256", "hash_fresh", (), ">= 10x"),
        ("w2", "look up a cached 32k prompt", "look_up_cached", (many,), ">= 60x"),
        ("w2", "tokens to hit, cached, array input", "tokens_to_hit", (False, many), ">= 150x"),
        ("w2", "tokens to hit, cached, list input", "tokens_to_hit", (True, many), ">= 15x"),
        (
            "w3",
            "allocate 32k, evicting, hashed before",
            "allocate_hashed",
            (many,),
            ">= 45x",
        ),
        ("w3", "allocate 32k, evicting, hashing", "allocate_hashing", (many,), ">= 20x"),
        ("w5", "free 2048 blocks", "free_prompt", (many,), ">= 20x"),
    )
    works = [
        Work(workload, what, setup, function, arguments, goal)
        for workload, what, function, arguments, goal in rows
    ]
    pairs = [hot_and_cold(work) if work.arguments else [work] for work in works]
    works = [work for pair in pairs for work in pair]
    return [*works, Work("w1", "hash a fresh 32k prompt, xxh3", fast, "hash_fresh", goal=">= 10x")]


def decode_works(sizes: Sizes) -> list[Work]:
    works = []
    for count, goal in ((256, ">= 40x"), (1024, ">= 120x"), (4096, ">= 130x")):
        if not sizes.is_smoke or count == 256:
            what = f"decode step, {count} requests"
            works += in_a_row_and_cold(
                Work("w4", what, sizes.decoding(), "decode", (count, STEPS_IN_A_ROW), goal)
            )
    return works


def in_a_row_and_cold(work: Work) -> list[Work]:
    """Return the row of steps in a row, and the cold one, where the sides alternate by step."""
    hot, cold = hot_and_cold(work)
    return [hot, replace(cold, goal="", repetitions=31)]


def hot_and_cold(work: Work) -> list[Work]:
    """Return the row of calls in a row, and that of single ones. Both have to reach the goal:
    a scheduler looks a prompt up once, with other data in the processor's caches."""
    what, arguments = f"{work.what}, one at a time (cold)", (*work.arguments[:-1], 1)
    return [work, replace(work, what=what, arguments=arguments)]


def churn_works(sizes: Sizes) -> list[Work]:
    rows = (
        ("array input", sizes.churn(), ">= 20x"),
        ("list input", sizes.churn(is_list=True), ">= 10x"),
        ("with events", sizes.churn(has_events=True), ">= 10x"),
    )
    return [
        churn_turns(Work("w7", what, setup, "serve", (), goal), sizes.churn_turns)
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
            works += in_a_row_and_cold(
                Work("w8", what, decodes, "decode", (count, STEPS_IN_A_ROW), goal=goal)
            )
    rows = (
        ("look up a cached 32k prompt", "look_up_cached", IN_A_ROW, ">= 50x"),
        ("allocate 32k, evicting, hashing", "allocate_hashing", IN_A_ROW, ">= 3.5x"),
        ("allocate 32k, evicting, hashed before", "allocate_hashed", IN_A_ROW, ">= 20x"),
        ("free a 32k prompt", "free_prompt", IN_A_ROW, ">= 6x"),
    )
    for what, function, times, goal in rows:
        call = Work("w8", f"hybrid: {what}", prompts, function, (times,), goal=goal)
        works += in_a_row_and_cold(call)
    for num_blocks in (100_000, 80_000):
        churn = sizes.churn(num_blocks, is_hybrid=True)
        what = f"hybrid, {churn.num_blocks:,} blocks"
        turns = Work("w8", what, churn, "serve", goal=">= 25x; hit tokens -0.2 % at most")
        works.append(churn_turns(turns, min(MAX_HYBRID_TURNS, sizes.churn_turns // 2)))
    return works


def hostile_works(sizes: Sizes) -> list[Work]:
    shapes = (
        # function, what, goal with full attention, goal of a hybrid
        ("random_depth", "branches at random depths", ">= 60x", ">= 60x"),
        ("comb", "comb, a branch at every depth", ">= 30x", ">= 30x"),
        ("star", "star, all branch after one block", ">= 5x", ">= 5x"),
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


def short_works(sizes: Sizes) -> list[Work]:
    """Return the cost of short prompts, where large strides gain little, by call and by step."""
    works = []
    for num_tokens in SHORT_TOKENS:
        setup = sizes.short_prompts(num_tokens)
        many = setup.size
        all_in_all = ("all in all (look up, allocate, free)", "all_calls", (), ())
        rows = (
            # what, function, arguments before and after the kind of prompt
            ("look up", "call", ("look_up",), ()),
            ("allocate", "call", ("allocate",), ()),
            ("free", "call", ("free",), ()),
            all_in_all,
            ("all in all, request and hashes included", "from_tokens", (), ()),
            (f"in a step that admits {many}", "step", ("admit",), (many,)),
            (f"in a step that ends {many}", "step", ("end",), (many,)),
            (f"in steps of {many}, all in all", "step", ("both",), (many,)),
            ("in steps of one, all in all", "step", ("both",), (1,)),
        )
        for kind, rows_of_kind in (("fresh", rows), ("cached", rows), ("repeated", (all_in_all,))):
            for what, function, before, after in rows_of_kind:
                name = f"{num_tokens:,} {kind} tokens: {what}"
                is_hardest = name.startswith("64 cached") and function == "all_calls"
                goal = ">= 2x" if is_hardest else ">= 1.5x"
                arguments = (*before, kind, *after)
                works.append(
                    Work("w10", name, setup, function, arguments, goal=goal, repetitions=31)
                )
    return works
