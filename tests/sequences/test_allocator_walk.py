"""Random walks of the sequence allocator against the slow model, bytes included."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcache import OutOfBlocksError, PrefixCachingBlock, PrefixCachingBlockAllocator
from tests.sequences.allocator_model import AllocatorModel, ModelSequence
from tests.walks import random_walk

NUM_BLOCKS = 14
NUM_STEPS = 90


class Walk:
    """One allocator and one model, driven by the same random operations."""

    def __init__(self, seed: int, *, merge_duplicates: bool) -> None:
        self.random = random.Random(seed)
        self.block_size = self.random.choice([1, 2, 4])
        self.merge_duplicates = merge_duplicates
        self.allocator = PrefixCachingBlockAllocator(
            NUM_BLOCKS, self.block_size, merge_duplicates=merge_duplicates
        )
        self.model = AllocatorModel(NUM_BLOCKS, self.block_size)
        self.blocks: list[list[PrefixCachingBlock]] = []
        self.swap_outs: list[tuple[ModelSequence, list[int]]] = []
        self.now = 0.0

    # --- operations --------------------------------------------------------------------------

    def start(self) -> None:
        size, rng = self.block_size, self.random
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * size + 1))]
        sequence = ModelSequence(tokens, rng.choice([0, 0, 0, 1]))
        num_full = len(tokens) // size
        prefixes = [sequence.prefix((i + 1) * size) for i in range(num_full)]
        hits = {
            prefix: block for prefix in prefixes if (block := self.model.find(prefix)) is not None
        }
        num_unheld = sum(block in self.model.released for block in hits.values())
        extra = sequence.extra or None
        chunks = [tokens[i * size : (i + 1) * size] for i in range(num_full)]
        needed = len(prefixes) - len(hits) + num_unheld
        before = self.allocator.get_num_free_blocks()
        try:
            blocks = self.allocator.allocate_immutable_blocks(None, chunks, extra)
        except OutOfBlocksError:
            assert needed > before == self.allocator.get_num_free_blocks()
            return
        assert needed <= before
        for block in hits.values():
            self.model.hold(block)
        ids = [self.id_of(block) for block in blocks]
        taken = [b for b, prefix in zip(ids, prefixes, strict=True) if prefix not in hits]
        self.model.sequences.append(sequence)
        # Hits are referenced before anything is taken.
        sequence.block_ids = [hits.get(prefix) for prefix in prefixes]
        self.model.expect_taken(taken)
        sequence.block_ids = list(ids)
        for block, prefix in zip(ids, prefixes, strict=True):
            if prefix in hits:
                assert block in self.model.holders(prefix)
            else:
                self.model.hold(block)
                self.model.accessed[block] = -1.0
                self.model.contents[block] = prefix
        for block in blocks:
            if not block.computed:
                break
            sequence.num_computed += size
        self.blocks.append(blocks)
        rest = tokens[num_full * size :]
        del sequence.tokens[num_full * size :]
        if rest and not self.extend(len(self.blocks) - 1, rest) and not blocks:
            self.blocks.pop()
            self.model.sequences.pop()

    def append(self) -> None:
        index = self.pick(lambda s: s.num_computed == len(s.tokens))
        if index is not None:
            count = self.random.randrange(1, self.block_size + 1)
            self.extend(index, [self.random.randrange(2) for _ in range(count)])

    def extend(self, index: int, tokens: list[int]) -> bool:
        """Append tokens, with a new block where the last is full; False if one finds no room."""
        sequence, blocks = self.model.sequences[index], self.blocks[index]
        while tokens:
            if len(sequence.tokens) == len(blocks) * self.block_size and not self.grow(index):
                return False
            now, tokens = (
                tokens[: blocks[-1].num_empty_slots],
                tokens[blocks[-1].num_empty_slots :],
            )
            if not self.fill(sequence, blocks[-1], now):
                return False
        return True

    def grow(self, index: int) -> bool:
        sequence, blocks = self.model.sequences[index], self.blocks[index]
        try:
            block = self.allocator.allocate_mutable_block(
                blocks[-1] if blocks else None, sequence.extra or None
            )
        except OutOfBlocksError:
            assert self.model.num_free() == 0
            return False
        self.model.expect_taken([self.id_of(block)])
        self.model.hold(self.id_of(block))
        self.model.accessed[self.id_of(block)] = -1.0
        blocks.append(block)
        sequence.block_ids.append(block.block_id)
        return True

    def fill(self, sequence: ModelSequence, block: PrefixCachingBlock, tokens: list[int]) -> bool:
        model, own = self.model, self.id_of(block)
        num_before = len(block.token_ids)
        is_shared = model.references()[own] > 1
        victims = model.victims(1) if is_shared and not model.blank() and model.released else []
        try:
            block.append_token_ids(tokens)
        except OutOfBlocksError:
            assert is_shared
            assert model.num_free() == 0
            assert (block.block_id, len(block.token_ids)) == (own, num_before)
            return False
        sequence.tokens += tokens
        new = self.id_of(block)
        prefix = sequence.prefix(len(sequence.tokens))
        cached = [b for b in model.holders(prefix) if b not in victims] if block.is_full else []
        if cached and self.merge_duplicates:
            assert [new] == cached
            model.hold(new)
            sequence.block_ids[-1] = new
            if is_shared:  # the copy's block was taken and freed: a victim was evicted for it
                for victim in victims:
                    del model.contents[victim], model.released[victim]
            return True
        if is_shared:
            assert new != own
            model.expect_taken([new])
            model.accessed[new] = -1.0
            sequence.block_ids[-1] = new
        else:
            assert new == own
        if cached:
            model.note_twin(new, cached[0])
        elif block.is_full:
            model.contents[new] = prefix
        return True

    def fork(self) -> None:
        index = self.pick(lambda s: s.num_computed == len(s.tokens))
        if index is None or not self.blocks[index]:
            return
        sequence = self.model.sequences[index]
        before = self.allocator.get_num_free_blocks()
        self.blocks.append(self.allocator.fork(self.blocks[index][-1]))
        assert self.allocator.get_num_free_blocks() == before
        self.model.sequences.append(
            ModelSequence(
                list(sequence.tokens),
                sequence.extra,
                list(sequence.block_ids),
                sequence.num_computed,
            )
        )

    def finish(self) -> None:
        index = self.pick(lambda s: True)
        if index is None:
            return
        sequence, blocks = self.model.sequences.pop(index), self.blocks.pop(index)
        pairs = list(zip(sequence.block_ids, blocks, strict=True))
        for block_id, block in pairs[:: self.random.choice([1, -1])]:
            self.allocator.free(block)
            assert block.block_id is None
            assert block_id is not None
            self.model.let_go(block_id)

    def swap(self) -> None:
        swapped = [i for i, s in enumerate(self.model.sequences) if s.saved]
        if swapped:
            self.swap_in(self.random.choice(swapped))
            return
        index = self.pick(lambda s: s.num_computed == len(s.tokens))
        if index is None:
            return
        self.forward()
        sequence, blocks = self.model.sequences[index], self.blocks[index]
        if sequence.num_computed < len(sequence.tokens) or not blocks:
            return
        ids = self.allocator.swap_out(blocks)
        assert ids == sequence.block_ids
        sequence.saved = [list(self.model.bytes[block]) for block in ids]
        sequence.block_ids = [None] * len(ids)
        for block in ids:
            self.model.let_go(block)

    def swap_in(self, index: int) -> None:
        self.forward()
        sequence, blocks = self.model.sequences[index], self.blocks[index]
        size = self.block_size
        prefixes = [sequence.prefix((i + 1) * size) for i in range(len(sequence.tokens) // size)]
        hits = {
            prefix: block for prefix in prefixes if (block := self.model.find(prefix)) is not None
        }
        num_unheld = sum(block in self.model.released for block in hits.values())
        num_full = len(prefixes) - len(hits) + num_unheld
        assert self.allocator.get_num_full_blocks_touched(blocks) == num_full
        needed = num_full + len(blocks) - len(prefixes)
        try:
            ids = self.allocator.swap_in(blocks)
        except OutOfBlocksError:
            assert needed > self.model.num_free()
            assert [block.block_id for block in blocks] == [None] * len(blocks)
            return
        assert needed <= self.model.num_free()
        for block in hits.values():
            self.model.hold(block)
        sequence.block_ids = [hits.get(prefix) for prefix in prefixes]
        self.model.expect_taken(
            [b for i, b in enumerate(ids) if i >= len(prefixes) or prefixes[i] not in hits]
        )
        sequence.block_ids = list(ids)
        loaded = []
        for position, block in enumerate(ids):
            prefix = prefixes[position] if position < len(prefixes) else None
            if prefix not in hits:
                self.model.accessed[block] = -1.0
                if prefix is not None:
                    self.model.contents[block] = prefix
            if not self.allocator.block_is_computed(block):
                self.model.bytes[block] = list(sequence.saved[position])
                if prefix is not None:
                    loaded.append(block)
        if loaded:
            self.allocator.mark_blocks_as_computed(loaded)
        sequence.saved = []
        self.model.check_bytes(sequence)

    def access(self) -> None:
        known = [b for b in range(NUM_BLOCKS) if b not in self.model.blank()]
        some = self.random.sample(known, min(len(known), self.random.randrange(4)))
        self.now += self.random.choice([0.0, 1.0])
        self.allocator.mark_blocks_as_accessed(some, self.now)
        for block in some:
            self.model.access(block, self.now)

    def forward(self) -> None:
        """Run the copies, then compute some or all tokens of every sequence that has any left."""
        self.model.copy(self.allocator.clear_copy_on_writes())
        for sequence in self.model.sequences:
            if not sequence.saved:
                self.model.check_bytes(sequence)
        in_whole = self.random.random() < 0.6
        for sequence in self.model.sequences:
            if not sequence.saved:
                left = len(sequence.tokens) - sequence.num_computed
                self.model.write(sequence, left if in_whole else self.random.randrange(left + 1))
        done = {
            block
            for sequence in self.model.sequences
            for block in sequence.block_ids[: sequence.num_computed // self.block_size]
            if block is not None
        }
        if in_whole:
            self.allocator.mark_blocks_as_computed([])
        elif done:
            self.allocator.mark_blocks_as_computed(sorted(done))
        for sequence in self.model.sequences:
            if not sequence.saved:
                self.model.check_bytes(sequence)

    # --- checks ------------------------------------------------------------------------------

    def check(self) -> None:
        self.allocator.check()
        model = self.model
        assert self.allocator.get_num_free_blocks() == model.num_free()
        references = model.references()
        for block in range(NUM_BLOCKS):
            assert self.allocator.get_num_references(block) == references[block]
        assert self.allocator.statistics().num_cached_blocks == len(model.contents)
        for sequence, blocks in zip(model.sequences, self.blocks, strict=True):
            assert [block.block_id for block in blocks] == sequence.block_ids
            assert [t for block in blocks for t in block.token_ids] == sequence.tokens
        for block, prefix in model.contents.items():
            if self.allocator.block_is_computed(block):
                expected = [prefix[: len(prefix) - i] for i in reversed(range(self.block_size))]
                assert model.bytes[block] == expected, block

    def pick(self, fits: Callable[[ModelSequence], bool]) -> int | None:
        """A sequence that is not swapped out."""
        here = [i for i, s in enumerate(self.model.sequences) if not s.saved and fits(s)]
        return self.random.choice(here) if here else None

    @staticmethod
    def id_of(block: PrefixCachingBlock) -> int:
        assert block.block_id is not None
        return block.block_id


@pytest.mark.parametrize("merge_duplicates", [True, False])
@pytest.mark.seeds(8, long=30)
def test_an_allocator_acts_as_its_model_does(seed: int, merge_duplicates: bool) -> None:
    walk = Walk(seed, merge_duplicates=merge_duplicates)
    operations = {
        walk.start: 4,
        walk.append: 8,
        walk.fork: 2,
        walk.finish: 2,
        walk.swap: 2,
        walk.access: 2,
        walk.forward: 5,
    }
    random_walk(f"seed {seed}", walk.random, operations, NUM_STEPS, walk.check)
    while walk.pick(lambda sequence: True) is not None:
        walk.finish()
    assert walk.allocator.get_num_free_blocks() == NUM_BLOCKS
    walk.allocator.check()
    assert walk.allocator.reset_prefix_cache()
