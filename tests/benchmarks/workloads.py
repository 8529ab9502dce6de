"""What is timed of a manager, the same for both sides. Runs in either environment.

Block size 16, one full-attention group. Every function returns the seconds of one repetition and
leaves the manager as it found it. Only what a scheduler would pay for is inside the timer.
"""

from __future__ import annotations

import gc
import time
from typing import Any, Protocol

import numpy as np

BLOCK_SIZE = 16


class Manager(Protocol):
    """A manager under test, wrapped; requests are its own objects."""

    def new_request(self, tokens: np.ndarray) -> Any: ...
    def hash(self, request: Any) -> None: ...
    def look_up(self, request: Any) -> Any: ...
    def allocate(self, request: Any, num_tokens: int, hit: Any = None) -> None: ...
    def free(self, request: Any) -> None: ...
    def start_decoding(self, count: int) -> Any: ...
    def decode_steps(self, batch: Any, steps: int) -> float: ...
    def stop_decoding(self, batch: Any) -> None: ...


class Workloads:
    """The workloads against one manager of `num_blocks` blocks, with caching on."""

    def __init__(self, manager: Manager, prompt_tokens: int, seed: int = 1) -> None:
        self.manager = manager
        self.prompt_tokens = prompt_tokens
        self.random = np.random.default_rng(seed)
        self.cached_prompt = self.prompt()
        self._fill(self.cached_prompt)
        self.batches: dict[int, Any] = {}
        gc.collect()
        gc.freeze()

    def prompt(self) -> np.ndarray:
        return self.random.integers(0, 150_000, self.prompt_tokens, dtype=np.int32)

    def _fill(self, tokens: np.ndarray) -> None:
        request = self.manager.new_request(tokens)
        self.manager.hash(request)
        self.manager.allocate(request, len(tokens))
        self.manager.free(request)

    def hash_fresh(self) -> float:
        request = self.manager.new_request(self.prompt())
        start = time.perf_counter()
        self.manager.hash(request)
        return time.perf_counter() - start

    def look_up_cached(self) -> float:
        request = self.manager.new_request(self.cached_prompt)
        self.manager.hash(request)
        start = time.perf_counter()
        self.manager.look_up(request)
        return time.perf_counter() - start

    def allocate_hashed(self) -> float:
        request = self.manager.new_request(self.prompt())
        self.manager.hash(request)
        start = time.perf_counter()
        self.manager.allocate(request, self.prompt_tokens)
        taken = time.perf_counter() - start
        self.manager.free(request)
        self._touch_cached()
        return taken

    def allocate_hashing(self) -> float:
        request = self.manager.new_request(self.prompt())
        start = time.perf_counter()
        self.manager.hash(request)
        self.manager.allocate(request, self.prompt_tokens)
        taken = time.perf_counter() - start
        self.manager.free(request)
        self._touch_cached()
        return taken

    def free_prompt(self) -> float:
        request = self.manager.new_request(self.prompt())
        self.manager.hash(request)
        self.manager.allocate(request, self.prompt_tokens)
        start = time.perf_counter()
        self.manager.free(request)
        taken = time.perf_counter() - start
        self._touch_cached()
        return taken

    def decode(self, count: int) -> float:
        if count not in self.batches:
            for other in list(self.batches):
                self.manager.stop_decoding(self.batches.pop(other))
            self.batches[count] = self.manager.start_decoding(count)
            gc.collect()
            gc.freeze()
        steps = 16
        return self.manager.decode_steps(self.batches[count], steps) / steps

    def _touch_cached(self) -> None:
        """Keep the cached prompt recent, so that eviction takes other blocks."""
        request = self.manager.new_request(self.cached_prompt)
        self.manager.hash(request)
        hit = self.manager.look_up(request)
        self.manager.allocate(request, 1, hit)
        self.manager.free(request)
