"""Successive blocks of one request that became hittable together, and the steps they belong to.

Stands between a step that schedules their last tokens and the report that confirms or voids it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.arrays import IndexArray, Int32Array
from kvcache.blocks.prefix_table import PrefixTable
from kvcache.errors import RequestError
from kvcache.hashing import BlockHash, ExtraKeys

NO_STEP = -1


@dataclass(slots=True, eq=False)
class CachedRun:
    """What is needed to seal, publish or withdraw the blocks. Not changed once it is made.

    `parent` is the digest before the first block; `token_ids` are the tokens of all blocks, a
    copy, or empty where nobody is told of them; `extra_keys` holds one entry per block, or nothing
    where no block has any. `first_index` is the first block's index in the request's table.
    `client_id` is empty outside any step. `ids` are the block ids once more where somebody has
    made an array of them.
    """

    table: PrefixTable
    block_ids: list[int]
    digests: Sequence[BlockHash]
    parent: BlockHash
    token_ids: Int32Array
    block_size: int
    extra_keys: tuple[ExtraKeys | None, ...]
    request_id: str
    first_index: int
    client_id: str = ""
    step: int = NO_STEP
    ids: IndexArray | None = None

    def parent_of(self, index: int) -> BlockHash:
        """Digest before block `index` of the run."""
        return self.digests[index - 1] if index else self.parent


class StepLedger:
    """The open step, and the runs whose step is neither complete nor failed.

    `client_id` is empty and `step` is `NO_STEP` while none is open. Runs are kept per client, in
    order of steps.
    """

    def __init__(self) -> None:
        """Know no step."""
        self.client_id = ""
        self.step = NO_STEP
        self._runs: dict[str, deque[CachedRun]] = {}

    def open(self, client_id: str, step: int) -> None:
        """Open a step; raises RequestError, unchanged, if a later one of the client has runs."""
        runs = self._runs.get(client_id)
        if not client_id or step < 0 or (runs and runs[-1].step > step):
            latest = f", whose latest is {runs[-1].step}" if runs else ""
            raise RequestError(
                f"cannot open step {step} of client {client_id!r}{latest}: a client has a name, "
                "and its step numbers count up from 0 or more"
            )
        self.client_id, self.step = client_id, step

    def close(self) -> None:
        """End the open step, if any."""
        self.client_id, self.step = "", NO_STEP

    def add(self, runs: Sequence[CachedRun]) -> None:
        """Remember runs of the open step."""
        self._runs.setdefault(self.client_id, deque()).extend(runs)

    def take_through(self, client_id: str, step: int) -> list[CachedRun]:
        """Remove and return the client's runs of steps up to `step`, first ones first."""
        runs = self._runs.get(client_id, deque())
        taken = []
        while runs and runs[0].step <= step:
            taken.append(runs.popleft())
        self._forget_if_empty(client_id)
        return taken

    def take_from(self, client_id: str, step: int) -> list[CachedRun]:
        """Remove and return the client's runs of steps from `step` on, last ones first."""
        runs = self._runs.get(client_id, deque())
        taken = []
        while runs and runs[-1].step >= step:
            taken.append(runs.pop())
        self._forget_if_empty(client_id)
        return taken

    def clear(self) -> None:
        """Forget every run."""
        self._runs.clear()

    def runs(self) -> list[CachedRun]:
        """Return all runs. For audits."""
        return [run for runs in self._runs.values() for run in runs]

    def _forget_if_empty(self, client_id: str) -> None:
        if not self._runs.get(client_id, True):
            del self._runs[client_id]
