"""A slow model of a rebuild and of the hits after it: dicts, one label at a time.

Shares no code with the cores. A content is identified by group, namespace and digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from kvcache.protocol.labels import BlockLabel, LabelSet, parse_extra_keys
from kvcache.requests.hashing import BlockHash, get_hash_fn, hash_block_tokens
from kvcache.requests.request import Request
from kvcache.requests.request_content import namespace_name
from kvcache.specs import KVCacheSpec
from tests.core.builders import NONE_HASH
from tests.core.model_group import group_of

HASH_FN = get_hash_fn("sha256")

Name = tuple[int, bytes, bytes]
"""Group, namespace, digest."""

Unit = tuple[bytes, bytes]
"""Namespace, digest."""


def agreed(label_sets: Sequence[LabelSet]) -> list[BlockLabel]:
    """Return the labels that every rank has, in order of blocks."""
    first, *others = [{label.block_id: label for label in each} for each in label_sets]
    return [
        label
        for _, label in sorted(first.items())
        if all(_content(other.get(label.block_id)) == _content(label) for other in others)
    ]


def _content(label: BlockLabel | None) -> object:
    if label is None:
        return None
    keys = label.namespace, label.extra_keys, label.group
    return keys, label.digest, label.parent_digest, label.token_ids


@dataclass
class RebuildModel:
    """A plan. `kept` are the blocks that a rebuild keeps, by content."""

    specs: Sequence[KVCacheSpec]
    use_eagle: bool = False

    def __post_init__(self) -> None:
        self.groups = [group_of(spec) for spec in self.specs]
        self.unit = gcd(*(group.block_size for group in self.groups))
        self.step = lcm(*(group.block_size for group in self.groups))
        self.can_hit = all(spec.can_prefix_cache for spec in self.specs)

    def kept(self, label_sets: Sequence[LabelSet]) -> dict[Name, int]:
        """Return the blocks that a rebuild keeps, from the labels of all ranks."""
        if not self.can_hit:
            return {}
        labels: dict[Name, BlockLabel] = {}
        for label in agreed(label_sets):
            labels.setdefault((label.group, label.namespace, label.digest), label)
        chosen = self._in_nodes(labels)
        return {name: labels[name].block_id for name in chosen}

    def _in_nodes(self, labels: dict[Name, BlockLabel]) -> set[Name]:
        """Find a parent: the block before or, where that may be missing, a place that earlier
        groups know. Each must have the digest that its tokens demand; if images hide it, one that
        earlier groups know."""
        chosen: set[Name] = set()
        known: set[Unit] = set()
        sizes = [(not group.is_ordered, group.block_size) for group in self.groups]
        for number in sorted(range(len(self.groups)), key=sizes.__getitem__):
            before, grown = set(known), True
            own = {name: label for name, label in labels.items() if name[0] == number}
            while grown:
                grown = False
                for name, label in own.items():
                    above, units = label.parent_digest, self._all_units(name[1], label)
                    if name in chosen or name[1:] not in (units or before):
                        continue
                    if (
                        above == NONE_HASH
                        or (number, name[1], above) in chosen
                        or (not self.groups[number].is_ordered and (name[1], above) in before)
                    ):
                        chosen.add(name)
                        known.update(units)
                        grown = True
        return chosen

    def _all_units(self, name: bytes, label: BlockLabel) -> dict[Unit, bytes]:
        """Return the units of a block of any length, by the digests of its tokens."""
        if len(label.token_ids) > self.unit:
            return self._cut(name, label)
        keys = parse_extra_keys(label.extra_keys) or ()
        parent = BlockHash(label.parent_digest)
        return {(name, hash_block_tokens(HASH_FN, parent, label.token_ids, keys)): parent}

    def _cut(self, name: bytes, label: BlockLabel) -> dict[Unit, bytes]:
        """Return the units of a long block, without those that overlap images."""
        keys = parse_extra_keys(label.extra_keys) or ()
        if any(key[0] == "mm" for key in keys):
            return {}
        units: dict[Unit, bytes] = {}
        parent = BlockHash(label.parent_digest)
        for start in range(0, len(label.token_ids), self.unit):
            own = tuple(key for key in keys if key[0] == "lora" or start == 0)
            tokens = label.token_ids[start : start + self.unit]
            digest = hash_block_tokens(HASH_FN, parent, tokens, own)
            units[name, digest] = parent
            parent = digest
        return units

    def hit(self, request: Request, kept: dict[Name, int]) -> list[list[int]]:
        """Return the tables that a request starts from; 0 if a block is not needed."""
        length = (request.num_tokens - 1) // self.step * self.step
        while length > 0:
            tables = self._hit_at(request, kept, length)
            if tables is not None:
                return tables
            length -= self.step
        return [[] for _ in self.groups]

    def _hit_at(
        self, request: Request, kept: dict[Name, int], length: int
    ) -> list[list[int]] | None:
        extra = self.step if self.use_eagle else 0
        namespace, digests = namespace_name(request.namespace), request.block_hashes
        tables = []
        for number, group in enumerate(self.groups):
            size = group.block_size
            first = max(0, group.first_needed(length) - (extra // size if group.window else 0))
            table = [0] * first
            for end in range((first + 1) * size, length + 1, size):
                block = kept.get((number, namespace, digests[end // self.unit - 1]))
                if block is None:
                    return None
                table.append(block)
            tables.append(table[: (length - extra) // size])
        return tables
