"""Small requests without end: does memory stay flat? Runs in either environment.

    step by step    64 new requests, those of earlier steps decode a token, some finish

A prompt is a piece of one of a few trunks, cut anywhere, followed by fresh tokens. So the cache
constantly branches, evicts and grows again.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
from memory import anonymous_bytes
from side_setup import Setup
from stopwatch import now_s
from workloads import VOCABULARY, Manager

NUM_TRUNKS = 16
TRUNK_TOKENS = 256
MAX_FRESH_TOKENS = 64
MAX_STEPS = 4


class Flat:
    """Requests of a few blocks, `setup.size` new ones in each step."""

    def __init__(self, make_manager: Any, setup: Setup) -> None:
        self.random = np.random.default_rng(11)
        self.num_new = setup.size
        self.trunks = self.random.integers(0, VOCABULARY, (NUM_TRUNKS, TRUNK_TOKENS), np.int32)
        gc.collect()
        self.before_bytes = anonymous_bytes()
        self.manager: Manager = make_manager(setup)
        self.names: list[str] = []
        self.steps_left = np.zeros(0, np.int64)
        self.count = 0
        self.seconds = 0.0
        self.mebibytes_after(setup.num_warm_up)
        self.seconds, self.num_warm_up = 0.0, self.count

    def mebibytes_after(self, num_requests: int) -> float:
        """Serve so many more requests and return what the manager holds then, in MiB."""
        end = self.count + num_requests
        while self.count < end:
            self._step(min(self.num_new, end - self.count))
        gc.collect()
        return (anonymous_bytes() - self.before_bytes) / 2**20

    def seconds_per_request(self) -> float:
        """Return what a request has cost so far, its decoded tokens included."""
        return self.seconds / (self.count - self.num_warm_up)

    def _step(self, num_new: int) -> None:
        kept = self.steps_left > 0
        finished = [name for name, is_kept in zip(self.names, kept, strict=True) if not is_kept]
        going = [name for name, is_kept in zip(self.names, kept, strict=True) if is_kept]
        sampled = self.random.integers(0, VOCABULARY, len(going), np.int32)
        new = [
            (f"flat-{self.count + i}", self.manager.tokens(self._prompt(), False))
            for i in range(num_new)
        ]
        arguments = finished, kept, self.manager.tokens(sampled, False), new
        start = now_s()
        self.manager.serve_step(*arguments)
        self.seconds += now_s() - start
        fresh = self.random.integers(0, MAX_STEPS, num_new)
        self.steps_left = np.concatenate([self.steps_left[kept] - 1, fresh])
        self.names = going + [name for name, _ in new]
        self.count += num_new

    def _prompt(self) -> np.ndarray:
        trunk, depth, fresh = self.random.integers(
            (0, 0, 1), (NUM_TRUNKS, TRUNK_TOKENS + 1, MAX_FRESH_TOKENS + 1)
        )
        end = self.random.integers(0, VOCABULARY, fresh, np.int32)
        return np.concatenate([self.trunks[trunk, :depth], end])
