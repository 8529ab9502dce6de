"""What scheduler and ranks say to each other in each step.

vLLM carries the messages: commands travel with the scheduler's output, reports with the model
runner's, inventories once at start. A rank obeys commands in the order of the fields. Jobs have
numbers, go on behind their step, and are reported once, by every rank. Plain data: vLLM looks at
none of it, but for `aggregate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.base.curve import CurveKeys
from kvcache.protocol.messages import JobReport
from kvcache.worker.host_memory.segment import SegmentShape


@dataclass(frozen=True)
class PeerMemory:
    """The memory of another replica: `numbers[rank]` says which segment of the memory service."""

    replica: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class LoadCommand:
    """Load slot `slots[i]`, which holds `keys[i]`, into block `blocks[i]` of a request; from
    the memory of a peer, if there is one."""

    job_id: int
    request_id: str
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    keys: tuple[bytes, ...]
    peer: PeerMemory | None = None


@dataclass(frozen=True)
class StoreCommand:
    """Store block `blocks[i]`, which is `keys[i]` and continues the digest `parents[i]`, in
    `slots[i]`."""

    job_id: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    keys: tuple[bytes, ...]
    parents: tuple[bytes, ...]


@dataclass(frozen=True)
class FileCommand:
    """Write the host slots `slots` to files, or read files into them. `keys` has the keys of all
    of them, one behind the other."""

    job_id: int
    slots: tuple[int, ...]
    keys: bytes


@dataclass(frozen=True)
class ImportCommand:
    """Copy blocks from the node at `endpoint` into the host slots `slots`. `keys` as above; `curve`
    are the keys to connect with, None on the own machine."""

    job_id: int
    slots: tuple[int, ...]
    keys: bytes
    endpoint: str
    curve: CurveKeys | None = None

    def anon_repr(self) -> str:
        """Return what vLLM logs of it when a step fails; without this, it logs the secret keys."""
        return repr(self)


@dataclass(frozen=True)
class RankCommands:
    """What every rank does in one step.

    Before the forward: wait until no store reads `reused_blocks`, which others are going to use.
    Then, before the forward or behind it: forget the slots `forgotten_slots` and the files of
    `forgotten_keys`, seal the slots `sealed`; begin to write and read files, to import from other
    nodes, and to load; say that `invalid_blocks` or all blocks of the requests `failed` were not
    loaded, that the requests `received` wait for nothing, and that those of `released` need their
    blocks no more. Behind the forward: begin the store.
    """

    reused_blocks: tuple[int, ...] = ()
    forgotten_slots: tuple[int, ...] = ()
    forgotten_keys: bytes = b""
    sealed: tuple[int, ...] = ()
    spills: tuple[FileCommand, ...] = ()
    fetches: tuple[FileCommand, ...] = ()
    imports: tuple[ImportCommand, ...] = ()
    loads: tuple[LoadCommand, ...] = ()
    invalid_blocks: tuple[int, ...] = ()
    failed: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    store: StoreCommand | None = None


@dataclass(frozen=True)
class RankReports:
    """Jobs that have ended since the last report, each with its rank; of one rank or of several.

    `overdue_loads` are jobs that a rank waits for no longer, although they go on.
    """

    jobs: tuple[tuple[int, JobReport], ...] = ()
    overdue_loads: tuple[int, ...] = ()

    def aggregate(self, other: RankReports) -> RankReports:
        """Return what both say together."""
        return RankReports(self.jobs + other.jobs, self.overdue_loads + other.overdue_loads)


@dataclass(frozen=True)
class Inventory:
    """What a rank has room for, and what it has adopted: `slot_keys[slot]` of each sealed slot,
    `file_keys` of each file, both in the order of eviction. `files_problem` says why it does
    without files, if it does. `shape` is that of its memory. `files_directory` is that of its
    files: it has read what was there after change number `files_position` or later."""

    num_slots: int
    slot_keys: dict[int, bytes]
    num_files: int = 0
    file_keys: tuple[bytes, ...] = ()
    files_problem: str = ""
    shape: SegmentShape | None = None
    files_directory: str = ""
    files_position: int = 0
