"""The prefixes of a cache as its events tell them, and which of them stand out.

Below `kvcache watch`. Blocks by hash, each with its parent; those of group 0 only, which every
prompt goes through. Refuses to look at tokens: prefixes are shown by hash and length.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.events.wire_events import ClearedEvent, RemovedEvent, StoredEvent, WireEvent


@dataclass(frozen=True)
class PrefixRow:
    """The prefix that ends with block `block_hash`: its length, and how many blocks continue it."""

    block_hash: int
    num_blocks: int
    num_tokens: int
    num_children: int
    lora_name: str | None
    media: tuple[str, ...]


@dataclass(frozen=True)
class TopPrefixes:
    """Prefixes that stand out, the first ones first: those that most blocks continue, the longest,
    and those that were extended last."""

    most_children: tuple[PrefixRow, ...]
    longest: tuple[PrefixRow, ...]
    newest: tuple[PrefixRow, ...]


@dataclass
class _Block:
    parent: int
    num_blocks: int
    num_tokens: int
    lora_name: str | None
    media: set[str]
    order: int


class PrefixForest:
    """Blocks and what continues them. One owner, one thread."""

    def __init__(self) -> None:
        """Know no block."""
        self._blocks: dict[int, _Block] = {}
        self._children: dict[int, int] = {}
        """How many present blocks continue a block, which itself may be gone."""
        self._order = 0

    def __len__(self) -> int:
        """Return how many blocks there are, in whatever medium, each counted once."""
        return len(self._blocks)

    def follow(self, events: Iterable[WireEvent]) -> None:
        """Take events, in order."""
        for event in events:
            if isinstance(event, ClearedEvent):
                self._blocks.clear()
                self._children.clear()
            elif event.group_idx:
                continue
            elif isinstance(event, StoredEvent):
                self._put(event)
            else:
                self._take(event)

    def top(self, count: int) -> TopPrefixes:
        """Return the `count` first prefixes of each sort."""
        branching = [h for h, n in self._children.items() if n > 1 and h in self._blocks]
        ends = [h for h in self._blocks if not self._children.get(h)]
        blocks = self._blocks
        children = heapq.nlargest(
            count, branching, key=lambda h: (self._children[h], blocks[h].num_blocks, -h)
        )
        longest = heapq.nlargest(count, ends, key=lambda h: (blocks[h].num_blocks, -h))
        newest = heapq.nlargest(count, ends, key=lambda h: blocks[h].order)
        return TopPrefixes(*(tuple(map(self._row, found)) for found in (children, longest, newest)))

    def _put(self, event: StoredEvent) -> None:
        parent = event.parent_block_hash or 0
        for block_hash in event.block_hashes.tolist():
            block = self._blocks.get(block_hash)
            if block is None:
                above = self._blocks.get(parent)
                depth, tokens = (0, 0) if above is None else (above.num_blocks, above.num_tokens)
                self._order += 1
                self._blocks[block_hash] = _Block(
                    parent,
                    depth + 1,
                    tokens + event.block_size,
                    event.lora_name,
                    {event.medium},
                    self._order,
                )
                self._children[parent] = self._children.get(parent, 0) + 1
            else:
                block.media.add(event.medium)
            parent = block_hash

    def _take(self, event: RemovedEvent) -> None:
        for block_hash in event.block_hashes.tolist():
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            block.media.discard(event.medium)
            if block.media:
                continue
            del self._blocks[block_hash]
            left = self._children[block.parent] - 1
            if left:
                self._children[block.parent] = left
            else:
                del self._children[block.parent]

    def _row(self, block_hash: int) -> PrefixRow:
        block = self._blocks[block_hash]
        return PrefixRow(
            block_hash,
            block.num_blocks,
            block.num_tokens,
            self._children.get(block_hash, 0),
            block.lora_name,
            tuple(sorted(block.media)),
        )
