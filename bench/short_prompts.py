"""Prompts of a few blocks, by their cached part; W10. Runs in either environment.

    fresh       nothing
    cached      every block; one token more is new
    repeated    every block, and nothing is new: a hit never covers the last token, so the last
                block is computed again

The pool is always full: the least recently used blocks are evicted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
from side_setup import BLOCK_SIZE, Setup
from stopwatch import now_s
from workloads import VOCABULARY, Manager

FRESH, CACHED, REPEATED = "fresh", "cached", "repeated"
NO_ROWS = np.zeros(0, bool)
NO_TOKENS = np.zeros(0, np.int32)


class ShortPrompts:
    """`setup.size` prompts of `setup.prompt_tokens` tokens at a time.

    Every function returns the seconds for one prompt. Unless it starts from tokens, what the
    manager needs of the prompt's digests is computed before, outside the timer.
    """

    def __init__(self, make_manager: Any, setup: Setup) -> None:
        self.manager: Manager = make_manager(setup)
        self.num_prompts = setup.size
        self.prompt_tokens = setup.prompt_tokens
        self.random = np.random.default_rng(5)
        self.num_named = 0
        self.cached = self._fresh()
        num_rounds = setup.num_blocks * BLOCK_SIZE // (setup.prompt_tokens * setup.size)
        for _ in range(2 + num_rounds):
            self._serve(self._fresh())
        self._serve(self.cached)
        self._serve(self._prompts(CACHED))
        gc.collect()
        gc.freeze()

    def call(self, name: str, kind: str) -> float:
        """Time one of `look_up`, `allocate` and `free`, each called for all prompts in turn."""
        requests = self._requests(kind)
        start = now_s()
        hits = [self.manager.look_up(request) for request in requests]
        looked_up = now_s()
        for request, hit in zip(requests, hits, strict=True):
            self.manager.allocate(request, self.prompt_tokens, hit)
        allocated = now_s()
        for request in requests:
            self.manager.free(request)
        freed = now_s()
        self._end_round(kind, sum(hit[1] for hit in hits))
        taken = {"look_up": looked_up - start, "allocate": allocated - looked_up}
        taken["free"] = freed - allocated
        return taken[name] / self.num_prompts

    def all_calls(self, kind: str) -> float:
        """Time the three calls, one prompt after the other."""
        requests = self._requests(kind)
        num_hit_tokens = 0
        start = now_s()
        for request in requests:
            hit = self.manager.look_up(request)
            self.manager.allocate(request, self.prompt_tokens, hit)
            self.manager.free(request)
            num_hit_tokens += hit[1]
        taken = now_s() - start
        self._end_round(kind, num_hit_tokens)
        return taken / self.num_prompts

    def from_tokens(self, kind: str) -> float:
        """Time request objects, digests and the three calls, one prompt after the other.

        Digests of fresh prompts are computed on every side, because tiers and routers know new
        blocks by them; digests of cached ones only where the manager finds blocks by them.
        """
        prompts = [self.manager.tokens(tokens, False) for tokens in self._prompts(kind)]
        hash_prompt = self._hasher(kind)
        num_hit_tokens = 0
        start = now_s()
        for tokens in prompts:
            request = self.manager.new_request(tokens)
            hash_prompt(request)
            hit = self.manager.look_up(request)
            self.manager.allocate(request, self.prompt_tokens, hit)
            self.manager.free(request)
            num_hit_tokens += hit[1]
        taken = now_s() - start
        self._end_round(kind, num_hit_tokens)
        return taken / self.num_prompts

    def step(self, name: str, kind: str, prompts_per_step: int) -> float:
        """Time steps that let prompts in, from tokens, the steps that end them, or both.

        `name` is `admit`, `end` or `both`. Nothing else runs in these steps.
        """
        prompts = [self.manager.tokens(tokens, False) for tokens in self._prompts(kind)]
        taken = {"admit": 0.0, "end": 0.0}
        num_hit_tokens = 0
        for first in range(0, self.num_prompts, prompts_per_step):
            new = [(self._name(), tokens) for tokens in prompts[first : first + prompts_per_step]]
            names, ends = [name for name, _ in new], np.zeros(len(new), bool)
            no_tokens = self.manager.tokens(NO_TOKENS, False)
            start = now_s()
            num_hit_tokens += self.manager.serve_step([], NO_ROWS, no_tokens, new)
            admitted = now_s()
            self.manager.serve_step(names, ends, no_tokens, [])
            taken["end"] += now_s() - admitted
            taken["admit"] += admitted - start
        taken["both"] = taken["admit"] + taken["end"]
        self._end_round(kind, num_hit_tokens)
        return taken[name] / self.num_prompts

    def _prompts(self, kind: str) -> list[np.ndarray]:
        if kind == FRESH:
            return self._fresh()
        if kind == REPEATED:
            return self.cached
        more = self.random.integers(0, VOCABULARY, (self.num_prompts, 1), dtype=np.int32)
        return [np.concatenate(pair) for pair in zip(self.cached, more, strict=True)]

    def _requests(self, kind: str) -> list[Any]:
        requests = [self.manager.new_request(tokens) for tokens in self._prompts(kind)]
        hash_prompt = self._hasher(kind)
        for request in requests:
            hash_prompt(request)
        return requests

    def _hasher(self, kind: str) -> Callable[[Any], None]:
        return self.manager.hash if kind == FRESH else self.manager.prepare

    def _end_round(self, kind: str, num_hit_tokens: int) -> None:
        """Check what was found; use all of the cached prompts, so that others make room."""
        hits = {FRESH: 0, CACHED: self.prompt_tokens, REPEATED: self.prompt_tokens - BLOCK_SIZE}
        if num_hit_tokens != hits[kind] * self.num_prompts:
            raise RuntimeError(
                f"{self.num_prompts} {kind} prompts of {self.prompt_tokens} tokens hit "
                f"{num_hit_tokens} tokens instead of {hits[kind]} each"
            )
        if kind != CACHED:
            self._serve(self._prompts(CACHED))

    def _serve(self, prompts: list[np.ndarray]) -> None:
        for tokens in prompts:
            request = self.manager.new_request(tokens)
            self.manager.prepare(request)
            self.manager.allocate(request, len(tokens), self.manager.look_up(request))
            self.manager.free(request)

    def _fresh(self) -> list[np.ndarray]:
        shape = (self.num_prompts, self.prompt_tokens)
        return list(self.random.integers(0, VOCABULARY, shape, dtype=np.int32))

    def _name(self) -> str:
        self.num_named += 1
        return f"short-{self.num_named}"
