"""What is timed of a manager, the same for both sides. Runs in either environment.

Every function returns the seconds of one repetition and leaves the manager as it found it. Only
what a scheduler would pay for is inside the timer.
"""

from __future__ import annotations

import gc
import time
from typing import Any, Protocol

import numpy as np
import psutil
from side_setup import Setup

VOCABULARY = 150_000


class Manager(Protocol):
    """A manager under test, wrapped; requests are its own objects."""

    def new_request(self, tokens: Any) -> Any: ...
    def tokens(self, tokens: np.ndarray, as_list: bool) -> Any: ...
    def hash(self, request: Any) -> None: ...
    def look_up(self, request: Any) -> Any: ...
    def allocate(self, request: Any, num_tokens: int, hit: Any = None) -> None: ...
    def free(self, request: Any) -> None: ...
    def start_decoding(self, count: int) -> Any: ...
    def decode_steps(self, batch: Any, steps: int) -> float: ...
    def stop_decoding(self, batch: Any) -> None: ...
    def serve_step(
        self, finished: list[str], kept: np.ndarray, tokens: Any, new: list[tuple[str, Any]]
    ) -> int: ...
    def encode_stored(self, request: Any) -> bytes: ...
    def check_stored(self, request: Any, payload: bytes) -> str: ...


class Prompts:
    """Single prompts on a pool whose every block holds something; W1, W2, W3, W5, M, G."""

    def __init__(self, make_manager: Any, setup: Setup) -> None:
        gc.collect()
        before = psutil.Process().memory_info().rss
        self.manager: Manager = make_manager(setup)
        self.prompt_tokens = setup.prompt_tokens
        self.random = np.random.default_rng(1)
        for _ in range(2 + setup.num_blocks * 16 // setup.prompt_tokens):
            self._fill(self.prompt())
        self.cached_prompt = self.prompt()
        self._fill(self.cached_prompt)
        gc.collect()
        self.memory_bytes = psutil.Process().memory_info().rss - before
        self.num_blocks = setup.num_blocks
        gc.freeze()

    def prompt(self) -> np.ndarray:
        return self.random.integers(0, VOCABULARY, self.prompt_tokens, dtype=np.int32)

    def _fill(self, tokens: np.ndarray) -> None:
        request = self.manager.new_request(tokens)
        self.manager.hash(request)
        self.manager.allocate(request, len(tokens))
        self.manager.free(request)

    def bytes_per_block(self) -> float:
        """Return what the process grew by until all blocks were cached, per block."""
        return self.memory_bytes / self.num_blocks

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

    def tokens_to_hit(self, as_list: bool) -> float:
        tokens = self.manager.tokens(self.cached_prompt, as_list)
        start = time.perf_counter()
        request = self.manager.new_request(tokens)
        self.manager.hash(request)
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

    def _touch_cached(self) -> None:
        """Keep the cached prompt recent, so that eviction takes other blocks."""
        request = self.manager.new_request(self.cached_prompt)
        self.manager.hash(request)
        hit = self.manager.look_up(request)
        self.manager.allocate(request, 1, hit)
        self.manager.free(request)


class Decoding:
    """Requests that decode a token a step; W4."""

    def __init__(self, make_manager: Any, setup: Setup) -> None:
        self.manager: Manager = make_manager(setup)
        self.batches: dict[int, Any] = {}

    def decode(self, count: int, steps: int) -> float:
        """Return the seconds of one step out of `steps` in a row."""
        if count not in self.batches:
            for other in list(self.batches):
                self.manager.stop_decoding(self.batches.pop(other))
            self.batches[count] = self.manager.start_decoding(count)
            gc.collect()
            gc.freeze()
        return self.manager.decode_steps(self.batches[count], steps) / steps


class StoredEvents:
    """Stored events of one prompt, built and encoded; W6."""

    def __init__(self, make_manager: Any, setup: Setup) -> None:
        self.manager: Manager = make_manager(setup)
        random = np.random.default_rng(1)
        tokens = random.integers(0, VOCABULARY, setup.prompt_tokens, dtype=np.int32)
        self.request = self.manager.new_request(tokens)
        self.manager.hash(self.request)
        gc.collect()
        gc.freeze()

    def encode_stored(self) -> float:
        start = time.perf_counter()
        self.manager.encode_stored(self.request)
        return time.perf_counter() - start

    def payload(self) -> str:
        return self.manager.encode_stored(self.request).hex()

    def check(self, payload: str) -> str:
        """Return how `payload` differs from what this side builds; empty if it does not."""
        return self.manager.check_stored(self.request, bytes.fromhex(payload))
