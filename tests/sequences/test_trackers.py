"""Trackers of blocks and sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest.mock import MagicMock

import pytest

from kvcache import (
    BlockError,
    BlockTracker,
    ComputedBlocksTracker,
    ConfigurationError,
    LastAccessBlocksTracker,
    LoRARequest,
    PrefixCachingBlockAllocator,
    Request,
    RequestError,
    generate_block_hash_extra_keys,
)


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int] = field(default_factory=list)
    extra: int | None = None
    prefilling: bool = True

    def get_token_ids(self) -> list[int]:
        return self.tokens

    def extra_hash(self) -> int | None:
        return self.extra

    def is_prefill(self) -> bool:
        return self.prefilling


def allocator_with(tokens: list[int], extra: int | None = None) -> PrefixCachingBlockAllocator:
    allocator = PrefixCachingBlockAllocator(16, 4)
    blocks = [tokens[start : start + 4] for start in range(0, len(tokens), 4)]
    allocator.allocate_immutable_blocks(None, blocks, extra)
    allocator.mark_blocks_as_computed([])
    return allocator


def test_a_block_tracker_forgets_when_a_block_comes_into_use_and_goes_out_of_it() -> None:
    tracker = BlockTracker()
    assert (tracker.active, tracker.last_accessed, tracker.computed) == (False, -1, False)
    tracker.enable()
    tracker.last_accessed, tracker.computed = 7.0, True
    with pytest.raises(BlockError, match="in use is tracked already"):
        tracker.enable()
    assert (tracker.active, tracker.last_accessed, tracker.computed) == (True, 7.0, True)
    tracker.reset()
    assert (tracker.active, tracker.last_accessed, tracker.computed) == (True, -1, False)
    tracker.computed = True
    tracker.disable()
    assert (tracker.active, tracker.computed) == (False, False)
    with pytest.raises(BlockError, match="not in use is not tracked"):
        tracker.disable()


def test_cached_tokens_stay_what_they_were_while_the_prompt_is_computed() -> None:
    allocator = MagicMock(spec=PrefixCachingBlockAllocator)
    tracker = ComputedBlocksTracker(allocator=allocator, block_size=4, enable_caching=True)
    sequence = Sequence(0, [0, 1, 2, 3, 4, 5])
    allocator.find_cached_blocks_prefix.return_value = []
    assert tracker.get_num_cached_tokens(sequence) == 0
    allocator.find_cached_blocks_prefix.return_value = [b""]
    assert tracker.get_num_cached_tokens(sequence) == 0
    sequence.prefilling = False
    assert tracker.get_num_cached_tokens(sequence) == 4
    sequence.tokens += [6, 7, 8]
    allocator.find_cached_blocks_prefix.return_value = [b"", b""]
    assert tracker.get_num_cached_tokens(sequence) == 8
    tracker.remove_seq(0)
    sequence.prefilling = True
    allocator.find_cached_blocks_prefix.return_value = [b""]
    assert tracker.get_num_cached_tokens(sequence) == 4
    tracker.remove_seq(5)


def test_the_digests_of_a_sequence_are_those_of_its_blocks() -> None:
    tokens = list(range(16))
    tracker = ComputedBlocksTracker(allocator_with(tokens), 4, True)
    assert tracker.get_num_cached_tokens(Sequence(0, tokens)) == 16
    assert tracker.get_num_cached_tokens(Sequence(1, [*tokens[:9], 99, 99, 99])) == 8
    assert tracker.get_num_cached_tokens(Sequence(2, [])) == 0
    growing = Sequence(3, tokens[:6], prefilling=False)
    for length in range(6, 17):
        growing.tokens = tokens[:length]
        assert tracker.get_num_cached_tokens(growing) == length // 4 * 4


def test_the_extra_hash_counts() -> None:
    tokens = list(range(8))
    tracker = ComputedBlocksTracker(allocator_with(tokens, extra=5), 4, True)
    assert tracker.get_num_cached_tokens(Sequence(0, tokens, extra=5)) == 8
    assert tracker.get_num_cached_tokens(Sequence(1, tokens, extra=6)) == 0
    assert tracker.get_num_cached_tokens(Sequence(2, tokens)) == 0


def test_a_request_is_a_sequence_whose_extra_keys_count() -> None:
    tokens = list(range(8))
    request = Request("r", tokens, lora=LoRARequest("adapter", "path"))
    allocator = allocator_with(tokens)
    tracker = ComputedBlocksTracker(allocator, 4, True)
    assert tracker.get_num_cached_tokens(Request("plain", tokens)) == 8
    assert tracker.get_num_cached_tokens(request) == 0
    keys, _ = generate_block_hash_extra_keys(request, 0, 4, 0)
    allocator.allocate_immutable_blocks(None, [tokens[:4]], keys)
    allocator.mark_blocks_as_computed([])
    assert tracker.get_num_cached_tokens(request) == 0
    tracker.remove_seq("r")
    assert tracker.get_num_cached_tokens(request) == 4


def test_without_caching_nothing_is_cached() -> None:
    tracker = ComputedBlocksTracker(allocator_with([1, 2, 3, 4]), 4, False)
    assert tracker.get_num_cached_tokens(Sequence(0, [1, 2, 3, 4])) == 0
    with pytest.raises(ConfigurationError, match="block_size is 0"):
        ComputedBlocksTracker(allocator_with([]), 0, True)


def test_a_sequence_that_lost_tokens_must_be_removed_first() -> None:
    tracker = ComputedBlocksTracker(allocator_with([]), 4, True)
    sequence = Sequence(0, list(range(8)))
    tracker.get_num_cached_tokens(sequence)
    sequence.tokens = [0, 1, 2, 3, 4]
    with pytest.raises(RequestError, match="has 5 tokens and had 2 full blocks of 4: remove it"):
        tracker.get_num_cached_tokens(sequence)


def test_accesses_of_a_sequence_reach_its_blocks() -> None:
    allocator = PrefixCachingBlockAllocator(2, 4)
    tracker = LastAccessBlocksTracker(allocator)
    blocks = [allocator.allocate_immutable_block(None, [i] * 4) for i in range(2)]
    for seq_id, time in ((0, 9.0), (1, 3.0)):
        tracker.add_seq(seq_id)
        tracker.update_seq_blocks_last_access(seq_id, [seq_id])
        tracker.update_last_access(seq_id, time)
        tracker.update_seq_blocks_last_access(seq_id, [seq_id])
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate_mutable_block(None).block_id == 1


def test_accesses_of_unknown_sequences_are_refused() -> None:
    tracker = LastAccessBlocksTracker(PrefixCachingBlockAllocator(2, 4))
    tracker.add_seq(1)
    with pytest.raises(RequestError, match="sequence 1 is tracked already: remove it first"):
        tracker.add_seq(1)
    tracker.remove_seq(1)
    with pytest.raises(RequestError, match="sequence 1 is not tracked: add it first"):
        tracker.remove_seq(1)
    with pytest.raises(RequestError, match="sequence 2 is not tracked"):
        tracker.update_last_access(2, 1.0)
    with pytest.raises(RequestError, match="sequence 3 is not tracked"):
        tracker.update_seq_blocks_last_access(3, [])
