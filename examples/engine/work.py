"""What ranks compute in one step, and what comes of it: the message between engine and ranks.

The coordinator tells ranks which blocks a step uses; this says which tokens it computes there.
Data only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from examples.engine.sampling import Choice, ChosenToken

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class WorkRow:
    """Positions `[start, start + len(token_ids))` of the request in `slot`.

    The last `num_drafts` tokens are not the request's own as far as the coordinator knows: a state
    is kept before each of them. Behind each of the last `num_sampled` tokens one token is chosen
    for each of `choices`. `is_new`: the slot's request did not run in the step before.
    """

    slot: int
    start: int
    token_ids: TokenArray
    is_new: bool
    num_drafts: int = 0
    num_sampled: int = 0
    choices: tuple[Choice, ...] = ()
    adapter: str | None = None

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class StepWork:
    """The forward of `(epoch, seq)`, which is step `step` of the engine's client."""

    step: int
    epoch: int
    seq: int
    rows: tuple[WorkRow, ...]


@dataclass(frozen=True)
class StepOutput:
    """What was chosen: `rows[i][j][k]` behind the `j`-th sampled token of row `i` by its `k`-th
    choice. `compute_s`: how long the forward took on the rank that chose."""

    step: int
    rows: tuple[tuple[tuple[ChosenToken, ...], ...], ...] = ()
    compute_s: float = field(default=0.0, compare=False)
