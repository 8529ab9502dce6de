"""How much of a matched prefix a request can start from, by attention kind.

Between a walk through the tree, which says how many units match, and the blocks a request adopts.
The ordered groups have all of them; every other kind shortens the hit to its own longest one, until
none does. Works on arrays of *which blocks are there*; refuses to know tokens or digests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.core.kinds.chunked_local_attention import chunk_tokens
from kvcache.core.kinds.sliding_window import window_tokens
from kvcache.errors import ConfigurationError
from kvcache.extents.shape import TreeShape
from kvcache.managers.base import MatchLimits
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    ceil_div,
)

BoolArray: TypeAlias = npt.NDArray[np.bool_]

Presence: TypeAlias = Callable[[int, int, int], BoolArray]
"""Says which blocks `[start, end)` of a group can be adopted: `(group, start, end)`."""


class Kept(NamedTuple):
    """The blocks `[start, end)` of a group are adopted; positions before `start` are null."""

    start: int
    end: int


class HitRule(ABC):
    """What a kind can start from."""

    def __init__(self, spec: KVCacheSpec) -> None:
        """Follow the rule of `spec`."""
        self.spec = spec

    @abstractmethod
    def longest(self, is_there: Callable[[int, int], BoolArray], limits: MatchLimits) -> Kept:
        """Return the longest prefix within `limits`; `is_there(start, end)` says which blocks are.

        The same rules as those of the managers of that kind.
        """


class WindowRule(HitRule):
    """The rightmost run of blocks that covers a window, or the leading run."""

    def longest(self, is_there: Callable[[int, int], BoolArray], limits: MatchLimits) -> Kept:
        size = self.spec.block_size
        needed = max(1, ceil_div(window_tokens(self.spec) - 1, size)) + limits.num_extra_blocks
        end = limits.max_blocks - limits.max_blocks % limits.alignment_blocks
        start = max(0, end - needed)
        there = is_there(start, end)
        if np.count_nonzero(there) == len(there):  # the common case looks at one window only
            return Kept(start, end)
        missing = np.flatnonzero(~is_there(0, end))
        while end > 0:
            start = max(0, end - needed)
            first = int(missing.searchsorted(start))
            if first == len(missing) or missing[first] >= end:
                return Kept(start, end)
            end = int(missing[first])
            end -= end % limits.alignment_blocks
        return Kept(0, 0)


class ChunkRule(HitRule):
    """The blocks from the start of the last chunk until the first miss."""

    def longest(self, is_there: Callable[[int, int], BoolArray], limits: MatchLimits) -> Kept:
        chunk_blocks = chunk_tokens(self.spec) // self.spec.block_size
        end = limits.max_blocks - limits.max_blocks % limits.alignment_blocks
        while end > 0:
            start = end - end % chunk_blocks
            there = is_there(start, end)
            reached = start + (len(there) if there.all() else int(there.argmin()))
            end = reached - reached % limits.alignment_blocks
            if end >= start:
                return Kept(start, end)
        return Kept(0, 0)


class StateRule(HitRule):
    """The rightmost block that is there; all before are null."""

    def longest(self, is_there: Callable[[int, int], BoolArray], limits: MatchLimits) -> Kept:
        step = limits.alignment_blocks
        top = limits.max_blocks - limits.max_blocks % step
        ends = np.flatnonzero(is_there(0, top)) + 1
        ends = ends[ends % step == 0]
        return Kept(int(ends[-1]) - 1, int(ends[-1])) if len(ends) else Kept(0, 0)


RULES: Mapping[str, type[HitRule]] = MappingProxyType(
    {
        SlidingWindowSpec.kind: WindowRule,
        ChunkedLocalAttentionSpec.kind: ChunkRule,
        MambaSpec.kind: StateRule,
    }
)
"""Rule by kind of spec, for kinds that need not have the whole prefix."""


class Fit(NamedTuple):
    """What a request starts from: `num_tokens`, and which blocks of each group."""

    num_tokens: int
    kept: tuple[Kept, ...]


class HitFinder:
    """Fits hits for one plan."""

    def __init__(
        self, shape: TreeShape, *, use_eagle: bool, rules: Mapping[str, type[HitRule]] = RULES
    ) -> None:
        """Make the rules. Raises ConfigurationError for a kind that has none."""
        self._shape = shape
        self._use_eagle = use_eagle
        by_spec: dict[KVCacheSpec, list[int]] = {}
        for group in shape.others:
            if not group.spec.can_prefix_cache:
                continue  # then nothing is cached at all
            by_spec.setdefault(group.spec, []).append(group.index)
        self._kinds = [(_rule(spec, rules), groups) for spec, groups in by_spec.items()]
        # Of a single group the last block is dropped, of several the last common multiple.
        self._step_tokens = shape.step_tokens

    def fit_ordered(self, max_tokens: int) -> int:
        """Return what `fit` does where every group reads the whole prefix: how many tokens."""
        step = self._step_tokens
        length = max_tokens - max_tokens % step
        return max(0, length - step) if self._use_eagle else length

    def fit(self, max_tokens: int, is_there: Presence) -> Fit:
        """Return the longest hit of at most `max_tokens` tokens, all of which the tree has."""
        step = self._step_tokens
        length = max_tokens - max_tokens % step
        kept: dict[int, Kept] = {}
        num_agreed = 0
        kinds = cycle(self._kinds)
        while length and num_agreed < len(self._kinds):
            rule, groups = next(kinds)
            found = self._longest(rule, groups, length, is_there)
            kept.update(dict.fromkeys(groups, found))
            reached = found.end * rule.spec.block_size
            num_agreed = num_agreed + 1 if reached == length else 1
            length = reached
        if self._use_eagle:
            length = max(0, length - step)
        return Fit(
            length,
            tuple(
                [
                    self._cut(kept.get(group.index), length // group.block_size)
                    for group in self._shape.groups
                ]
            ),
        )

    def _longest(
        self, rule: HitRule, groups: Sequence[int], length: int, is_there: Presence
    ) -> Kept:
        def in_all(start: int, end: int) -> BoolArray:
            there = is_there(groups[0], start, end)
            for group in groups[1:]:
                there = there & is_there(group, start, end)
            return there

        size = rule.spec.block_size
        step_blocks = self._step_tokens // size
        extra = step_blocks if self._use_eagle else 0
        return rule.longest(in_all, MatchLimits(length // size, extra, step_blocks))

    @staticmethod
    def _cut(kept: Kept | None, num_blocks: int) -> Kept:
        if kept is None:
            return Kept(0, num_blocks)
        return Kept(min(kept.start, num_blocks), num_blocks)


def _rule(spec: KVCacheSpec, rules: Mapping[str, type[HitRule]]) -> HitRule:
    rule = rules.get(spec.kind)
    if rule is None:
        raise ConfigurationError(
            f"core 'extents' has no hit rule for KV cache specs of kind {spec.kind!r}: use one of "
            f"{', '.join(sorted(rules))}, give it a rule, or choose core 'blocks'"
        )
    return rule(spec)
