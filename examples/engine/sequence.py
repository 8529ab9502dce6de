"""One sequence of tokens as the engine knows it: what there is, what ranks have, what was told.

    tokens     p p p p p p o o o          prompt, then output
    told             ......|              as many the coordinator knows
    computed           ......|            as many are computed, or scheduled to be

Mutable state of the scheduler; it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from examples.engine.sampling import SamplingParams
from kvcache.protocol.step import NO_SLOT


class Phase(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One sample of a request. `key` names it at the coordinator.

    `is_known`: the coordinator keeps something of it, since step `known_since`. `num_rejected`
    drafts were computed and are still to be taken back there. `is_fresh`: it sits in its slot since
    the last step that computed something of it. `is_held`: what it goes on with is not decided
    yet. `is_loading`: it waits for what tiers have of it.
    """

    key: str
    request_id: str
    index: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    adapter: str | None = None
    cache_salt: str | None = None
    phase: Phase = Phase.WAITING
    slot: int = NO_SLOT
    num_told: int = 0
    num_computed: int = 0
    num_rejected: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    is_known: bool = False
    known_since: int = 0
    is_fresh: bool = True
    is_held: bool = False
    is_loading: bool = False
    score: float = 0.0
    children: list[Sequence] = field(default_factory=list)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_finished(self) -> bool:
        """Whether nothing more comes of it."""
        return self.phase is Phase.FINISHED

    def forget(self) -> None:
        """Everything computed is lost: it waits, as a new one with all its tokens.

        Under another key, so that the rest of the old one is not in the way.
        """
        self.key += "+"
        self.phase, self.slot = Phase.WAITING, NO_SLOT
        self.num_told = self.num_computed = self.num_rejected = 0
        self.is_known = self.is_loading = False
        self.is_fresh = True
