"""Who is told of everything that changes a manager, in order: the place of a recorder.

`serving.py` calls it. What is told here is enough to make the same manager again.
Refuses to take part: a recorder answers nothing, and whatever becomes of it, service goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcache.coordinator.tier_calls import TierCall, WantedLoad
from kvcache.manager import KVCacheManager
from kvcache.manager.loads import PrefixLoad
from kvcache.protocol.commands import Command
from kvcache.protocol.labels import LabelSet
from kvcache.protocol.step import NewRequest
from kvcache.protocol.step_delivery import StepAnswer, StepMessage

LabelSource = Callable[[], Sequence[LabelSet]]
"""Returns the labels of all ranks, which takes a while where there are many."""


@dataclass(frozen=True)
class RecorderStatistics:
    """What a recorder has written since it was made.

    `problem` is empty while it records, and says why it does not. `num_lost_records` happened
    meanwhile; `num_failures` is how often it had to stop.
    """

    directory: str
    problem: str = ""
    num_records: int = 0
    num_lost_records: int = 0
    num_segments: int = 0
    written_bytes: int = 0
    num_failures: int = 0


class StepRecorder(Protocol):
    """Hears of all that happens to the managers of one coordinator, epoch after epoch.

    Nothing here raises, waits, or changes what it is handed.
    """

    def begin_epoch(
        self,
        epoch: int,
        manager: KVCacheManager,
        labels: LabelSource | None = None,
        commands: Sequence[Command] = (),
    ) -> None:
        """`manager` is new, and all that follows happens to it.

        It was restored from `labels` where there is a source of them, which is asked at once or
        not at all, and then its first `commands` were taken.
        """

    def executed(
        self, message: StepMessage, answer: StepAnswer, commands: Sequence[Command]
    ) -> None:
        """The manager has executed a step or call; this is what came of it."""

    def refused(self, message: StepMessage, error: Exception) -> None:
        """The manager, or what brings a call to it, has raised."""

    def released(self, client_id: str) -> None:
        """Everything a client had was freed."""

    def held(self, client_id: str, requests: Sequence[NewRequest], num_tokens: int) -> None:
        """What is cached of `requests`, `num_tokens` in all, is held for a client."""

    def let_go(self, client_id: str) -> None:
        """Nothing is held for a client any more."""

    def withdrawn(self, block_ids: Sequence[int], commands: Sequence[Command]) -> None:
        """Blocks were forgotten outside steps, and the commands that waited were taken."""

    def tiers_called(self, call: TierCall) -> None:
        """The manager has called its tiers: part of the step, call or release told next."""

    def load_begun(self, wanted: WantedLoad, load: PrefixLoad | None) -> None:
        """The tiers asked for blocks outside steps; None: there were none."""

    def load_finished(self, load_id: int) -> None:
        """What was loaded is cached."""

    def load_released(self, load_id: int) -> None:
        """A load's blocks were released outside steps."""

    def end_epoch(self) -> None:
        """The manager is given up; nothing more happens to it."""

    def on_tick(self) -> None:
        """Look at the clock: what waits too long goes to disk."""

    def close(self) -> None:
        """Write down how the manager stands now, and end. Repeatable; `end_epoch` not before."""

    def statistics(self) -> RecorderStatistics | None:
        """Return frozen statistics; None where nothing is ever recorded."""


class NullStepRecorder:
    """Records nothing."""

    def begin_epoch(
        self,
        epoch: int,
        manager: KVCacheManager,
        labels: LabelSource | None = None,
        commands: Sequence[Command] = (),
    ) -> None:
        """Do nothing."""

    def executed(
        self, message: StepMessage, answer: StepAnswer, commands: Sequence[Command]
    ) -> None:
        """Do nothing."""

    def refused(self, message: StepMessage, error: Exception) -> None:
        """Do nothing."""

    def released(self, client_id: str) -> None:
        """Do nothing."""

    def held(self, client_id: str, requests: Sequence[NewRequest], num_tokens: int) -> None:
        """Do nothing."""

    def let_go(self, client_id: str) -> None:
        """Do nothing."""

    def withdrawn(self, block_ids: Sequence[int], commands: Sequence[Command]) -> None:
        """Do nothing."""

    def tiers_called(self, call: TierCall) -> None:
        """Do nothing."""

    def load_begun(self, wanted: WantedLoad, load: PrefixLoad | None) -> None:
        """Do nothing."""

    def load_finished(self, load_id: int) -> None:
        """Do nothing."""

    def load_released(self, load_id: int) -> None:
        """Do nothing."""

    def end_epoch(self) -> None:
        """Do nothing."""

    def on_tick(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def statistics(self) -> RecorderStatistics | None:
        """Return None."""
        return None
