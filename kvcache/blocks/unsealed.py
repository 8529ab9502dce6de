"""Blocks that can be found but whose step is not complete: which run, and so which step, of each.

Inside the content index. Until its step is complete such a block is found by its own client only.
Refuses to know contents: it says whose word is still to come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import ItemsView, Iterable, Iterator, Sequence
from itertools import chain, repeat

from kvcache.blocks.run import CachedRun


class UnsealedBlocks:
    """The run of each unsealed block, and how many each client has.

    Invariant: `_num_by_client` counts the blocks in `_runs` by their runs' clients, none with 0.
    """

    def __init__(self) -> None:
        """Let all blocks be sealed or empty."""
        self._runs: dict[int, CachedRun] = {}
        self._num_by_client: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[int]:
        return iter(self._runs)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._runs

    def get(self, block_id: int) -> CachedRun | None:
        """Return the run of a block, None if it waits for nothing."""
        return self._runs.get(block_id)

    def items(self) -> ItemsView[int, CachedRun]:
        """Return all blocks with their runs. For audits."""
        return self._runs.items()

    def num_by_client(self) -> dict[str, int]:
        """Return a copy of the counts."""
        return dict(self._num_by_client)

    def are_of(self, client_id: str | None) -> bool:
        """Say whether every one is this client's."""
        return len(self._num_by_client) == (client_id in self._num_by_client)

    def has_any_of(self, client_id: str | None) -> bool:
        """Say whether one is this client's."""
        return client_id in self._num_by_client

    def among(self, block_ids: Iterable[int]) -> set[int]:
        """Return those of these blocks that are unsealed."""
        return self._runs.keys() & block_ids if self._runs else set()

    def add(self, runs: Sequence[CachedRun]) -> None:
        """Let the blocks of runs of the open step wait for it."""
        client_id, count = runs[0].client_id, 0
        for run in runs:
            if len(run.block_ids) == 1:  # of a running row
                self._runs[run.block_ids[0]] = run
            else:
                self._runs.update(zip(run.block_ids, repeat(run)))
            count += len(run.block_ids)
        self._num_by_client[client_id] = self._num_by_client.get(client_id, 0) + count

    def take(self, runs: Sequence[CachedRun]) -> list[tuple[CachedRun, Sequence[int]]]:
        """Let what is left of `runs` wait no more; return those of which something is, each with
        the places of its blocks that are."""
        block_ids = list(chain.from_iterable([run.block_ids for run in runs]))
        expected = chain.from_iterable([repeat(run, len(run.block_ids)) for run in runs])
        if list(map(self._runs.get, block_ids)) == list(expected):
            self.remove(block_ids)
            return [(run, range(len(run.block_ids))) for run in runs]
        left: list[tuple[CachedRun, Sequence[int]]] = []
        for run in runs:
            live = [i for i, block_id in enumerate(run.block_ids) if self.get(block_id) is run]
            if live:
                self.remove([run.block_ids[i] for i in live])
                left.append((run, live))
        return left

    def remove(self, block_ids: Iterable[int]) -> None:
        """Let these unsealed blocks, one at least, wait for no step any more."""
        gone = [run.client_id for run in map(self._runs.pop, block_ids)]
        # Mostly of one client: whose they all are is counted without a look at each.
        counts = {gone[0]: len(gone)} if gone.count(gone[0]) == len(gone) else Counter(gone)
        for client_id, count in counts.items():
            if count < self._num_by_client[client_id]:
                self._num_by_client[client_id] -= count
            else:
                del self._num_by_client[client_id]

    def clear(self) -> None:
        """Let no block wait any more."""
        self._runs.clear()
        self._num_by_client.clear()
