"""Content checking: every byte of every block is what its tokens demand, or somebody hears of it.

Stands in the place of a model's forward: writes what the tokens demand into the real tensors, by
the real block tables, and compares what is found there on every hit, when it is read for the last
time, and when a request goes. Says in which order; what a group holds is for the group's content to
know, and which bytes that are for content_codec.py. Never samples.

    verify states that are overwritten ──▶ write all rows ──▶ verify hits, and what is left behind
"""

from __future__ import annotations

from math import lcm

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import RequestError
from kvcache.protocol.commands import WriteExpected
from kvcache.specs import KVCacheGroupSpec, KVCacheSpec
from kvcache.worker.block_tables import BlockTables
from kvcache.worker.content_codec import bundle_layers
from kvcache.worker.encoder_content import EncoderContent
from kvcache.worker.forward_rows import ForwardRows, RowLimits
from kvcache.worker.group_content import GroupContent, GroupPlace, TokenContent
from kvcache.worker.history import BlockHistory
from kvcache.worker.prefix_sums import PrefixSums
from kvcache.worker.state_content import StateContent
from kvcache.worker.tensors import KVCachePool


class ContentChecker:
    """Writes and compares the content of one rank's blocks."""

    def __init__(
        self,
        pool: KVCachePool,
        groups: tuple[KVCacheGroupSpec, ...],
        tables: BlockTables,
        history: BlockHistory,
        *,
        rank: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Check the blocks of `pool` by `tables`. Keeps 8 bytes per slot and position."""
        self._rank = rank
        specs = [group.kv_cache_spec for group in groups]
        self._limits = RowLimits.of(
            specs, rank=rank, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        multiple = lcm(*(spec.block_size for spec in specs if _keeps_tokens(spec)))
        self._sums = PrefixSums(max_num_seqs, max_model_len, multiple)
        self._groups = tuple(
            _content_of(
                GroupPlace(
                    rank=rank,
                    group=index,
                    spec=spec,
                    bundles=tuple(bundle_layers(pool, index, rank)),
                    tables=tables,
                    history=history,
                    sums=self._sums,
                    max_num_seqs=max_num_seqs,
                )
            )
            for index, spec in enumerate(specs)
        )

    def forget(self) -> None:
        """Forget what every slot holds: a new epoch assigns all slots again."""
        self._sums.forget()
        for group in self._groups:
            group.forget()

    def validate(self, command: WriteExpected) -> None:
        """Raise unless the arrays of `command` fit together and this rank. Changes nothing."""
        self._limits.validate(command)

    def verify(self, slots: Int32Array, lengths: Int32Array) -> int:
        """Compare all live blocks of requests of `lengths` tokens by the tables as they are.

        Returns the number of bytes compared; raises WrongBytesError at the first wrong one, with
        the history of its block.
        """
        wide_slots, wide_lengths = slots.astype(np.int64), lengths.astype(np.int64)
        known = self._sums.num_known(slots)
        unknown = np.flatnonzero(wide_lengths > known)
        if len(unknown):
            row = int(unknown[0])
            raise RequestError(
                f"rank {self._rank} is to verify {int(lengths[row])} tokens of slot "
                f"{int(slots[row])}, but knows {int(known[row])}"
            )
        return sum(group.verify(wide_slots, wide_lengths) for group in self._groups)

    def run(self, command: WriteExpected, seq: int) -> int:
        """Write the rows of a validated command, and compare what they read.

        States are compared before anything is written, hits of new rows when everything is: a row
        may hit blocks that another row of the same step writes, as a model's layers do. Returns
        the number of bytes compared; raises WrongBytesError, or RequestError when a row continues
        what is not known here.
        """
        self._sums.extend(command)
        rows = ForwardRows.of(command)
        num_bytes = sum(group.verify_before(rows) for group in self._groups)
        for group in self._groups:
            group.write(rows, seq)
        return num_bytes + sum(group.verify_after(rows) for group in self._groups)


def _keeps_tokens(spec: KVCacheSpec) -> bool:
    return spec.num_state_blocks is None and not spec.keeps_encoder_tokens


def _content_of(place: GroupPlace) -> GroupContent:
    """Return the content of a group by what its kind keeps."""
    if place.spec.num_state_blocks is not None:
        return StateContent(place)
    return EncoderContent(place) if place.spec.keeps_encoder_tokens else TokenContent(place)
