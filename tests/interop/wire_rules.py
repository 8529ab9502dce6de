"""The rules that routers expect of a publisher, checked message by message.

Written from the format alone: bytes are read with msgpack and nothing of this project. Each rule
names the router that would lose something without it:

    dynamo      an unknown tag, or a hash as bytes, drops the whole batch; numbers go forward only;
                an event that names a hash twice is dropped; media are told apart
    llm-d       three frames, a topic of three parts, a rank; 0 as a parent means none
    aibrix      an array of exactly three; hashes every block under the event's parent
    mooncake    hashes are vLLM's own, of sha256_cbor
    every one   parents before children, full blocks, one removal for the last copy
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import cbor2
import msgpack

MEDIA: Final = ("GPU", "CPU", "STORAGE")
END_MARK: Final = b"\xff" * 8
MAX_NUMBER: Final = 2**63 - 1
MAX_HASH: Final = 2**64 - 1
STORED: Final = (
    ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    ("lora_id", "medium", "lora_name"),
    ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ("locality", "cache_salt"),
)
NAMES: Final = {
    "BlockStored": (STORED[0] + STORED[1], STORED[2] + STORED[3]),
    "BlockRemoved": (("block_hashes", "medium"), ("group_idx", "locality")),
    "AllBlocksCleared": ((), ()),
}
"""By tag: required names, and optional names in order of position."""


class BrokenRule(AssertionError):
    """A router would lose or misread something."""


def require(holds: object, router: str, text: str) -> None:
    if not holds:
        raise BrokenRule(f"{router}: {text}")


@dataclass
class WireRules:
    """Follows one stream from a batch with the whole state. `media` is the resulting state.

    `none_hash` is set if hashes must be those of sha256_cbor: the first parent in hex.
    """

    block_size: int
    encoding: str = "map"
    one_block_per_event: bool = False
    none_hash: str | None = None
    last_seq: int = -1
    media: dict[str, dict[int, int | None]] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    num_events: dict[str, int] = field(default_factory=dict)
    _digests: dict[int, bytes] = field(default_factory=dict)
    _events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _restated: set[int] | None = None

    def on_live(self, frames: Sequence[bytes]) -> None:
        """Check a message of the live stream."""
        require(len(frames) == 3, "llm-d", f"{len(frames)} frames instead of 3")
        topic, number, payload = frames
        self._check_topic(topic)
        self._on_batch(number, payload)

    def on_reply(self, frames: Sequence[bytes]) -> bool:
        """Check a message that answers a request, as a DEALER gets it; return whether it is the
        last.

        An answer repeats a published batch under its number; only a batch with the whole state may
        be a different one, under the newest number.
        """
        require(len(frames) == 4, "dynamo", f"an answer of {len(frames)} frames instead of 4")
        empty, topic, number, payload = frames
        require(not empty, "dynamo", "an answer does not begin with an empty frame")
        if number == END_MARK:
            require((topic, payload) == (b"", b""), "dynamo", "an end mark with contents")
            return True
        self._check_topic(topic)
        self._on_batch(number, payload)
        return False

    def _check_topic(self, topic: bytes) -> None:
        parts = topic.decode("utf-8").split("@")
        is_named = len(parts) == 3 and parts[0] == "kv" and all(parts)
        require(is_named, "llm-d", f"topic {topic!r} instead of kv@<instance>@<model>")

    def _on_batch(self, number: bytes, payload: bytes) -> None:
        require(len(number) == 8, "dynamo", f"a number of {len(number)} bytes")
        seq = int.from_bytes(number, "big")
        require(seq <= MAX_NUMBER, "dynamo", f"number {seq}")
        events = self._read(payload)
        is_restated = bool(events) and events[0]["type"] == "AllBlocksCleared"
        if not is_restated:
            said = self.payloads.setdefault(seq, payload)
            require(said == payload, "dynamo", f"another batch {seq} than before")
        if seq <= self.last_seq:
            return
        is_next = seq == self.last_seq + 1 or is_restated
        require(is_next, "dynamo", f"{seq} follows {self.last_seq}, and is no restatement")
        self.last_seq = seq
        self._restated = None
        if is_restated:
            hashes = [event["block_hashes"] for event in events if event["type"] == "BlockStored"]
            self._restated = {value for several in hashes for value in several}
        for event in events:
            tag = event["type"]
            self._events.append((seq, event))
            self.num_events[tag] = self.num_events.get(tag, 0) + 1
            if tag == "AllBlocksCleared":
                self.media.clear()
            elif tag == "BlockRemoved":
                self._on_removed(event)
            else:
                self._on_stored(event)
        self._check_removals(events)

    def _read(self, payload: bytes) -> list[dict[str, Any]]:
        batch = msgpack.unpackb(payload, strict_map_key=True)
        is_three = isinstance(batch, list) and len(batch) == 3
        require(is_three, "aibrix", f"a payload that is no array of three: {batch!r:.80}")
        time_s, events, rank = batch
        require(type(time_s) is float, "dynamo", f"a time of {time_s!r}")
        require(type(events) is list, "dynamo", f"events of {events!r:.80}")
        require(type(rank) is int and rank >= 0, "llm-d", f"a rank of {rank!r}")
        return [self._named(event) for event in events]

    def _named(self, event: Any) -> dict[str, Any]:
        """Return an event by names, from the configured encoding."""
        if self.encoding == "map":
            require(type(event) is dict, "dynamo", f"an event that is no map: {event!r:.80}")
            tag = event.get("type")
            always, optional = self._names_of(tag)
            keys = event.keys() - {"type"}
            require(keys >= {*always}, "dynamo", f"{tag} without {sorted({*always} - keys)}")
            unknown = sorted(keys - {*always, *optional})
            require(not unknown, "dynamo", f"{tag} with {unknown}")
            nulls = [key for key in optional if key in event and event[key] is None]
            require(not nulls, "dynamo", f"{tag} with {nulls} that hold nothing")
            return event
        require(type(event) is list and event, "dynamo", f"an event of no positions: {event!r:.80}")
        always, optional = self._names_of(event[0])
        names = always + optional
        is_whole = len(always) <= len(event) - 1 <= len(names)
        require(is_whole, "dynamo", f"{event[0]} of {len(event)} positions")
        return {"type": event[0], **dict(zip(names, event[1:], strict=False))}

    def _names_of(self, tag: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        require(type(tag) is str and tag in NAMES, "dynamo", f"an event of type {tag!r}")
        return NAMES[tag]

    def _on_stored(self, event: dict[str, Any]) -> None:
        hashes, parent = self._hashes(event), event["parent_block_hash"]
        require(hashes, "dynamo", "a store of no blocks")
        if parent is not None:
            self._check_hash(parent)
            require(parent not in hashes, "dynamo", "a block that is its own parent")
        size, tokens = event["block_size"], event["token_ids"]
        require(size == self.block_size, "dynamo", f"blocks of {size} tokens")
        require(
            type(tokens) is list and len(tokens) == len(hashes) * size,
            "dynamo",
            f"{len(tokens)} tokens for {len(hashes)} blocks",
        )
        require(all(type(t) is int and t >= 0 for t in tokens), "dynamo", "tokens that are none")
        require(event["lora_id"] is None, "dynamo", "lora_id, which was given up for lora_name")
        if self.one_block_per_event:
            require(len(hashes) == 1, "aibrix", f"{len(hashes)} blocks in one event")
        self._check_kind(event)
        self._check_names(event, len(hashes))
        self._put(event, hashes, parent)
        if self.none_hash is not None:
            self._check_digests(event, hashes, parent)

    def _check_kind(self, event: dict[str, Any]) -> None:
        self._check_medium(event)
        kind = event.get("kv_cache_spec_kind")
        require(kind == "full_attention", "dynamo", f"kind {kind!r}")
        require(event.get("group_idx") == 0, "llm-d", f"group {event.get('group_idx')!r}")
        window = event.get("kv_cache_spec_sliding_window")
        require(window is None, "llm-d", f"a window of {window!r}")

    def _check_names(self, event: dict[str, Any], num_blocks: int) -> None:
        """Check that names are where each router looks: in the event, and in the extra keys."""
        extra, salt, lora = event.get("extra_keys"), event.get("cache_salt"), event["lora_name"]
        extra = [None] * num_blocks if extra is None else extra
        require(len(extra) == num_blocks, "llm-d", f"extra keys of {len(extra)} blocks")
        if salt is not None and event["parent_block_hash"] is None:
            require(salt in (extra[0] or ()), "llm-d", "a salt that no extra key says")
        if lora is not None:
            missing = [keys for keys in extra if lora not in (keys or ())]
            require(not missing, "llm-d", "an adapter that not all extra keys say")

    def _put(self, event: dict[str, Any], hashes: list[int], parent: int | None) -> None:
        medium = self.media.setdefault(event["medium"], {})
        # Lower tiers may have blocks whose parent is on the device.
        above = [medium] if event["medium"] == "GPU" else list(self.media.values())
        if parent is not None and not any(parent in there for there in above):
            # A whole state may have blocks whose parent has gone since they were stored.
            has_gone = self._restated is not None and parent not in self._restated
            require(has_gone, "every one", self._about_orphan(event, parent))
        for value in hashes:
            require(value not in medium, "every one", f"{value} is stored twice")
            medium[value] = parent
            parent = value

    def _about_orphan(self, event: dict[str, Any], parent: int) -> str:
        """Return the text about a child without its parent: what was said about both."""
        child = event["block_hashes"][0]
        lines = [f"a child before its parent {parent}: {child} in {event['medium']}"]
        for seq, said in self._events:
            hashes = said.get("block_hashes", ())
            if said["type"] == "AllBlocksCleared":
                lines.append(f"  {seq} all blocks cleared")
            lines += [
                f"  {seq} {said['type']} {said['medium']}, {hashes.index(value)} of {len(hashes)}: "
                f"the {name}"
                for value, name in ((parent, "parent"), (child, "child"))
                if value in hashes
            ]
        return "\n".join(lines)

    def _on_removed(self, event: dict[str, Any]) -> None:
        self._check_medium(event)
        require(event.get("group_idx") == 0, "llm-d", f"group {event.get('group_idx')!r}")
        medium = self.media.get(event["medium"], {})
        for value in self._hashes(event):
            require(value in medium, "every one", f"{value} is removed, and was not there")
            del medium[value]

    def _check_removals(self, events: Sequence[dict[str, Any]]) -> None:
        """Check that adjacent removals are one event."""
        for one, next_one in pairwise(events):
            is_pair = one["type"] == next_one["type"] == "BlockRemoved"
            together = is_pair and one["medium"] == next_one["medium"]
            require(not together, "every one", "two removals behind each other")

    def _check_medium(self, event: dict[str, Any]) -> None:
        require(event["medium"] in MEDIA, "dynamo", f"medium {event['medium']!r}")
        locality = event.get("locality")
        require(locality in ("LOCAL", None), "dynamo", f"locality {locality!r}")

    def _hashes(self, event: dict[str, Any]) -> list[int]:
        hashes = event["block_hashes"]
        require(type(hashes) is list, "dynamo", f"hashes of {hashes!r:.80}")
        for value in hashes:
            self._check_hash(value)
        require(len(set(hashes)) == len(hashes), "dynamo", "a hash twice in one event")
        return hashes

    def _check_hash(self, value: Any) -> None:
        require(type(value) is int, "dynamo", f"hash {value!r} is no integer")
        require(0 < value <= MAX_HASH, "llm-d", f"hash {value} is 0, or beyond 64 bits")

    def _check_digests(self, event: dict[str, Any], hashes: list[int], parent: int | None) -> None:
        """Check that blocks without names have vLLM's hashes."""
        digest = bytes.fromhex(self.none_hash or "")
        if parent is not None:
            if parent not in self._digests:
                return
            digest = self._digests[parent]
        keys = event.get("extra_keys") or [None] * len(hashes)
        size = self.block_size
        for i, value in enumerate(hashes):
            if keys[i] or event.get("cache_salt"):
                return
            tokens = tuple(event["token_ids"][i * size : (i + 1) * size])
            digest = hashlib.sha256(cbor2.dumps((digest, tokens, None), canonical=True)).digest()
            expected = int.from_bytes(digest[-8:], "big")
            require(value == expected, "mooncake", f"hash {value} instead of vLLM's {expected}")
            self._digests[value] = digest
