"""What scheduler and ranks say to each other in each step.

vLLM carries the messages: commands travel with the scheduler's output, reports with the model
runner's, inventories once at start. A rank obeys commands in the order of the fields, so that a
slot that is given to another block is read before it is written. Plain data: vLLM looks at none of
it, but for `aggregate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepCommands:
    """What every rank does in one step.

    Before the forward: forget all slots if `forgets_all`, forget the slots `forgotten`, seal the
    slots `sealed`, load slot `load_slots[i]`, which holds `load_digests[i]`, into block
    `load_blocks[i]`. After it: store block `store_blocks[i]`, which is `store_digests[i]` and
    continues `store_parents[i]`, in slot `store_slots[i]`.
    """

    step: int
    forgets_all: bool = False
    forgotten: tuple[int, ...] = ()
    sealed: tuple[int, ...] = ()
    load_slots: tuple[int, ...] = ()
    load_blocks: tuple[int, ...] = ()
    load_digests: tuple[bytes, ...] = ()
    store_slots: tuple[int, ...] = ()
    store_blocks: tuple[int, ...] = ()
    store_digests: tuple[bytes, ...] = ()
    store_parents: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class RankReports:
    """What ranks have done since their last report, of one rank or of several.

    `stored[step]` ranks have stored all blocks of that step, `loaded[step]` have ended its loads.
    `not_stored` are steps of which a rank has not stored all. `lost` are the digests of blocks that
    a rank could not load.
    """

    stored: dict[int, int] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
    not_stored: frozenset[int] = frozenset()
    lost: frozenset[bytes] = frozenset()

    def aggregate(self, other: RankReports) -> RankReports:
        """Return what both say together."""
        return RankReports(
            _sums(self.stored, other.stored),
            _sums(self.loaded, other.loaded),
            self.not_stored | other.not_stored,
            self.lost | other.lost,
        )


@dataclass(frozen=True)
class Inventory:
    """What a rank has adopted: `digests[slot]` of each sealed slot."""

    num_slots: int
    digests: dict[int, bytes]


def _sums(some: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    return {step: some.get(step, 0) + others.get(step, 0) for step in some.keys() | others.keys()}
