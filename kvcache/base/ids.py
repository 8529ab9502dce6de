"""Types for identifiers, so that one kind is not passed for another.

In messages these numbers are plain ints.
"""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in the pool. 0 is the null block."""

GroupId = NewType("GroupId", int)
"""Index of a KV cache group in `KVCacheConfig.kv_cache_groups`."""

Slot = NewType("Slot", int)
"""Row of a running request in the block tables, reused after the request has ended."""

Rank = NewType("Rank", int)
"""Global rank of a worker: `pipeline_rank * tensor_parallel_size + tensor_rank`."""

Epoch = NewType("Epoch", int)
"""A period in which one coordinator rules all workers. Starts at 1 and only rises."""

Seq = NewType("Seq", int)
"""Number of a command message within an epoch: 1, 2, 3, ... contiguous for every worker."""

StepNumber = NewType("StepNumber", int)
"""A client's own number of a step. Never restarts while the client lives."""

JobId = NewType("JobId", int)
"""A transfer or forward that finishes later than its command is applied. Unique in an epoch."""

ClientId = NewType("ClientId", str)
"""Name of an engine's client, including its incarnation."""

NULL_BLOCK_ID = BlockId(0)
