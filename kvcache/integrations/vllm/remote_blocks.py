"""Copies blocks from other nodes into a rank's host slots, as if they were read from files.

A block comes with the head of a file. Layout, rank, key and checksum are compared before it gets a
label, whatever `offload.verify` says. Each lane asks for one block at a time, so as many blocks are
under way as there are lanes. A node that is silent for `silence_s`, or whose connection ends, is
not asked for a while, and blocks are not asked for when their request has waited for too long. Time
in which this process was stopped is not silence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import zmq

from kvcache.base.arrays import int32_array
from kvcache.base.clock import StallAwareClock, SystemClock
from kvcache.base.curve import CurveKeys, equip_peer
from kvcache.base.errors import ProtocolError
from kvcache.integrations.vllm.step_messages import ImportCommand
from kvcache.offload.specs import FILE_MEDIUM
from kvcache.protocol.commands import Fetch
from kvcache.protocol.messages import JobReport
from kvcache.sharing.messages import Given, Wanted, pack, split, unpack
from kvcache.worker.copies.checksums import checksum_of
from kvcache.worker.files.file_pool import FilePool, ThreadLanes
from kvcache.worker.files.format import MAX_HEAD_BYTES, FileHead, FileTierError, unpack_head
from kvcache.worker.files.store import FileStore, StoreLimits
from kvcache.worker.files.system import DirectoryFiles
from kvcache.worker.host_memory.host_pool import HostPool
from kvcache.worker.host_memory.segment import SegmentShape
from kvcache.worker.transfers import FileJobs

NUM_LANES = 4
MAX_QUEUED_BLOCKS = 8192
MAX_NODES = 32
"""Connections of a lane; the oldest is closed for another one."""

LISTEN_S = 0.1
"""How long a lane listens before it reads the clock again; of a longer pause, so much counts."""

REST_S = 5.0
CLOSE_S = 5.0

_NO_DIRECTORY = -1
_IS_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


@dataclass(frozen=True)
class _Connection:
    """A connection to a node. `monitor` has a message once the node's process has ended, or none
    listens there: zmq connects again, but what was asked is lost."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def has_answer(self, timeout_s: float) -> bool:
        """Wait for an answer, or the end of the connection; say whether there is an answer."""
        poller = zmq.Poller()
        for each in (self.socket, self.monitor):
            poller.register(each, zmq.POLLIN)
        poller.poll(max(1, int(1000 * timeout_s)))
        return bool(self.socket.poll(0))

    def is_lost(self) -> bool:
        return bool(self.monitor.poll(0))

    def close(self) -> None:
        """Close it, with whatever is under way on it."""
        self.socket.disable_monitor()
        for each in (self.socket, self.monitor):
            each.close(0)


class NodeConnections:
    """Asks other nodes for blocks. Thread-safe: each thread has connections of its own."""

    def __init__(self, shape: SegmentShape, keys: CurveKeys | None, silence_s: float) -> None:
        """Ask for blocks of a rank with memory of this shape."""
        self._shape = shape
        self.keys = keys
        """For new connections."""
        self._silence_s = silence_s
        self._clock = StallAwareClock(SystemClock(), LISTEN_S)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connections: dict[int, dict[str, _Connection]] = {}  # by thread
        self._numbers = count(1)
        self._rest_until_s: dict[str, float] = {}

    def fetch(self, endpoint: str, key: bytes) -> list[bytes]:
        """Return the head and the tensors of a block, as the node gives them.

        Raises FileTierError: `missing` if it has no such block, `damaged` for another answer, `io`
        if it is silent or gone.
        """
        if time.monotonic() < self._rest_until_s.get(endpoint, 0.0):
            raise FileTierError("io", f"node {endpoint} is not asked, because it did not answer")
        connection = self._connected(endpoint)
        number = next(self._numbers)
        silence = f"gives nothing within {self._silence_s:g} s"
        try:
            connection.socket.send(pack(Wanted(number, self._shape.rank, key)), zmq.NOBLOCK)
        except zmq.Again:
            raise self._no_answer(endpoint, silence) from None
        give_up_s = self._clock.now() + self._silence_s
        while True:
            left_s = give_up_s - self._clock.now()
            if not connection.has_answer(min(left_s, LISTEN_S)):
                if connection.is_lost():
                    raise self._no_answer(endpoint, "is gone, or has other keys")
                if left_s <= 0:
                    raise self._no_answer(endpoint, silence)
                continue
            frames = self._frames(endpoint, connection.socket)
            try:
                given = unpack(frames[0])
            except ProtocolError as error:
                self._disconnect(endpoint)
                raise FileTierError("damaged", f"node {endpoint}: {error}") from error
            if not isinstance(given, Given) or given.number != number:
                continue  # it came too late
            if not given.is_there:
                raise FileTierError("missing", f"node {endpoint} has this block no more")
            return frames[1:]

    def close(self) -> None:
        """Let go of all connections. No thread may use them any more."""
        for connections in self._connections.values():
            for connection in connections.values():
                connection.close()
        self._context.term()

    def _frames(self, endpoint: str, socket: zmq.Socket[bytes]) -> list[bytes]:
        """Return the frames of an answer; their number is limited."""
        frames = [socket.recv()]
        while socket.rcvmore:
            if len(frames) == len(self._shape.widths) + 2:
                self._disconnect(endpoint)
                raise FileTierError("damaged", f"node {endpoint} gives too much")
            frames.append(socket.recv())
        return frames

    def _no_answer(self, endpoint: str, what: str) -> FileTierError:
        """Close the connection, and let the node rest."""
        self._disconnect(endpoint)
        now_s = time.monotonic()
        resting = {name: end_s for name, end_s in self._rest_until_s.items() if end_s > now_s}
        self._rest_until_s = {**resting, endpoint: now_s + REST_S}
        return FileTierError("io", f"node {endpoint} {what}")

    def _own(self) -> dict[str, _Connection]:
        """Return this thread's connections."""
        return self._connections.setdefault(threading.get_ident(), {})

    def _disconnect(self, endpoint: str) -> None:
        connection = self._own().pop(endpoint, None)
        if connection is not None:
            connection.close()

    def _connected(self, endpoint: str) -> _Connection:
        own = self._own()
        if endpoint in own and own[endpoint].is_lost():
            self._disconnect(endpoint)
        if endpoint in own:
            return own[endpoint]
        if len(own) >= MAX_NODES:
            self._disconnect(next(iter(own)))
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.ipv6 = True
        socket.maxmsgsize = max(MAX_HEAD_BYTES, *self._shape.widths)
        socket.rcvhwm = socket.sndhwm = 2
        connection = own[endpoint] = _Connection(socket, socket.get_monitor_socket(_IS_LOST))
        try:
            if self.keys is not None:
                equip_peer(socket, self.keys)
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._disconnect(endpoint)
            raise FileTierError("io", f"node {endpoint} cannot be reached: {error}") from error
        return connection


class RemoteStore(FileStore):
    """Blocks on other nodes, read like files. Nothing is written."""

    def __init__(self, nodes: NodeConnections, shape: SegmentShape) -> None:
        """Read blocks of `shape`; `place` says from where."""
        super().__init__(DirectoryFiles(_NO_DIRECTORY), shape, StoreLimits(), "")
        self._nodes = nodes
        self._lock = threading.Lock()
        self._places: dict[bytes, list[tuple[str, float]]] = {}

    def place(self, keys: Sequence[bytes], endpoint: str, give_up_s: float) -> None:
        """Read each of these blocks once from this node, behind the reads before, unless it is
        later than `give_up_s`."""
        with self._lock:
            for key in keys:
                self._places.setdefault(key, []).append((endpoint, give_up_s))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget the last places of blocks that are not read."""
        for key in keys:
            self._take_place(key, -1)

    def read(self, key: bytes, payload: Sequence[memoryview]) -> FileHead:
        """Fetch a block into `payload`; return its head.

        Raises FileTierError; `payload` may hold anything then.
        """
        self._require_whole(payload)
        endpoint, give_up_s = self._take_place(key, 0)
        if time.monotonic() > give_up_s:
            raise FileTierError("io", f"node {endpoint} has given other blocks for too long")
        data, *parts = self._nodes.fetch(endpoint, key) or [b""]
        head = unpack_head(data, len(data) + sum(map(len, parts)))
        self._require_ours(head, key)
        if [len(part) for part in parts] != [len(view) for view in payload]:
            raise FileTierError("foreign", "its tensors have other sizes")
        for view, part in zip(payload, parts, strict=True):
            view[:] = part
        if checksum_of(payload) != head.checksum:
            raise FileTierError("damaged", "the checksum of its bytes is wrong")
        return head

    def _take_place(self, key: bytes, which: int) -> tuple[str, float]:
        with self._lock:
            places = self._places[key]
            found = places.pop(which)
            if not places:
                del self._places[key]
            return found


class Imports:
    """The jobs of one rank that copy blocks from other nodes."""

    def __init__(self, host: HostPool, silence_s: float, wait_s: float) -> None:
        """Copy into slots of `host`; a job's blocks that are not begun within `wait_s` fail."""
        self._wait_s = wait_s
        shape = host.segment.shape
        self._nodes = NodeConnections(shape, None, silence_s)
        self._store = RemoteStore(self._nodes, shape)
        self._pool = FilePool(
            self._store,
            host.segment.slot_views,
            ThreadLanes(NUM_LANES),
            max_queued_blocks=MAX_QUEUED_BLOCKS,
        )
        self._jobs = FileJobs(self._pool, host)
        self._refused: list[JobReport] = []

    def start(self, command: ImportCommand) -> None:
        """Begin to copy; what cannot be begun is reported."""
        keys = split(command.keys)
        self._nodes.keys = command.curve
        self._store.place(keys, command.endpoint, time.monotonic() + self._wait_s)
        fetch = Fetch(command.job_id, FILE_MEDIUM, command.keys, int32_array(command.slots))
        problem = self._jobs.start(fetch)
        if problem:
            self._store.forget(keys)
            self._refused.append(JobReport(command.job_id, ok=False, detail=problem))

    def poll(self) -> list[JobReport]:
        """Return the reports of jobs that have ended since the last call."""
        refused, self._refused = self._refused, []
        return refused + self._jobs.poll()

    def close(self) -> bool:
        """End the lanes; say whether that was possible in time: otherwise they may still write."""
        is_over = self._pool.close(CLOSE_S)
        if is_over:
            self._nodes.close()
        return is_over
