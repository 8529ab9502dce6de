"""Where this package chooses otherwise than the peer, by a rule of its contract.

Each difference can be taken out: our manager then does what the peer does, and must agree with it
in every answer. A difference that remains is a mistake of one side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import lcm
from unittest.mock import patch

from kvcache.core import CacheHit
from kvcache.hashing import BlockHash
from kvcache.managers.coordinators import HybridKVCacheCoordinator, KVCacheCoordinator
from kvcache.request import Namespace, Request


@dataclass(frozen=True)
class Rule:
    """One choice: its name, what each side does, and how ours is made to do what the peer does."""

    name: str
    ours: str
    theirs: str
    because: str
    as_peer: Callable[[], AbstractContextManager[object]]


@contextmanager
def free_group_by_group() -> Iterator[None]:
    """Free a request's blocks one group after the other, each tail first."""

    def tail_first(self: KVCacheCoordinator, tables: Sequence[Sequence[int]]) -> list[int]:
        return [block_id for table in tables for block_id in reversed(table) if block_id]

    with patch.object(KVCacheCoordinator, "tail_first", tail_first):
        yield


@contextmanager
def match_the_block_behind_the_limit() -> Iterator[None]:
    """Let EAGLE in a hybrid match one block behind the limit of a look-up, and drop that one."""
    find = HybridKVCacheCoordinator.find_longest_cache_hit

    def find_longest_cache_hit(
        self: HybridKVCacheCoordinator,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        namespace: Namespace,
    ) -> CacheHit:
        if self.use_eagle:
            end = len(block_hashes) * self.hash_block_size
            max_length = min(max_length + self.managers[0].block_size, end)
        return find(self, block_hashes, max_length, namespace)

    with patch.object(HybridKVCacheCoordinator, "find_longest_cache_hit", find_longest_cache_hit):
        yield


@contextmanager
def cache_whole_steps_only() -> Iterator[None]:
    """Make blocks hittable only up to a multiple of the least common block size."""
    cache = KVCacheCoordinator.cache_blocks

    def cache_blocks(self: KVCacheCoordinator, request: Request, num_tokens: int) -> None:
        step_tokens = lcm(*(manager.block_size for manager in self.managers))
        cache(self, request, num_tokens - num_tokens % step_tokens)

    with patch.object(KVCacheCoordinator, "cache_blocks", cache_blocks):
        yield


RULES = (
    Rule(
        name="tail first over all groups",
        ours="`free` gives the blocks of all groups back together, the last tokens' first",
        theirs="frees one group after the other, so that all of the first group goes before any "
        "of the second",
        because="`free` releases tail first: a freed request is evicted from its end, not one "
        "group before the other, since a prefix hits only where every group still has it",
        as_peer=free_group_by_group,
    ),
    Rule(
        name="EAGLE drops inside the limit",
        ours="a hit is at most `num_tokens - 1` tokens, and the last matched block of it is "
        "dropped: in hybrids as with one group",
        theirs="does so with one group; in hybrids it matches one block behind the limit first "
        "and drops that one, which hits a block more where the prompt ends in a cached block",
        because="the longest hit is at most `num_tokens - 1` tokens; EAGLE drops the last matched "
        "block. One rule for one group and for several",
        as_peer=match_the_block_behind_the_limit,
    ),
    Rule(
        name="every full block is cached",
        ours="with differing block sizes, every block is cached in the step that fills it",
        theirs="caches a finer block only once the coarser one around it is full, since no hit "
        "could end there yet; a request freed before leaves it without a hash, first to be reused",
        because="a block is hittable from the step that schedules its last token, whatever the "
        "blocks of other groups",
        as_peer=cache_whole_steps_only,
    ),
)
