"""Prompts that branch off one trunk everywhere; W9. Runs in either environment.

Every operation is a whole request: look up, allocate the rest and free, with all the hashing. The
branches are fresh, so only the trunk is ever hit.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
from side_setup import BLOCK_SIZE, Setup
from stopwatch import now_s
from workloads import VOCABULARY, Manager

BRANCH_TOKENS = 24 * BLOCK_SIZE


class Hostile:
    """Branches off a trunk of `setup.size` blocks, in a pool where others must go for them."""

    def __init__(self, make_manager: Any, setup: Setup) -> None:
        self.manager: Manager = make_manager(setup)
        self.random = np.random.default_rng(3)
        self.num_trunk_blocks = setup.size
        self.trunk = self._fresh(setup.size * BLOCK_SIZE)
        self.comb_depth = 0
        for _ in range(1 + setup.num_blocks // setup.size):
            self._serve([self._fresh(len(self.trunk))])
        self._serve([self.trunk])
        gc.collect()
        gc.freeze()

    def random_depth(self, count: int) -> float:
        """Branch at random depths."""
        return self._branch(self.random.integers(1, self.num_trunk_blocks, count).tolist())

    def comb(self, count: int) -> float:
        """Branch at one depth after the other."""
        depths = [1 + (self.comb_depth + i) % (self.num_trunk_blocks - 1) for i in range(count)]
        self.comb_depth += count
        return self._branch(depths)

    def star(self, count: int) -> float:
        """Branch after the first block, always."""
        return self._branch([1] * count)

    def _branch(self, depths: list[int]) -> float:
        prompts = [
            np.concatenate([self.trunk[: depth * BLOCK_SIZE], self._fresh(BRANCH_TOKENS)])
            for depth in depths
        ]
        taken = self._serve(prompts) / len(depths)
        self._serve([self.trunk])
        return taken

    def _serve(self, prompts: list[np.ndarray]) -> float:
        taken = 0.0
        for tokens in prompts:
            request = self.manager.new_request(tokens)
            start = now_s()
            self.manager.prepare(request)
            hit = self.manager.look_up(request)
            self.manager.allocate(request, len(tokens), hit)
            self.manager.free(request)
            taken += now_s() - start
        return taken

    def _fresh(self, count: int) -> np.ndarray:
        return self.random.integers(0, VOCABULARY, count, dtype=np.int32)
