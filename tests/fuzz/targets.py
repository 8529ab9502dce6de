"""The targets: each decoder with valid input to begin with, and its documented errors."""

from __future__ import annotations

import io
import json
import random
import socket
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import msgpack
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

from actors.embedded.record import EmbeddedRecord
from kvcache.base.errors import (
    ConfigurationError,
    ExhaustedError,
    InvalidInputError,
    MalformedMessageError,
    ProtocolError,
    RecordingError,
    TraceError,
    VersionMismatchError,
)
from kvcache.config import load_config
from kvcache.coordinator.remote_calls import METHODS, RemoteCalls
from kvcache.core import BlocksRemoved, BlocksStored
from kvcache.events import EventCodec, decode_batch
from kvcache.events.feed_frames import FeedReader, pack_frame
from kvcache.events.subscription import Subscription
from kvcache.manager import KVCacheManager
from kvcache.memory_service import protocol as memory_protocol
from kvcache.planner.hf_config import model_from_hf_config
from kvcache.protocol.messages import Call
from kvcache.protocol.state_store import SmallState
from kvcache.protocol.wire import decode, encode
from kvcache.recorder.frames import FrameReader, frame
from kvcache.recorder.records import unpack_head as unpack_segment
from kvcache.recorder.records import unpack_record
from kvcache.requests.request_content import Namespace
from kvcache.simulate.mooncake import MooncakeTrace
from kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvcache.worker.files.format import START_BYTES, FileHead, FileTierError, pack_head, unpack_head
from tests.fuzz.mutations import mutate_bytes, mutate_json, mutate_msgpack
from tests.protocol.test_wire import MESSAGES, instances

ROOT = Path(__file__).resolve().parents[2]

Mutate = Callable[[bytes, list[bytes], random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """A decoder. `read` takes anything and may raise `errors`; `mutate` breaks `good` input."""

    name: str
    good: tuple[bytes, ...]
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = ()
    mutate: Mutate = mutate_bytes


def make_targets() -> dict[str, Target]:
    """Return all targets by name."""
    made = (
        _wire(),
        *_events(),
        _feed(),
        _service(),
        _file_heads(),
        *_records(),
        _small_state(),
        _embedded_record(),
        _configurations(),
        _hf_configs(),
        _traces(),
        _calls(),
    )
    return {target.name: target for target in made}


def _wire() -> Target:
    good: list[bytes] = []
    for cls in MESSAGES:

        @seed(1)
        @settings(
            max_examples=4,
            database=None,
            phases=[Phase.generate],
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(instances(cls))
        def collect(message: Any) -> None:
            good.append(encode(message))

        collect()
    return Target("messages", tuple(good), decode, (ProtocolError,), mutate_msgpack)


def _payloads() -> tuple[bytes, ...]:
    groups = (KVCacheGroupSpec(("layer.0",), FullAttentionSpec(4, num_kv_heads=1, head_size=8)),)
    digests = [bytes([i]) * 32 for i in range(3)]
    space = Namespace(0, None, "salt", None)
    events = [
        BlocksStored(0, "device", digests, None, np.arange(12, dtype=np.int32), 4, space),
        BlocksRemoved(0, "device", digests[:2]),
    ]
    codecs = [EventCodec(groups, encoding=encoding) for encoding in ("map", "array")]
    return tuple(codec.encode(1.5, events) for codec in codecs)


def _events() -> tuple[Target, Target]:
    payloads = _payloads()

    def follow(data: bytes) -> None:
        subscription = Subscription()
        number = struct.pack(">Q", 7)
        subscription.on_reply([b"", b"topic", number, payloads[0]], 0.0)
        subscription.on_live([b"topic", struct.pack(">Q", 8), data], 0.0)
        subscription.on_live([b"topic", data[:8], data], 0.0)
        subscription.on_reply([b"", data[:4], data[:8], data[8:]], 0.0)
        subscription.on_live(data.split(b"\0"), 0.0)

    batches = Target("events", payloads, decode_batch, (MalformedMessageError,), mutate_msgpack)
    return batches, Target("followers", payloads, follow, (), mutate_msgpack)


def _feed() -> Target:
    good = pack_frame("state", [1, 2], b"x") + pack_frame("events", 3, None)

    def read(data: bytes) -> None:
        reader = FeedReader()
        reader.feed(data[: len(data) // 2])
        reader.feed(data[len(data) // 2 :])

    return Target("feed", (good,), read, (MalformedMessageError,))


def _service() -> Target:
    good = tuple(
        msgpack.packb([memory_protocol.MEMORY_SERVICE_VERSION, *values])
        for values in (["attach", "name"], ["put", "name"], ["drop", "name"])
    )

    def read(data: bytes) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            theirs.send(data[: 2 * memory_protocol.MAX_PACKET_BYTES] or b"\0")
            memory_protocol.receive(ours)

    errors = (MalformedMessageError, VersionMismatchError)
    return Target("memory service", good, read, errors, mutate_msgpack)


def _file_heads() -> Target:
    head = FileHead(
        b"key", b"d" * 32, 0, "layout", 1, b"space", b"p" * 32, b"\1\0\0\0" * 4, b"", 256, 7
    )
    good = pack_head(head)

    def read(data: bytes) -> None:
        unpack_head(data, len(data) + 256)

    def mutate(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
        """Half the time with a correct checksum, as from an attacker who knows the format."""
        if chance.random() < 0.5:
            return mutate_bytes(data, others, chance)
        packed = mutate_msgpack(data[START_BYTES:], [data[START_BYTES:]], chance)
        start = bytearray(data[:START_BYTES])
        if chance.random() < 0.7:
            where = data[:START_BYTES].index(struct.pack("<I", len(data) - START_BYTES))
            start[where : where + 4] = struct.pack("<I", len(packed))
        start[-4:] = struct.pack("<I", google_crc32c.value(bytes(start[:-4]) + packed))
        return bytes(start) + packed

    return Target("files", (good,), read, (FileTierError,), mutate)


def _records() -> tuple[Target, Target]:
    payloads = (
        msgpack.packb(["released", 3, "client", [0.5]]),
        msgpack.packb(["let go", 4, "client"]),
        msgpack.packb(["state", 5, {"core": b"d" * 16}]),
        msgpack.packb(["segment", 1, "id", 0, 0, 1, "print", "{}", {}]),
        msgpack.packb(["epoch", 1, 1, 0, [], b""]),
        msgpack.packb(["executed", 2, b"message", [0.1], ["", {"hits": b"d"}, b""]]),
    )

    def read(data: bytes) -> None:
        for unpack in (unpack_record, unpack_segment):
            try:
                unpack(data)
            except (ProtocolError, InvalidInputError):
                continue

    def read_file(data: bytes) -> None:
        reader = FrameReader(io.BytesIO(data), Path("segment"), len(data))
        while reader.next() is not None:
            pass

    framed = b"".join(frame(payload) for payload in payloads)
    return (
        Target("records", payloads, read, (), mutate_msgpack),
        Target("segments", (framed,), read_file, (RecordingError,)),
    )


def _small_state() -> Target:
    errors = (MalformedMessageError, VersionMismatchError)

    def read(data: bytes) -> None:
        SmallState.from_bytes(data, "a test")

    return Target("small state", (SmallState().to_bytes(),), read, errors, mutate_msgpack)


def _embedded_record() -> Target:
    good = EmbeddedRecord("launch", "{}", None).to_bytes()

    def read(data: bytes) -> None:
        EmbeddedRecord.from_bytes(data, "a test")

    errors = (MalformedMessageError, VersionMismatchError)
    return Target("embedded record", (good,), read, errors, mutate_json)


def _as_file(read: Callable[[Path], object], suffix: str) -> Callable[[bytes], None]:
    def through_a_file(data: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:
            file.write(data)
            file.flush()
            read(Path(file.name))

    return through_a_file


def _configurations() -> Target:
    good = tuple(path.read_bytes() for path in sorted((ROOT / "configs").glob("cpu_*.yaml")))
    return Target("configurations", good, _as_file(load_config, ".yaml"), (ConfigurationError,))


def _hf_configs() -> Target:
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
    }
    gemma = {
        **llama,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    good = tuple(json.dumps(data).encode() for data in (llama, gemma))
    read = _as_file(model_from_hf_config, ".json")
    return Target("hf configs", good, read, (ConfigurationError,), mutate_json)


def _traces() -> Target:
    line = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    good = json.dumps(line).encode()

    def read(path: Path) -> None:
        for _ in MooncakeTrace(path):
            pass

    return Target("traces", (good,), _as_file(read, ".jsonl"), (TraceError,), mutate_json)


def _calls() -> Target:
    """Per-request calls with arbitrary arguments, all on one manager, which must stay
    consistent."""
    groups = (KVCacheGroupSpec(("layer.0",), FullAttentionSpec(4, num_kv_heads=1, head_size=8)),)
    manager = KVCacheManager(KVCacheConfig(32, (), groups), 64)
    calls = RemoteCalls(manager)
    request = {"request_id": "r", "token_ids": np.arange(9, dtype="<i4").tobytes()}
    arguments = (
        {"request": request, "num_new_tokens": 9},
        {"request": request},
        {"request_id": "r"},
        {"token_ids": np.arange(8, dtype="<i4").tobytes(), "ttl_s": 1.0},
        {"request": {**request, "request_id": "c"}, "parent": {"request_id": "r"}},
        {"request": request, "num_computed_tokens": 8},
    )
    good = tuple(
        msgpack.packb([method, values]) for method in sorted(METHODS) for values in arguments
    )

    def read(data: bytes) -> None:
        try:
            method, values = msgpack.unpackb(data, strict_map_key=False)
            packed = msgpack.packb(values)
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
            return  # not the subject of this test
        if not isinstance(method, str):
            return
        try:
            calls.call(Call("client", 1, 1, -1, method, packed))
        finally:
            manager.check()

    errors = (InvalidInputError, ExhaustedError)
    return Target("calls", good, read, errors, mutate_msgpack)
