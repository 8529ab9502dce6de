"""Shows an engine's memory and files to other nodes: a process that the engine's scheduler starts.

    engine's ranks ──▶ segments, kept by the memory service
                            │ labels, followed          │ bytes, read on request
                            ▼                           ▼
    coordinator ◀──Holding── BlockServer ──Given──▶ ranks of engines on other nodes

Reads the segments as replicas of a node do, so the engine never waits for it. A block is given as
in a file: a head that describes it, and its bytes. Its label is compared before and after the
copy, because the engine may evict the block meanwhile; the receiver compares the checksum.

    python -m kvcache.integrations.vllm.block_server < SETTINGS

One line of JSON on standard input; the process ends when the input does, with the engine. Lines of
JSON on standard output tell the engine how many blocks it has given, from memory and from files,
which ones, which of its blocks are copies of what other nodes keep, and where a coordinator on Ray
listens now.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sys
import time
from collections import ChainMap, Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import zmq

from kvcache.base.arrays import int32_array
from kvcache.base.curve import CurveGate, equip_peer, guard_server
from kvcache.base.errors import ClusterError, KVCacheError, ProtocolError
from kvcache.base.logs import get_logger, log_to_stderr
from kvcache.integrations.vllm.block_labels import block_labels
from kvcache.integrations.vllm.index_finder import IndexSearch
from kvcache.integrations.vllm.node_files import NodeFiles
from kvcache.integrations.vllm.peers import REFRESH_S, PeerIndex, read_segment
from kvcache.integrations.vllm.step_messages import PeerMemory
from kvcache.memory_service.client import MemoryServiceClient, service_address
from kvcache.offload.keys import OffloadKey
from kvcache.sharing.access import IndexPlace, require_address
from kvcache.sharing.index_updates import IndexUpdates
from kvcache.sharing.messages import MAX_MESSAGE_BYTES, Given, Taken, Wanted, pack, unpack
from kvcache.worker.files.format import FileHead, pack_head
from kvcache.worker.host_memory.segment import SegmentShape
from kvcache.worker.host_memory.segment_reader import SegmentReader

logger = get_logger(__name__)

MAX_REQUEST_BYTES = 4096
MAX_AT_ONCE = 32
QUEUED_REQUESTS = 64
QUEUED_BLOCKS = 16
"""For each connection. A rank has one request open on each; what does not fit is dropped."""

ALWAYS_S = 0.05
"""How long the process waits for requests before it looks whether it must announce something."""

TELL_S = 1.0
"""How often the engine is told how much was given, and which blocks, when no more are asked for."""

MAX_GIVEN = 1024
"""Blocks that the engine has not been told of; of further ones it is not told."""

KEYS_PER_LINE = 64
"""So that a line, as a pipe takes it whole or not at all, has less than 4,096 bytes."""

_NICENESS = 5


@dataclass(frozen=True)
class ServerSettings:
    """An engine's memory, and who is told of it. `source` and `memory` as in messages, as text.
    `ray` is the coordinator's name on Ray, or empty; `host` is the address of this node for others,
    or empty. `stream`: topic and endpoints of the engine's events, or empty. `directories`: of the
    ranks' files, or empty."""

    name: str
    replica: int
    shapes: tuple[SegmentShape, ...]
    source: str
    memory: str
    index: IndexPlace
    ray: str = ""
    host: str = ""
    stream: tuple[str, str, str] = ("", "", "")
    directories: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Return the line for the process."""
        values = {**asdict(self), "index": self.index.to_plain()}
        return json.dumps(values).encode() + b"\n"

    @staticmethod
    def of_json(line: bytes) -> ServerSettings:
        """Return what `to_json` was called on."""
        values: dict[str, Any] = json.loads(line)
        shapes = [{**each, "widths": tuple(each["widths"])} for each in values.pop("shapes")]
        values["index"] = IndexPlace.of_plain(values["index"])
        values["stream"] = tuple(values["stream"])
        values["directories"] = tuple(values["directories"])
        return ServerSettings(shapes=tuple(SegmentShape(**each) for each in shapes), **values)


class BlockServer:
    """Announces what segments and files hold, and gives their blocks. One thread."""

    def __init__(self, settings: ServerSettings, readers: Sequence[SegmentReader]) -> None:
        """Listen at a free port; `readers` by rank. Raises ClusterError if that is not possible."""
        keys = settings.index.keys
        self._readers = readers
        self._index = PeerIndex(PeerMemory(settings.replica, ()), readers)
        self._index.changed = set()
        self._refresh_at_s = 0.0
        self._files: NodeFiles | None = None
        self.counts: Counter[str] = Counter()
        self._given: dict[OffloadKey, None] = {}
        self._given_s = self._heard_s = time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = None if keys is None else CurveGate(self._context, keys)
        self._requests = self._context.socket(zmq.ROUTER)
        self._requests.maxmsgsize = MAX_REQUEST_BYTES
        self._requests.rcvhwm, self._requests.sndhwm = QUEUED_REQUESTS, QUEUED_BLOCKS
        guard_server(self._requests, keys)
        self._coordinator = self._context.socket(zmq.DEALER)
        self._coordinator.maxmsgsize = MAX_MESSAGE_BYTES
        self._coordinator.sndhwm = self._coordinator.rcvhwm = QUEUED_REQUESTS
        if keys is not None:
            equip_peer(self._coordinator, keys)
        for each in (self._requests, self._coordinator):
            each.linger = 0
            each.ipv6 = True
        host = settings.host or own_host(settings.index.address)
        try:
            self._coordinator.connect(settings.index.address)
            self._requests.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ClusterError(
                f"blocks cannot be shared with other nodes at {host!r} ({error}): set "
                "coordinator.host to an address of this node"
            ) from error
        self._files = self._open_files(settings)
        self.endpoint = self._requests.getsockopt_string(zmq.LAST_ENDPOINT)
        self._updates = IndexUpdates(
            bytes.fromhex(settings.source),
            bytes.fromhex(settings.memory),
            self.endpoint,
            ChainMap(self._index.slots, {} if self._files is None else self._files.held).keys(),
            settings.stream,
            last_seq=time.time_ns(),
        )
        self.poller = zmq.Poller()
        for each in (self._requests, self._coordinator):
            self.poller.register(each, zmq.POLLIN)
        if self._files is not None:
            self.poller.register(self._files.answers, zmq.POLLIN)

    @property
    def is_known(self) -> bool:
        """Whether the coordinator knows all that was held at the last look."""
        return self._updates.is_known

    @property
    def beliefs(self) -> dict[bytes, bool]:
        """Which blocks the coordinator says are copies, and which are not. The caller takes out
        what it has told the engine."""
        return self._updates.beliefs

    @property
    def silent_s(self) -> float:
        """How long the coordinator has not answered; it is asked at least once a second."""
        return time.monotonic() - self._heard_s

    def take_given(self) -> list[OffloadKey]:
        """Return the blocks that were given since the last call, each once, in order. While others
        are asked for, which may continue them, only when there are many."""
        is_over = time.monotonic() >= self._given_s + TELL_S or len(self._given) == MAX_GIVEN
        given = list(self._given) if is_over else []
        if given:
            self._given.clear()
        return given

    def turn(self) -> None:
        """Do what there is to do, without waiting."""
        now_s = time.monotonic()
        if now_s >= self._refresh_at_s:
            self._refresh_at_s = now_s + REFRESH_S
            self._index.refresh()
            changed = self._index.changed
            if self._files is not None:
                self._updates.changed(self._files.refresh())
            if changed:
                self._updates.changed(changed)
                changed.clear()
        self._take_answers()
        told = self._updates.next(now_s)
        if told is not None:
            self._send(self._coordinator, [pack(told)])
        self._give_files()
        for _ in range(MAX_AT_ONCE):
            try:
                frames = self._requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._serve(frames)

    def close(self) -> None:
        """Let go of files and sockets."""
        if self._files is not None:
            self._files.close()
        self._requests.close(0)
        self._coordinator.close(0)
        self._context.term()
        if self._gate is not None:
            self._gate.join()

    def _open_files(self, settings: ServerSettings) -> NodeFiles | None:
        """Return the files of the ranks; None without any."""
        if not settings.directories:
            return None
        try:
            return NodeFiles(settings.directories, settings.shapes)
        except OSError as error:
            logger.warning("files are not shared with other nodes: %s", error)
            return None

    def _take_answers(self) -> None:
        while True:
            try:
                frames = self._coordinator.recv_multipart(zmq.NOBLOCK)
                answer = unpack(frames[0])
            except zmq.Again:
                return
            except ProtocolError:
                continue
            if isinstance(answer, Taken):
                self._heard_s = time.monotonic()
                self._updates.taken(answer)

    def _serve(self, frames: list[bytes]) -> None:
        try:
            wanted = unpack(frames[1]) if len(frames) == 2 else None
        except ProtocolError:
            wanted = None
        if not isinstance(wanted, Wanted):
            self.counts["malformed"] += 1
            return
        key = OffloadKey(wanted.key)
        block = self._block(wanted.rank, key)
        asked = [frames[0], str(wanted.number).encode()]
        is_rank = 0 <= wanted.rank < len(self._readers)
        if block is None and is_rank and self._files is not None and key in self._files.held:
            if self._files.ask(asked, wanted.rank, key):
                self._note_given(wanted.rank, key)
                return
            self.counts["refused_files"] += 1
        if block is not None:
            self._note_given(wanted.rank, key)
        self._give(asked, block or (), "given")

    def _note_given(self, rank: int, key: OffloadKey) -> None:
        """Take note of a block that is given, when the first rank asks for it."""
        if rank == 0 and len(self._given) < MAX_GIVEN:
            self._given[key] = None
            self._given_s = time.monotonic()

    def _give_files(self) -> None:
        """Send blocks that have been read from files."""
        while self._files is not None:
            try:
                frames = self._files.answers.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._give(frames[:2], frames[2:], "given_from_files")

    def _give(self, asked: Sequence[bytes], block: Sequence[bytes], what: str) -> None:
        """Answer who has asked, `[identity, number]`; without `block`, that it is not held."""
        self.counts[what if block else "missing"] += 1
        given = pack(Given(int(asked[1]), bool(block)))
        self._send(self._requests, [asked[0], given, *block])

    def _block(self, rank: int, key: OffloadKey) -> list[bytes] | None:
        """Return the head and the tensors of a rank's block, None if it is not held."""
        (slot,) = self._index.slots_of([key])
        if slot < 0 or not 0 <= rank < len(self._readers):
            return None
        reader, slots = self._readers[rank], int32_array([slot])
        rows = reader.rows_at(slots)
        label = block_labels(slots, [key])
        digest = np.frombuffer(label.digests, np.uint8)
        is_right = reader.are_whole(rows) & (rows["digest"] == digest).all(axis=1)
        if not (is_right & (rows["group"] == label.groups)).all():
            return None
        row, shape = rows[0], reader.shape
        names = row["inline"].tobytes()
        head = FileHead(
            key=key,
            digest=label.digests,
            group=int(row["group"]),
            layout_fingerprint=shape.layout_fingerprint,
            rank=shape.rank,
            namespace=names[: int(row["namespace_bytes"])],
            parent_digest=row["parent"].tobytes(),
            token_bytes=b"",
            extra_keys=b"",
            block_bytes=shape.slot_bytes,
            checksum=int(row["checksum"]),
        )
        parts = [tensor[slot].numpy().tobytes() for tensor in reader.tensors]
        if not reader.are_unchanged(slots, rows).all():
            return None
        return [pack_head(head), *parts]

    def _send(self, socket_: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        try:
            socket_.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.counts["dropped"] += 1


def own_host(coordinator: str) -> str:
    """Return the address of this node from which the coordinator is reached.

    Raises ClusterError if it is reached from none.
    """
    host, port = require_address(coordinator)
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as unconnected:
            unconnected.connect(address)  # sends nothing
            own = str(unconnected.getsockname()[0])
    except OSError as error:
        raise ClusterError(
            f"there is no way to the coordinator at {coordinator}: {error}"
        ) from error
    return f"[{own}]" if ":" in own else own


def open_readers(settings: ServerSettings) -> list[SegmentReader]:
    """Return readers of the engine's segments, by rank; raises KVCacheError, OSError."""
    service = service_address(settings.name, settings.replica)
    kept = MemoryServiceClient(service.address, service.timeout_s).list(f"{service.cluster}/")
    readers = []
    for shape in settings.shapes:
        name = service.name_of(shape.rank)
        if name not in kept:
            raise ClusterError(f"the memory service does not keep {name}")
        readers.append(read_segment(service, kept[name], shape))
    return readers


class EngineLines:
    """What the engine is told, in lines on standard output. Never waits: what the engine has not
    read may leave no room for more."""

    def __init__(self) -> None:
        os.set_blocking(sys.stdout.fileno(), False)
        self._counts: dict[str, int] = {}
        self._moved_to: IndexPlace | None = None
        self._tell_at_s = 0.0

    def moved_to(self, index: IndexPlace) -> None:
        """Tell where the coordinator listens, as soon as there is room."""
        self._moved_to = index
        self._tell_moved()

    def tell(self, server: BlockServer) -> None:
        """Tell what is new, now and then."""
        now_s = time.monotonic()
        if now_s < self._tell_at_s:
            return
        self._tell_at_s = now_s + TELL_S
        self._tell_moved()
        if server.counts != self._counts and self._say({"counts": server.counts}):
            self._counts = dict(server.counts)
        given = server.take_given()
        for first in range(0, len(given), KEYS_PER_LINE):
            part = given[first : first + KEYS_PER_LINE]
            self._say({"given": [base64.b64encode(key).decode() for key in part]})
        self._tell_beliefs(server.beliefs)
        if server.beliefs:  # there was no room for all of them
            self._tell_at_s = now_s + ALWAYS_S

    def _tell_moved(self) -> None:
        if self._moved_to is not None and self._say({"index": self._moved_to.to_plain()}):
            self._moved_to = None

    def _tell_beliefs(self, beliefs: dict[bytes, bool]) -> None:
        """Tell as many of them as there is room for; the others are kept, each in its newest
        state."""
        while beliefs:
            part = [beliefs.popitem() for _ in range(min(KEYS_PER_LINE, len(beliefs)))]
            line = {
                what: base64.b64encode(b"".join(key for key, bit in part if bit is is_copy))
                for what, is_copy in (("copies", True), ("originals", False))
            }
            if not self._say({what: keys.decode() for what, keys in line.items()}):
                beliefs.update(part)
                return

    def _say(self, told: dict[str, Any]) -> bool:
        try:
            os.write(sys.stdout.fileno(), json.dumps(told).encode() + b"\n")
        except OSError:  # the engine does not read, or has ended
            return False
        return True


def serve(server: BlockServer, search: IndexSearch, lines: EngineLines) -> IndexPlace | None:
    """Serve until the coordinator listens elsewhere, and return where; None when standard input has
    ended."""
    server.poller.register(sys.stdin, zmq.POLLIN)
    while sys.stdin.fileno() not in dict(server.poller.poll(int(1000 * ALWAYS_S))):
        server.turn()
        lines.tell(server)
        moved_to = search.moved_to(server.silent_s, time.monotonic())
        if moved_to is not None:
            return moved_to
    return None


def main() -> int:
    """Serve until standard input ends; return the exit status."""
    # Ctrl-C in a terminal is for the engine: this process ends after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr(("kvcache",))
    settings = ServerSettings.of_json(sys.stdin.buffer.readline())
    os.nice(_NICENESS)
    lines, search = EngineLines(), IndexSearch(settings.ray, settings.index)
    try:
        readers = open_readers(settings)
        while True:
            server = BlockServer(settings, readers)
            logger.info("blocks are shared with other nodes at %s", server.endpoint)
            moved_to = serve(server, search, lines)
            server.close()
            if moved_to is None:
                return 0
            logger.info("the coordinator listens at %s now", moved_to.address)
            lines.moved_to(moved_to)
            settings = replace(settings, index=moved_to)
    except (KVCacheError, OSError) as error:
        logger.error("blocks are not shared with other nodes: %s", error)
        return 1
    finally:
        search.close()


if __name__ == "__main__":
    sys.exit(main())
