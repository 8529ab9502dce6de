"""Identifiers, as types of their own, so that one is not passed for another.

At the top of the import order, like `errors.py`. Numbers that cross a process border are
plain ints in the messages; these names say what they count.
"""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in the pool. 0 is the null block."""

GroupId = NewType("GroupId", int)
"""Index of a KV cache group in `KVCacheConfig.kv_cache_groups`."""

Slot = NewType("Slot", int)
"""Row of a running request in the block tables, reused after the request has gone."""

Rank = NewType("Rank", int)
"""Global rank of a worker: `pipeline_rank * tensor_parallel_size + tensor_rank`."""

Epoch = NewType("Epoch", int)
"""A period in which one coordinator rules all workers. Starts at 1 and only grows."""

Seq = NewType("Seq", int)
"""Number of a command message within an epoch: 1, 2, 3, ... contiguous for every worker."""

StepNumber = NewType("StepNumber", int)
"""A client's own number of a step. Never restarts while the client lives."""

JobId = NewType("JobId", int)
"""A transfer or forward that finishes later than its command is applied. Unique in an epoch."""

ClientId = NewType("ClientId", str)
"""Name of an engine client, its incarnation included."""

NULL_BLOCK_ID = BlockId(0)
