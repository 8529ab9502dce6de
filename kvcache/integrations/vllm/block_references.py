"""Device blocks that vLLM must not give to requests because a copy may still write into them.

vLLM counts references to each block of its pool, and uses a block again when none is left. A
request whose load is overdue gives its blocks back and is computed in others; a reference of ours
keeps its old ones until the copy has ended. Lives in the scheduler's process; block_store.py says
what to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BlockReferences:
    """References to blocks: each job of `_held` has one to each of its blocks."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._held: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._held

    def bind(self, pool: Any) -> None:
        """Use this pool of vLLM, as `bind_gpu_block_pool` names it."""
        self._pool = pool

    def hold(self, job_id: int, block_ids: Sequence[int]) -> None:
        """Keep blocks that are in use now, until `release`. A second call changes nothing."""
        if job_id in self._held:
            return
        blocks = [self._pool.blocks[block_id] for block_id in dict.fromkeys(block_ids)]
        self._pool.touch(blocks)
        self._held[job_id] = blocks

    def release(self, job_id: int) -> None:
        """Let blocks go, if the job has any."""
        blocks = self._held.pop(job_id, None)
        if blocks is not None:
            self._pool.free_blocks(blocks)
