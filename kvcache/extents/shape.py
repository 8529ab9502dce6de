"""What a plan's groups look like to the tree: units, ordered groups, and the others.

Beside the core, made once from a `KVCacheConfig`. Refuses to know blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm

from kvcache.hash_algorithms import TOKEN_BYTES
from kvcache.specs import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True)
class GroupShape:
    """One KV cache group: `place` is its row among the ordered groups or among the others.

    `num_units` is how many units a block is long.
    """

    index: int
    place: int
    spec: KVCacheSpec
    num_units: int
    is_ordered: bool

    @cached_property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.spec.block_size


@dataclass(frozen=True)
class TreeShape:
    """All groups of a plan. A unit is the greatest common divisor of their block sizes.

    Ordered groups are those in which a block is of no use without all blocks before it: a run *is*
    their blocks. Of the other groups a run knows which blocks stand beside it, if any.
    """

    groups: tuple[GroupShape, ...]
    unit_tokens: int
    digest_bytes: int

    @classmethod
    def of(cls, config: KVCacheConfig, digest_bytes: int) -> TreeShape:
        """Return the shape of a plan."""
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        unit = gcd(*(spec.block_size for spec in specs)) or 1
        places = {True: 0, False: 0}
        groups = []
        for index, spec in enumerate(specs):
            ordered = spec.reads_whole_prefix
            groups.append(
                GroupShape(index, places[ordered], spec, spec.block_size // unit, ordered)
            )
            places[ordered] += 1
        return cls(tuple(groups), unit, digest_bytes)

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes of a unit's match tokens."""
        return self.unit_tokens * TOKEN_BYTES

    @cached_property
    def ordered(self) -> tuple[GroupShape, ...]:
        """The groups whose blocks make the runs."""
        return tuple(group for group in self.groups if group.is_ordered)

    @cached_property
    def others(self) -> tuple[GroupShape, ...]:
        """The groups whose blocks can go one by one."""
        return tuple(group for group in self.groups if not group.is_ordered)

    def told_groups(self, *, tells_all: bool) -> frozenset[int]:
        """Return the groups whose contents listeners hear of: the ordered ones, where there are."""
        told = self.groups if tells_all or not self.ordered else self.ordered
        return frozenset(group.index for group in told)

    @cached_property
    def in_rows(self) -> tuple[GroupShape, ...]:
        """The groups whose tables are rows of arrays: all that keep a request's own tokens."""
        return tuple(
            group
            for group in self.groups
            if group.spec.num_state_blocks is None and not group.spec.keeps_encoder_tokens
        )

    @cached_property
    def step_tokens(self) -> int:
        """A hit ends at a multiple of so many tokens."""
        return lcm(*(group.block_size for group in self.groups)) if self.groups else 1

    def num_ordered_blocks(self, start: int, end: int) -> int:
        """Return how many blocks of ordered groups end in the units `[start, end)`."""
        if self.is_plain:
            return end - start
        return sum(end // group.num_units - start // group.num_units for group in self.ordered)

    @cached_property
    def is_simple(self) -> bool:
        """Whether there is one group, with a block for each unit: one table says it all."""
        return self.is_plain and len(self.groups) == 1

    @cached_property
    def is_plain(self) -> bool:
        """Whether every unit has exactly one block of an ordered group."""
        return len(self.ordered) == 1 and self.ordered[0].num_units == 1
