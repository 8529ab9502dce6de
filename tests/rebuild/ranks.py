"""Ranks that apply a core's label commands, and faults of one rank's labels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.protocol.commands import Command, Label, Reset, Unlabel
from kvcache.protocol.labels import BlockLabel, LabelSet, LabelTable

DIGEST_BYTES = 32


class Ranks:
    """The label tables of some ranks below one core."""

    def __init__(self, num_ranks: int, num_blocks: int, longest_block: int) -> None:
        self.num_blocks = num_blocks
        self.longest_block = longest_block
        self.tables = [self._empty() for _ in range(num_ranks)]

    def obey(self, commands: Sequence[Command]) -> None:
        """Apply the core's commands on every rank."""
        for table in self.tables:
            for command in commands:
                if isinstance(command, Label):
                    table.validate(command)
                    table.apply(command)
                elif isinstance(command, Unlabel):
                    table.withdraw(command.block_ids)
                elif isinstance(command, Reset):
                    table.reset()

    def collect(self) -> list[LabelSet]:
        """Return the labels of all ranks."""
        return [table.collect(rank, 1, 1, "layout") for rank, table in enumerate(self.tables)]

    def copy(self) -> Ranks:
        """Return ranks that have the same labels."""
        ranks = Ranks(len(self.tables), self.num_blocks, self.longest_block)
        for table, label_set in zip(ranks.tables, self.collect(), strict=True):
            table.apply(label_set.labels)
        return ranks

    def damage(self, rng: random.Random, num_labels: int) -> set[int]:
        """Damage some labels, each on one rank; return the blocks on which ranks differ now."""
        differing = set()
        for _ in range(num_labels):
            table = rng.choice(self.tables)
            labels = list(table.collect(0, 1, 1, "layout"))
            if not labels:
                break
            label = rng.choice(labels)
            spoil = rng.choice([_lose, _change, _change, _duplicate])
            differing.add(spoil(table, label, rng, self.num_blocks))
        return differing

    def _empty(self) -> LabelTable:
        return LabelTable(self.num_blocks, DIGEST_BYTES, self.longest_block)


def packed(labels: Sequence[BlockLabel], digest_bytes: int = DIGEST_BYTES) -> LabelSet:
    """Return labels as a rank sends them; checks only their shape."""
    names = list(dict.fromkeys(label.namespace for label in labels))
    tokens = [token for label in labels for token in label.token_ids]
    return LabelSet(
        version=1,
        rank=0,
        epoch=1,
        applied_seq=1,
        layout_fingerprint="layout",
        digest_bytes=digest_bytes,
        labels=Label(
            block_ids=int32_array([label.block_id for label in labels]),
            groups=int32_array([label.group for label in labels]),
            slots=int32_array([label.slot for label in labels]),
            digests=b"".join([label.digest for label in labels]),
            parent_digests=b"".join([label.parent_digest for label in labels]),
            token_counts=int32_array([len(label.token_ids) for label in labels]),
            token_ids=int32_array(tokens),
            namespaces=int32_array([names.index(label.namespace) for label in labels]),
            namespace_names=tuple(names),
            extra_keys={i: each.extra_keys for i, each in enumerate(labels) if each.extra_keys},
        ),
        checksums=np.full(len(labels), -1, dtype="<i8").tobytes(),
    )


def _lose(table: LabelTable, label: BlockLabel, _: random.Random, __: int) -> int:
    table.withdraw(int32_array([label.block_id]))
    return label.block_id


def _change(table: LabelTable, label: BlockLabel, rng: random.Random, _: int) -> int:
    wrong = rng.choice(
        [
            replace(label, group=label.group + 1),
            replace(label, digest=rng.randbytes(DIGEST_BYTES)),
            replace(label, parent_digest=rng.randbytes(DIGEST_BYTES)),
            replace(label, token_ids=(*label.token_ids[:-1], label.token_ids[-1] + 1)),
            replace(label, namespace=label.namespace + b"x"),
            replace(label, extra_keys=label.extra_keys + b"x"),
        ]
    )
    table.withdraw(int32_array([label.block_id]))
    table.apply(packed([wrong]).labels)
    return label.block_id


def _duplicate(table: LabelTable, label: BlockLabel, rng: random.Random, num_blocks: int) -> int:
    block_id = rng.randrange(1, num_blocks)
    table.withdraw(int32_array([block_id]))
    if block_id != label.block_id:
        table.apply(packed([replace(label, block_id=block_id)]).labels)
    return block_id
