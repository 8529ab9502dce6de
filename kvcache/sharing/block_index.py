"""Which source holds which block: the index itself, as a plain class.

A *source* is the host memory of one engine on one node. It numbers its messages; the index takes
them in order, each once, and asks for everything again when one is missing. So the index is exact
after a source's last message, however often either end was restarted. Reads no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcache.sharing.messages import (
    MAX_ANSWER_NODES,
    NO_NODE,
    Answer,
    Holding,
    Question,
    Taken,
    split,
)

SILENCE_S = 4.0
"""A source that says nothing for so long is forgotten."""

MAX_SOURCES = 1024
MAX_BLOCKS = 1 << 23
"""Limit of blocks over all sources, about 130 bytes each."""


@dataclass
class _Source:
    memory: bytes
    endpoint: str
    seq: int
    heard_s: float
    stream: tuple[str, str, str] = ("", "", "")
    keys: set[bytes] = field(default_factory=set)


class BlockIndex:
    """What all sources hold. Bounded by `max_sources` and `max_blocks`.

    Invariants: `_num_blocks` is the number of keys of all sources; `_by_memory[m]` are the sources
    whose memory has the description `m`, and is not empty.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_sources: int = MAX_SOURCES) -> None:
        """Know no source."""
        self._max_blocks, self._max_sources = max_blocks, max_sources
        self._sources: dict[bytes, _Source] = {}
        self._by_memory: dict[bytes, dict[bytes, _Source]] = {}
        self._num_blocks = 0
        self._counts: Counter[str] = Counter()

    def hold(self, told: Holding, now_s: float) -> Taken | None:
        """Take a source's message; None if there is no room for another source.

        Keys beyond the limit of blocks are left out, and counted.
        """
        source = self._sources.get(told.source)
        if told.is_first and (source is None or told.seq > source.seq):
            self._forget(told.source)
            if len(self._sources) >= self._max_sources:
                self._counts["refused_sources"] += 1
                return None
            stream = told.topic, told.live, told.replay
            source = _Source(told.memory, told.endpoint, told.seq, now_s, stream)
            self._sources[told.source] = source
            self._by_memory.setdefault(told.memory, {})[told.source] = source
            self._change(source, told)
        elif source is None or not source.seq <= told.seq <= source.seq + 1:
            return Taken(told.source, told.seq, False)
        elif told.seq == source.seq + 1:
            source.seq = told.seq
            self._change(source, told)
        source.heard_s = now_s
        return Taken(told.source, told.seq, True)

    def find(self, question: Question) -> Answer:
        """Return who holds what, preferring sources that hold much of it. Changes no source."""
        keys = split(question.keys)
        known = self._by_memory.get(question.memory, {})
        held: list[tuple[str, list[int]]] = []
        for name, source in known.items():
            if name == question.source:
                continue
            places = [place for place, key in enumerate(keys) if key in source.keys]
            if places:
                held.append((source.endpoint, places))
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

    def streams(self) -> dict[str, tuple[str, str]]:
        """Return the endpoints of the events of all sources that publish some, by topic. Of several
        sources of a topic, such as an engine before and after its restart, the last one counts."""
        streams = [each.stream for each in self._sources.values() if each.stream[0]]
        return {topic: (live, replay) for topic, live, replay in streams}

    def statistics(self) -> dict[str, object]:
        """Return the number of held blocks, and counts since the start, as values for JSON."""
        sources = [
            {
                "endpoint": each.endpoint,
                "memory": each.memory.hex(),
                "num_blocks": len(each.keys),
                "topic": each.stream[0],
            }
            for each in self._sources.values()
        ]
        counts = {f"num_{name}": count for name, count in sorted(self._counts.items())}
        return {"num_blocks": self._num_blocks, "sources": sources, **counts}

    def _change(self, source: _Source, told: Holding) -> None:
        self._num_blocks -= len(source.keys)
        source.keys.difference_update(split(told.removed))
        added = split(told.added)
        room = max(0, self._max_blocks - self._num_blocks - len(source.keys))
        source.keys.update(added[:room])
        self._counts["left_out_blocks"] += len(added[room:])
        self._num_blocks += len(source.keys)

    def _forget(self, name: bytes) -> None:
        source = self._sources.pop(name, None)
        if source is None:
            return
        self._num_blocks -= len(source.keys)
        of_memory = self._by_memory[source.memory]
        del of_memory[name]
        if not of_memory:
            del self._by_memory[source.memory]
