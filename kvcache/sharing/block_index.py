"""Which source holds which block: the index itself, as a plain class.

A *source* is the host memory and the files of one engine on one node. It numbers its messages; the
index takes them in order, each once, and asks for everything again when one is missing. So the
index is exact after a source's last message, however often either end was restarted. Reads no
clock.

Of the sources that hold a block, the first one has the *original*, the others have *copies*: they
are told so, and evict copies first. When a source loses an original, or is gone, the next one in
order gets it, and is told with the answer to its next message.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

from kvcache.base.errors import InvariantError
from kvcache.sharing.messages import (
    KEY_BYTES,
    MAX_ANSWER_NODES,
    MAX_ORIGINALS,
    NO_NODE,
    Answer,
    Holding,
    Question,
    Taken,
    pack_bits,
    split,
)

SILENCE_S = 4.0
"""A source that says nothing for so long is forgotten."""

MAX_SOURCES = 1024
MAX_BLOCKS = 1 << 23
"""Limit of blocks over all sources: about 125 bytes each, and less if several hold the same."""

NUM_PARTS = 256
"""Parts of a table of keys, by their first byte. Growing, and looking for the keys of a source that
is gone, take some milliseconds for each, and other messages come between."""

SWEEP_KEYS = 1 << 12
"""Keys that one call of `sweep` looks at, and at most a part more."""


@dataclass
class _Source:
    """`sign` is its character among the holders of a key. `became_original` are keys that it has
    not been told of; `answer` is what its last message was answered."""

    memory: bytes
    endpoint: str
    sign: str
    seq: int
    heard_s: float
    stream: tuple[str, str, str]
    num_keys: int = 0
    became_original: dict[bytes, None] = field(default_factory=dict)
    answer: Taken | None = None


@dataclass
class _Memory:
    """The sources whose memory has the same description, by sign. `parts[key[0]][key]`
    are the signs of the holders of a key, in order; those of one holder are one and the same text,
    so they need no memory. `gone`: by sign, how many keys of a source that is gone are left."""

    sources: dict[str, _Source] = field(default_factory=dict)
    parts: list[dict[bytes, str]] = field(default_factory=lambda: [{} for _ in range(NUM_PARTS)])
    gone: dict[str, int] = field(default_factory=dict)
    next_part: int = 0


class BlockIndex:
    """What all sources hold. Bounded by `max_sources` and `max_blocks`.

    Invariants: `_num_blocks` is the number of keys of all sources, also of those that are gone and
    were not swept yet. A memory has sources, or signs of such that are gone.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_sources: int = MAX_SOURCES) -> None:
        self._max_blocks, self._max_sources = max_blocks, max_sources
        self._sources: dict[bytes, _Source] = {}
        self._memories: dict[bytes, _Memory] = {}
        self._unswept: dict[bytes, _Memory] = {}
        self._signs = [chr(number) for number in range(2 * max_sources)]
        self._free_signs = self._signs[::-1]
        self._num_blocks = 0
        names = (
            "questions",
            "asked_blocks",
            "found_blocks",
            "left_out_blocks",
            "refused_sources",
            "silent_sources",
        )
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))

    def hold(self, told: Holding, now_s: float) -> Taken | None:
        """Take a source's message; None if there is no room for another source.

        Keys beyond the limit of blocks are left out, and counted; they are no copies.
        """
        source = self._sources.get(told.source)
        if told.is_first and (source is None or told.seq > source.seq):
            self._forget(told.source)
            if len(self._sources) >= self._max_sources:
                self._counts["refused_sources"] += 1
                return None
            source = self._begin(told, now_s)
        elif source is None or not source.seq <= told.seq <= source.seq + 1:
            return Taken(told.source, told.seq, False)
        source.heard_s = now_s
        if source.answer is None or told.seq > source.seq:
            source.seq = told.seq
            source.answer = self._change(source, told)
        return source.answer

    def find(self, question: Question) -> Answer:
        """Return who holds what, preferring sources that hold much of it. Changes no source."""
        keys = split(question.keys)
        memory = self._memories.get(question.memory, _NO_MEMORY)
        places_by_holders: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            places_by_holders.setdefault(memory.parts[key[0]].get(key, ""), []).append(place)
        places_of: dict[str, list[int]] = {}
        for holders, places in places_by_holders.items():  # most blocks of a prefix have the same
            for sign in holders:
                places_of.setdefault(sign, []).extend(places)
        asking = self._sources.get(question.source)
        if asking is not None:
            places_of.pop(asking.sign, None)
        held = [
            (memory.sources[sign].endpoint, places)
            for sign, places in places_of.items()
            if sign in memory.sources
        ]
        held.sort(key=lambda each: -len(each[1]))
        chosen = bytearray([NO_NODE]) * len(keys)
        endpoints: list[str] = []
        for endpoint, places in held[:MAX_ANSWER_NODES]:
            new = [place for place in places if chosen[place] == NO_NODE]
            for place in new:
                chosen[place] = len(endpoints)
            if new:
                endpoints.append(endpoint)
        self._counts["questions"] += 1
        self._counts["asked_blocks"] += len(keys)
        self._counts["found_blocks"] += len(keys) - chosen.count(NO_NODE)
        return Answer(question.number, tuple(endpoints), bytes(chosen))

    def expire(self, now_s: float) -> int:
        """Forget sources that are silent; return how many."""
        silent = [name for name, each in self._sources.items() if now_s > each.heard_s + SILENCE_S]
        for name in silent:
            self._forget(name)
        self._counts["silent_sources"] += len(silent)
        return len(silent)

    def sweep(self) -> bool:
        """Take sources that are gone out of the holders of some keys; say whether more are left.

        Call it often: who holds a block next learns that its own is the original.
        """
        left = SWEEP_KEYS
        while self._unswept and left > 0:
            name, memory = next(iter(self._unswept.items()))
            part = memory.parts[memory.next_part]
            memory.next_part = (memory.next_part + 1) % NUM_PARTS
            left -= len(part) + 1
            has_none = memory.gone.keys().isdisjoint
            for key, holders in [each for each in part.items() if not has_none(each[1])]:
                for sign in [sign for sign in holders if sign in memory.gone]:
                    self._drop_holder(memory, part, key, sign)
                    memory.gone[sign] -= 1
            for sign in [sign for sign, count in memory.gone.items() if not count]:
                del memory.gone[sign]
                self._free_signs.append(sign)
            if not memory.gone:
                del self._unswept[name]
                self._drop_if_empty(name, memory)
        return bool(self._unswept)

    def streams(self) -> dict[str, tuple[str, str]]:
        """Return the endpoints of the events of all sources that publish some, by topic. Of several
        sources of a topic, such as an engine before and after its restart, the last one counts."""
        streams = [each.stream for each in self._sources.values() if each.stream[0]]
        return {topic: (live, replay) for topic, live, replay in streams}

    def statistics(self) -> dict[str, object]:
        """Return the number of held blocks, how many of them are copies, and counts since the
        start, as values for JSON."""
        sources = [
            {
                "endpoint": each.endpoint,
                "memory": each.memory.hex(),
                "num_blocks": each.num_keys,
                "topic": each.stream[0],
            }
            for each in self._sources.values()
        ]
        counts = {f"num_{name}": count for name, count in sorted(self._counts.items())}
        num_originals = sum(len(part) for each in self._memories.values() for part in each.parts)
        return {
            "num_blocks": self._num_blocks,
            "num_copies": self._num_blocks - num_originals,
            "sources": sources,
            **counts,
        }

    def check(self) -> None:
        """Raise InvariantError with the sum that failed. Slow."""
        found: Counter[tuple[bytes, str]] = Counter()
        for name, memory in self._memories.items():
            for part in memory.parts:
                for key, holders in part.items():
                    if not holders or len(set(holders)) < len(holders):
                        raise InvariantError(f"the holders of {key.hex()} are {holders!r}")
                    found.update((name, sign) for sign in holders)
        counted = {(each.memory, each.sign): each.num_keys for each in self._sources.values()}
        for name, memory in self._memories.items():
            counted.update({(name, sign): count for sign, count in memory.gone.items()})
        if found != Counter({each: count for each, count in counted.items() if count}):
            raise InvariantError("sources count other keys than they hold")
        if self._num_blocks != found.total():
            raise InvariantError(f"{self._num_blocks} blocks are counted, {found.total()} are held")
        if len(self._free_signs) + len(counted) != len(self._signs):
            raise InvariantError(f"{len(self._free_signs)} signs are free, {len(counted)} are not")

    def _begin(self, told: Holding, now_s: float) -> _Source:
        """Make a source without keys."""
        while not self._free_signs:
            self.sweep()
        sign, stream = self._free_signs.pop(), (told.topic, told.live, told.replay)
        source = _Source(told.memory, told.endpoint, sign, told.seq, now_s, stream)
        self._sources[told.source] = source
        self._memories.setdefault(told.memory, _Memory()).sources[sign] = source
        return source

    def _change(self, source: _Source, told: Holding) -> Taken:
        """Take over a message's keys; return the answer to it."""
        while self._num_blocks + len(told.added) // KEY_BYTES > self._max_blocks and self.sweep():
            pass  # what is gone takes no room from what is held
        memory, sign, untold = self._memories[source.memory], source.sign, source.became_original
        for key in split(told.removed):
            part = memory.parts[key[0]]
            if sign in part.get(key, ""):
                untold.pop(key, None)
                source.num_keys -= 1
                self._drop_holder(memory, part, key, sign)
        copies: list[bool] = []
        for key in split(told.added):
            part = memory.parts[key[0]]
            holders = part.get(key, "")
            if sign not in holders:
                if self._num_blocks >= self._max_blocks:
                    self._counts["left_out_blocks"] += 1
                    copies.append(False)
                    continue
                part[key] = holders + sign if holders else sign  # one text for all alone
                source.num_keys += 1
                self._num_blocks += 1
            before = holders and holders.partition(sign)[0]
            copies.append(any(map(memory.sources.__contains__, before)))
        originals = list(islice(untold, MAX_ORIGINALS))
        for key in originals:
            del untold[key]
        return Taken(told.source, told.seq, True, pack_bits(copies), b"".join(originals))

    def _drop_holder(self, memory: _Memory, part: dict[bytes, str], key: bytes, sign: str) -> None:
        """Take a sign out of the holders of a key; the next one may have the original then."""
        self._num_blocks -= 1
        holders = part[key]
        rest = holders.replace(sign, "")
        if not rest:
            del part[key]
            return
        part[key] = rest if len(rest) > 1 else self._signs[ord(rest)]
        if holders[0] == sign and (heir := memory.sources.get(rest[0])) is not None:
            heir.became_original[key] = None

    def _forget(self, name: bytes) -> None:
        """Forget a source at once, and its keys with the next sweeps."""
        source = self._sources.pop(name, None)
        if source is None:
            return
        memory = self._memories[source.memory]
        del memory.sources[source.sign]
        if source.num_keys:
            memory.gone[source.sign] = source.num_keys
            self._unswept[source.memory] = memory
        else:
            self._free_signs.append(source.sign)
            self._drop_if_empty(source.memory, memory)

    def _drop_if_empty(self, name: bytes, memory: _Memory) -> None:
        if not memory.sources and not memory.gone:
            del self._memories[name]


_NO_MEMORY = _Memory()
