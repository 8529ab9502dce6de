"""The files of an engine's ranks, for other nodes: which blocks there are, and their bytes.

Part of the block server's process. A thread of its own reads, so that a slow disk delays neither
blocks in memory nor announcements. A file is compared with its head and its checksum before it is
given; a wrong one is left to the engine, which sets it aside when it reads it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress

import zmq

from kvcache.base.logs import get_logger
from kvcache.integrations.vllm.shared_directory import SharedDirectory
from kvcache.offload.keys import OffloadKey
from kvcache.worker.files.format import FileTierError, Problem, pack_head
from kvcache.worker.files.store import FileStore, StoreLimits
from kvcache.worker.files.system import DirectoryFiles
from kvcache.worker.host_memory.segment import SegmentShape

logger = get_logger(__name__)

MAX_QUEUED_READS = 64
"""Requests that wait for the disk; further ones are answered as missing."""

MAX_QUEUED_ANSWERS = 4
"""Blocks that have been read and not given."""

CLOSE_S = 2.0


class ReadOnlyStore(FileStore):
    """Reads a rank's files, and changes none."""

    def __init__(self, directory: int, shape: SegmentShape) -> None:
        """Read in the directory of this descriptor."""
        super().__init__(DirectoryFiles(directory), shape, StoreLimits(), "")

    def _put_aside(self, name: str, kind: Problem) -> bool:
        return False


class NodeFiles:
    """What the directories of all ranks hold. `refresh`, `ask` and `answers` are the server's;
    reads run in a thread."""

    def __init__(self, directories: Sequence[str], shapes: Sequence[SegmentShape]) -> None:
        """List the directories, by rank, and start the thread. Raises OSError."""
        self._directories, self._shapes = tuple(directories), tuple(shapes)
        self._shared = SharedDirectory.at(directories, shapes[0].key_bytes)
        self.held = dict.fromkeys(self._shared.whole(), 0)
        self._asked: queue.Queue[tuple[list[bytes], int, OffloadKey] | None] = queue.Queue(
            MAX_QUEUED_READS
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.answers = self._context.socket(zmq.PULL)
        """A message for each block that was asked for: what `ask` got as `frames`, then head and
        tensors, or nothing."""
        self.answers.rcvhwm = MAX_QUEUED_ANSWERS
        self.answers.bind("inproc://files")
        self._replies = self._context.socket(zmq.PUSH)
        self._replies.sndhwm = MAX_QUEUED_ANSWERS
        self._replies.linger = 0
        self._replies.connect("inproc://files")
        self._replies.sndtimeo = int(1000 * CLOSE_S / 2)
        self._is_over = False
        self._thread = threading.Thread(target=self._read_all, name="kvcache-node-files")
        self._thread.daemon = True
        self._thread.start()

    def refresh(self) -> set[OffloadKey]:
        """Look what has been written and removed; return the keys that have changed."""
        written, removed = self._shared.changes()
        for key in removed:
            self.held.pop(key, None)
        self.held.update(dict.fromkeys(written, 0))
        return {*written, *removed}

    def ask(self, frames: list[bytes], rank: int, key: OffloadKey) -> bool:
        """Have a block read; False if there are too many requests."""
        try:
            self._asked.put_nowait((frames, rank, key))
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """End the thread, unless the disk hangs; then it ends with the process."""
        self._is_over = True
        with suppress(queue.Full):
            self._asked.put_nowait(None)
        self.answers.close(0)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._context.term()

    def _read_all(self) -> None:
        while (asked := self._asked.get()) is not None:
            frames, rank, key = asked
            block = self._read(rank, key)
            while not self._is_over:
                with suppress(zmq.Again):
                    self._replies.send_multipart([*frames, *block])
                    break
            if self._is_over:
                break
        self._replies.close(0)

    def _read(self, rank: int, key: OffloadKey) -> list[bytes]:
        shape = self._shapes[rank]
        parts = [bytearray(width) for width in shape.widths]
        try:
            directory = os.open(self._directories[rank], os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            logger.warning("files are not given to other nodes: %s", error)
            return []
        try:
            head = ReadOnlyStore(directory, shape).read(key, [memoryview(part) for part in parts])
        except FileTierError as error:
            if error.kind != "missing":
                logger.warning("a file is not given to another node: %s", error)
            return []
        finally:
            os.close(directory)
        return [pack_head(head), *map(bytes, parts)]
