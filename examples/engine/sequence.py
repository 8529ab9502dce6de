"""One sequence of tokens in the engine: how many are known to the coordinator, and computed.

    tokens     p p p p p p o o o          prompt, then output
    told             ......|              known to the coordinator
    computed           ......|            computed, or scheduled

Mutable state of the scheduler; it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from examples.engine.sampling import SamplingParams
from kvcache.protocol.step import NO_SLOT
from kvcache.requests.hints import CacheHint


class Phase(Enum):
    """The phase of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One sample of a request. `key` is its id at the coordinator.

    `is_known`: the coordinator knows it, since step `known_since`. `num_rejected`
    drafts were computed and are not reported yet. `is_fresh`: it got its slot with
    the last step that computed part of it. `is_held`: its continuation is not decided
    yet. `is_loading`: it waits for a load from tiers.
    """

    key: str
    request_id: str
    index: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    adapter: str | None = None
    cache_salt: str | None = None
    hints: tuple[CacheHint, ...] = ()
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
        """Whether it has ended."""
        return self.phase is Phase.FINISHED

    def forget(self) -> None:
        """Make it wait as a new sequence with all its tokens: everything computed is lost.

        It gets another key, which cannot clash with the old one.
        """
        self.key += "+"
        self.phase, self.slot = Phase.WAITING, NO_SLOT
        self.num_told = self.num_computed = self.num_rejected = 0
        self.is_known = self.is_loading = False
        self.is_fresh = True
