"""The timed operations of a manager, equal for both sides. Runs in either environment.

Every function returns the seconds of one repetition, by `stopwatch`, and leaves the manager as it
found it. Only what a scheduler would pay for is inside the timer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from memory import anonymous_bytes
from side_setup import Setup
from stopwatch import now_s

VOCABULARY = 150_000
IN_A_ROW = 16
"""Repetitions of calls without effect, before the other side takes its turn."""
PROMPTS_AT_ONCE = 4
"""Prompts that have their blocks at the same time, in a pool that keeps others cached."""


class Manager(Protocol):
    """A manager under test, wrapped; requests are its own objects.

    `hash` computes a request's digests; `prepare` does so for a manager that finds and caches
    blocks by them, and nothing for one that matches tokens. `stored` is what the manager knows of
    blocks that have just filled, which `encode_stored` makes an event of.
    """

    def new_request(self, tokens: Any) -> Any: ...
    def tokens(self, tokens: np.ndarray, as_list: bool) -> Any: ...
    def hash(self, request: Any) -> None: ...
    def prepare(self, request: Any) -> None: ...
    def look_up(self, request: Any) -> Any: ...
    def allocate(self, request: Any, num_tokens: int, hit: Any = None) -> None: ...
    def free(self, request: Any) -> None: ...
    def start_decoding(self, count: int) -> Any: ...
    def decode_steps(self, batch: Any, steps: int) -> float: ...
    def stop_decoding(self, batch: Any) -> None: ...
    def serve_step(
        self, finished: list[str], kept: np.ndarray, tokens: Any, new: list[tuple[str, Any]]
    ) -> int: ...
    def stored(self, request: Any) -> Any: ...
    def encode_stored(self, stored: Any) -> bytes: ...
    def check_stored(self, stored: Any, payload: bytes) -> str: ...


class Prompts:
    """Single prompts on a pool whose every block holds something; W1, W2, W3, W5, M, G."""

    def __init__(self, make_manager: Any, setup: Setup) -> None:
        gc.collect()
        before = anonymous_bytes()
        self.manager: Manager = make_manager(setup)
        self.prompt_tokens = setup.prompt_tokens
        self.random = np.random.default_rng(1)
        for _ in range(2 + setup.num_blocks * 16 // setup.prompt_tokens):
            self._fill(self.prompt())
        self.cached_prompt = self.prompt()
        self._fill(self.cached_prompt)
        gc.collect()
        self.memory_bytes = anonymous_bytes() - before
        self.num_blocks = setup.num_blocks
        gc.freeze()

    def prompt(self) -> np.ndarray:
        return self.random.integers(0, VOCABULARY, self.prompt_tokens, dtype=np.int32)

    def _fill(self, tokens: np.ndarray) -> None:
        request = self.manager.new_request(tokens)
        self.manager.prepare(request)
        self.manager.allocate(request, len(tokens))
        self.manager.free(request)

    def bytes_per_block(self) -> float:
        """Return the growth of the process until all blocks were cached, per block."""
        return self.memory_bytes / self.num_blocks

    def hash_fresh(self) -> float:
        request = self.manager.new_request(self.prompt())
        start = now_s()
        self.manager.hash(request)
        return now_s() - start

    def look_up_cached(self, times: int = IN_A_ROW) -> float:
        """Return the seconds of one look-up out of `times` in a row, each of another request."""
        requests = [self.manager.new_request(self.cached_prompt) for _ in range(times)]
        for request in requests:
            self.manager.prepare(request)
        start = now_s()
        for request in requests:
            self.manager.look_up(request)
        return (now_s() - start) / times

    def tokens_to_hit(self, as_list: bool, times: int = 1) -> float:
        """Return the seconds from tokens to hit of one prompt out of `times` in a row."""
        prompts = [self.manager.tokens(self.cached_prompt, as_list) for _ in range(times)]
        start = now_s()
        for tokens in prompts:
            request = self.manager.new_request(tokens)
            self.manager.prepare(request)
            self.manager.look_up(request)
        return (now_s() - start) / times

    def allocate_hashed(self, times: int = 1) -> float:
        """Return the seconds of one prompt's blocks out of `times` in a row, hashed before."""
        taken = 0.0
        for requests in self._fresh_requests(times):
            for request in requests:
                self.manager.hash(request)
            start = now_s()
            for request in requests:
                self.manager.allocate(request, self.prompt_tokens)
            taken += now_s() - start
            self._free(requests)
        return taken / times

    def allocate_hashing(self, times: int = 1) -> float:
        """Return the seconds of one prompt's digests and blocks out of `times` in a row."""
        taken = 0.0
        for requests in self._fresh_requests(times):
            start = now_s()
            for request in requests:
                self.manager.hash(request)
                self.manager.allocate(request, self.prompt_tokens)
            taken += now_s() - start
            self._free(requests)
        return taken / times

    def free_prompt(self, times: int = 1) -> float:
        """Return the seconds of freeing one prompt out of `times` in a row."""
        taken = 0.0
        for requests in self._fresh_requests(times):
            for request in requests:
                self.manager.prepare(request)
                self.manager.allocate(request, self.prompt_tokens)
            taken += self._free(requests)
        return taken / times

    def _fresh_requests(self, times: int) -> Iterator[list[Any]]:
        """Yield requests of new prompts, `times` in all, as many at once as have room."""
        for first in range(0, times, PROMPTS_AT_ONCE):
            count = min(PROMPTS_AT_ONCE, times - first)
            yield [self.manager.new_request(self.prompt()) for _ in range(count)]

    def _free(self, requests: list[Any]) -> float:
        """Free the requests, which is timed, and use the cached prompt, so that others go."""
        start = now_s()
        for request in requests:
            self.manager.free(request)
        taken = now_s() - start
        self._touch_cached()
        return taken

    def _touch_cached(self) -> None:
        request = self.manager.new_request(self.cached_prompt)
        self.manager.prepare(request)
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
        self.stored = self.manager.stored(self.manager.new_request(tokens))
        gc.collect()
        gc.freeze()

    def encode_stored(self, times: int) -> float:
        """Return the seconds of one event out of `times` in a row."""
        start = now_s()
        for _ in range(times):
            self.manager.encode_stored(self.stored)
        return (now_s() - start) / times

    def payload(self) -> str:
        return self.manager.encode_stored(self.stored).hex()

    def check(self, payload: str) -> str:
        """Return how `payload` differs from what this side builds; empty if it does not."""
        return self.manager.check_stored(self.stored, bytes.fromhex(payload))
