"""A slow, obvious model of a sequence allocator, with the bytes of its blocks.

Contents are whole prefixes, references are recounted, victims are found by searching. It shares no
code with the allocator; it gets the ids that the allocator chose and checks whether they are valid.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

Prefix = tuple[int, ...]
"""All tokens up to the end of a block, the extra hash first."""


@dataclass
class ModelSequence:
    """Tokens after the extra hash; the ids of its blocks, None while swapped out."""

    tokens: list[int]
    extra: int
    block_ids: list[int | None] = field(default_factory=list)
    num_computed: int = 0
    saved: list[list[Prefix | None]] = field(default_factory=list)

    def prefix(self, end: int) -> Prefix:
        return (self.extra, *self.tokens[:end])


class AllocatorModel:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sequences: list[ModelSequence] = []
        self.contents: dict[int, Prefix] = {}
        # Unheld and cached: access, number of a run of releases along a sequence, place in it.
        self.released: dict[int, tuple[float, int, int]] = {}
        self.last_released = -1
        self.accessed: dict[int, float] = {}
        self.bytes: list[list[Prefix | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.num_releases = 0
        # Blocks of a content that another one has: that one stays as long as they are held.
        self.twins: dict[int, int] = {}

    def references(self) -> Counter[int]:
        return Counter(b for s in self.sequences for b in s.block_ids if b is not None)

    def held(self) -> set[int]:
        return {*self.references(), *self.twins.values()}

    def num_free(self) -> int:
        return self.num_blocks - len(self.held())

    def blank(self) -> set[int]:
        return set(range(self.num_blocks)) - self.held() - set(self.contents)

    def holders(self, prefix: Prefix) -> list[int]:
        return [block for block, content in self.contents.items() if content == prefix]

    def find(self, prefix: Prefix) -> int | None:
        return next(iter(self.holders(prefix)), None)

    def victims(self, count: int) -> list[int]:
        """The oldest first, skipping blocks that a cached child needs, repeatedly."""
        contents = dict(self.contents)
        taken: list[int] = []
        queue = sorted(self.released, key=lambda block: self.released[block])
        while len(taken) < count:
            passed: list[int] = []
            num_before = len(taken)
            while len(taken) < count and queue:
                num = count - len(taken)
                candidates, queue = queue[:num], queue[num:]
                for block in candidates:
                    if self.is_needed(block, contents):
                        passed.append(block)
                    else:
                        del contents[block]
                        taken.append(block)
            assert len(taken) > num_before, "only needed blocks are left"
            queue = passed
        return taken

    def is_needed(self, block: int, contents: dict[int, Prefix]) -> bool:
        prefix = contents[block]
        return any(
            content[: len(prefix)] == prefix and len(content) == len(prefix) + self.block_size
            for content in contents.values()
        )

    def expect_taken(self, taken: list[int]) -> None:
        """Take blank blocks first, then the victims; drop their contents."""
        blank = self.blank()
        num_blank = min(len(taken), len(blank))
        assert set(taken[:num_blank]) <= blank
        victims = self.victims(len(taken) - num_blank)
        assert sorted(taken[num_blank:]) == sorted(victims)
        for block in victims:
            del self.contents[block]
            del self.released[block]

    def hold(self, block: int) -> None:
        self.released.pop(block, None)
        if block not in self.references():
            self.accessed[block] = -1.0

    def note_twin(self, block: int, cached: int) -> None:
        if cached in self.released:
            self.accessed[cached] = self.released.pop(cached)[0]
        self.twins[block] = cached

    def let_go(self, block: int) -> None:
        """Call after the reference was dropped."""
        if block in self.held():
            return
        if block in self.contents:
            self.release(block, self.accessed[block])
        if block in self.twins:
            self.let_go(self.twins.pop(block))

    def release(self, block: int, accessed: float) -> None:
        before = self.released.get(self.last_released)
        parent = self.contents[block][: -self.block_size]
        if before and self.find(parent) == self.last_released:
            self.released[block] = (accessed, before[1], before[2] - 1)
        else:
            self.num_releases += 1
            self.released[block] = (accessed, self.num_releases, 0)
        self.last_released = block

    def access(self, block: int, now: float) -> None:
        if block in self.released:
            del self.released[block]
            self.release(block, now)
        else:
            self.accessed[block] = now

    def check_bytes(self, sequence: ModelSequence) -> None:
        """Check that every computed token has the bytes of its whole prefix."""
        for position in range(sequence.num_computed):
            block = sequence.block_ids[position // self.block_size]
            assert block is not None
            found = self.bytes[block][position % self.block_size]
            assert found == sequence.prefix(position + 1), (block, position)

    def write(self, sequence: ModelSequence, num_tokens: int) -> None:
        for position in range(sequence.num_computed, sequence.num_computed + num_tokens):
            block = sequence.block_ids[position // self.block_size]
            assert block is not None
            self.bytes[block][position % self.block_size] = sequence.prefix(position + 1)
        sequence.num_computed += num_tokens

    def copy(self, copies: list[tuple[int, int]]) -> None:
        read = [(list(self.bytes[source]), destination) for source, destination in copies]
        assert len({destination for _, destination in read}) == len(read)
        for content, destination in read:
            self.bytes[destination] = content
