"""Shorthand for step requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcache.manager import KVCacheManager
from kvcache.protocol.step import (
    NewRequest,
    ResumedRequest,
    RunningRequests,
    StepRequest,
    StepResult,
)


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def new(
    request_id: str, tokens: Sequence[int], max_new_tokens: int = 1000, **rest: Any
) -> NewRequest:
    return NewRequest(request_id, ints(tokens), max_new_tokens, **rest)


def resume(request_id: str, max_new_tokens: int = 1000) -> ResumedRequest:
    return ResumedRequest(request_id, max_new_tokens)


def row(
    slot: int, appended: Sequence[int] = (), num_new: int = 1, num_draft: int = 0, rejected: int = 0
) -> tuple[int, Sequence[int], int, int, int]:
    return slot, appended, num_new, num_draft, rejected


def running(*rows: tuple[int, Sequence[int], int, int, int]) -> RunningRequests:
    tokens = [token for _, appended, _, _, _ in rows for token in appended]
    return RunningRequests(
        slots=ints([r[0] for r in rows]),
        num_new_tokens=ints([r[2] for r in rows]),
        num_draft_tokens=ints([r[3] for r in rows]),
        num_rejected_tokens=ints([r[4] for r in rows]),
        token_offsets=ints(np.cumsum([0] + [len(r[1]) for r in rows]).tolist()),
        token_ids=ints(tokens),
    )


class Engine:
    """Numbers the steps of one client."""

    def __init__(self, manager: KVCacheManager, client_id: str = "engine#1") -> None:
        self.manager = manager
        self.client_id = client_id
        self.next_step = 1

    def request(self, *rows: tuple[int, Sequence[int], int, int, int], **rest: Any) -> StepRequest:
        fields = {"step": self.next_step, "epoch": 1, "running": running(*rows), **rest}
        return StepRequest(client_id=self.client_id, **fields)

    def step(self, *rows: tuple[int, Sequence[int], int, int, int], **rest: Any) -> StepResult:
        result = self.manager.step(self.request(*rows, **rest))
        self.next_step += 1
        self.manager.check()
        return result
