"""Opens a workload, or a trace in arrays, by its name on the command line.

Decides by name and path only; readers check the content of files.
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
"""Name of the default workload."""


def open_workload(name: str, *, limit: int | None = None, seed: int = 0) -> Workload:
    """Return the workload called `name`, or only its first `limit` requests.

    `name` is `conversations` or a generator's (drawn by `seed`), the path of a Mooncake trace
    (`.jsonl`, `.jsonl.gz`), of a text file, or of a directory of text files. A generator makes
    `DEFAULT_NUM_REQUESTS` without a limit. Raises TraceError otherwise.
    """
    if name in GENERATORS:
        num_requests = DEFAULT_NUM_REQUESTS if limit is None else limit
        return generate(name, seed=seed, num_requests=num_requests)
    workload = _open(name, seed)
    return workload if limit is None else LimitedWorkload(workload, limit)


def open_block_trace(
    name: str, *, limit: int | None = None, seed: int = 0, block_size: int | None = None
) -> BlockTrace:
    """Return the trace called `name`, as in `open_workload`, read and checked.

    `block_size` applies to files without one and to generated traffic. Raises TraceError for a
    trace that cannot be read or contradicts itself.
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
