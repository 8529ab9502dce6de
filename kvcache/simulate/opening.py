"""From what stands on a command line to a workload, or to a trace in arrays.

Stands at the front of every replay and simulation. Decides by name and path only; whether a file's
content is sound is its reader's question.
"""

from __future__ import annotations

from pathlib import Path

from kvcache.base.errors import TraceError
from kvcache.simulate.block_trace import BlockTrace, read_block_trace
from kvcache.simulate.conversations import Conversations
from kvcache.simulate.generators import DEFAULT_NUM_REQUESTS, GENERATORS, generate
from kvcache.simulate.mooncake import TRACE_ENDS, MooncakeTrace
from kvcache.simulate.text import TextDocuments
from kvcache.simulate.workload import LimitedWorkload, Workload

CONVERSATIONS = "conversations"
"""Name of the workload that the package brings along."""


def open_workload(name: str, *, limit: int | None = None, seed: int = 0) -> Workload:
    """Return the workload called `name`, its first `limit` requests only if one is given.

    `name` is `conversations` or a generator's (drawn by `seed`), the path of a Mooncake trace
    (`.jsonl`, `.jsonl.gz`), of a text file, or of a directory of text files. A generator goes on
    for `DEFAULT_NUM_REQUESTS` where no limit is given. Raises TraceError otherwise.
    """
    if name in GENERATORS:
        num_requests = DEFAULT_NUM_REQUESTS if limit is None else limit
        return generate(name, seed=seed, num_requests=num_requests)
    workload = _open(name, seed)
    return workload if limit is None else LimitedWorkload(workload, limit)


def open_block_trace(
    name: str, *, limit: int | None = None, seed: int = 0, block_size: int | None = None
) -> BlockTrace:
    """Return the trace called `name`, as `open_workload` takes it, read and checked.

    `block_size` is how many tokens a block has of a file that does not say, or of what is made.
    Raises TraceError for what cannot be read or contradicts itself.
    """
    if name.endswith(TRACE_ENDS):
        workload: Workload = MooncakeTrace(Path(name), block_size)
    else:
        workload = open_workload(name, limit=limit, seed=seed)
    return read_block_trace(workload, limit=limit, block_size=block_size)


def _open(name: str, seed: int) -> Workload:
    if name == CONVERSATIONS:
        return Conversations(seed=seed)
    path = Path(name)
    if name.endswith(TRACE_ENDS):
        return MooncakeTrace(path)
    if path.exists():
        return TextDocuments(path)
    raise TraceError(
        f"no workload {name!r}: give {CONVERSATIONS!r}, a generator ({', '.join(GENERATORS)}), a "
        "Mooncake trace (.jsonl, .jsonl.gz), a text file or a directory of text files"
    )
