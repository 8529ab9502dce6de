"""What happens to a coordinator's managers, as events in order, and the recorder that hears them.

`StepServer`, `EpochState` and the tiers record an event for each change. Together the events are
enough to make the same manager again. A recorder answers nothing, and service continues if it
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvcache.core import OffloadHit
from kvcache.manager import KVCacheManager
from kvcache.manager.loads import PrefixLoad, PrefixLoads
from kvcache.protocol.commands import Command
from kvcache.protocol.labels import LabelSet
from kvcache.protocol.step import NewRequest
from kvcache.protocol.step_delivery import StepAnswer, StepMessage
from kvcache.requests.request import Request

LabelSource = Callable[[], Sequence[LabelSet]]
"""Returns the labels of all ranks; slow if there are many."""


@dataclass(frozen=True, eq=False)
class EpochBegun:
    """`manager` is new; all later events are about it.

    It was restored from `labels` if there is a source of them, and then its first `commands` were
    taken. A recorder asks the source at once or not at all.
    """

    epoch: int
    manager: KVCacheManager
    labels: LabelSource | None = None
    commands: Sequence[Command] = ()


@dataclass(frozen=True, eq=False)
class EpochEnded:
    """The manager is dropped; no later event is about it."""


@dataclass(frozen=True, eq=False)
class Executed:
    """The manager executed a step or call and answered, or it raised `outcome`."""

    message: StepMessage
    outcome: StepAnswer | Exception
    commands: Sequence[Command] = ()


@dataclass(frozen=True)
class Released:
    """All requests of a client were freed."""

    client_id: str


@dataclass(frozen=True, eq=False)
class Held:
    """The cached blocks of `requests`, `num_tokens` tokens in all, are held for a client."""

    client_id: str
    requests: Sequence[NewRequest]
    num_tokens: int


@dataclass(frozen=True)
class LetGo:
    """No blocks are held for a client any more."""

    client_id: str


@dataclass(frozen=True, eq=False)
class Withdrawn:
    """Blocks were dropped outside steps, and the waiting commands were taken."""

    block_ids: Sequence[int]
    commands: Sequence[Command]


@dataclass(frozen=True)
class LookedUp:
    """The tiers were asked for the prefix after a request's hit, and answered."""

    request_id: str
    num_device_tokens: int
    answer: OffloadHit


@dataclass(frozen=True)
class SwappedOut:
    """The tiers learned of a request that is preempted by swap."""

    request_id: str
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True)
class Gone:
    """The tiers learned that a request has ended, and released these loads."""

    request_id: str
    released_loads: tuple[int, ...] = ()


TierCall: TypeAlias = LookedUp | SwappedOut | Gone
"""The manager called its tiers: part of the step, call or release that is recorded next."""


@dataclass(frozen=True, eq=False)
class LoadBegun:
    """The tiers called `PrefixLoads.begin` outside steps; `load` is None if there was no room."""

    request: Request
    num_tokens: int
    num_spare_blocks: int
    has_tail: bool
    load: PrefixLoad | None


@dataclass(frozen=True)
class LoadFinished:
    """Loaded blocks were cached."""

    load_id: int


@dataclass(frozen=True)
class LoadReleased:
    """A load's blocks were released outside steps."""

    load_id: int


Event: TypeAlias = (
    EpochBegun
    | EpochEnded
    | Executed
    | Released
    | Held
    | LetGo
    | Withdrawn
    | TierCall
    | LoadBegun
    | LoadFinished
    | LoadReleased
)


@dataclass(frozen=True)
class RecorderStatistics:
    """Counts of a recorder since it was made.

    `problem` is empty while it records, and says why it does not. `num_lost_records` were lost
    meanwhile; `num_failures` is how often it had to stop.
    """

    directory: str
    problem: str = ""
    num_records: int = 0
    num_lost_records: int = 0
    num_segments: int = 0
    written_bytes: int = 0
    num_failures: int = 0


class StepRecorder:
    """Receives the events of one coordinator's managers, epoch after epoch.

    This one records nothing. No method raises, waits, or changes its arguments.
    """

    def record(self, event: Event) -> None:
        """Record an event. Events come in order."""

    def on_tick(self) -> None:
        """Flush records that have waited too long."""

    def close(self) -> None:
        """Record the state of the present manager, if any, and end. Repeatable."""

    def statistics(self) -> RecorderStatistics | None:
        """Return frozen statistics; None if nothing is ever recorded."""
        return None


class RecordedLoads:
    """Changes a manager's `loads`, for its tiers; `recorder` gets every change. Releases within a
    step or call of the manager are recorded as part of it."""

    def __init__(self, loads: PrefixLoads, recorder: StepRecorder) -> None:
        self.loads = loads
        """For reading only."""
        self._recorder = recorder
        self._released_within: list[int] | None = None

    def begin(
        self,
        request: Request,
        num_tokens: int,
        num_spare_blocks: int = 0,
        *,
        has_tail: bool = False,
    ) -> PrefixLoad | None:
        """Take blocks for a prefix, and record it; see `PrefixLoads.begin`."""
        load = self.loads.begin(request, num_tokens, num_spare_blocks, has_tail=has_tail)
        self._recorder.record(LoadBegun(request, num_tokens, num_spare_blocks, has_tail, load))
        return load

    def finish(self, load_id: int) -> None:
        """Cache a load's blocks, and record it."""
        self.loads.finish(load_id)
        self._recorder.record(LoadFinished(load_id))

    def release(self, load_id: int) -> None:
        """Free a load's blocks, and record it now or with the step or call it is part of."""
        self.loads.release(load_id)
        if self._released_within is None:
            self._recorder.record(LoadReleased(load_id))
        else:
            self._released_within.append(load_id)

    def enter_call(self) -> None:
        """Treat later releases as part of a call of the manager."""
        self._released_within = []

    def leave_call(self) -> tuple[int, ...]:
        """Return the releases since `enter_call`, and record later ones at once."""
        released, self._released_within = self._released_within, None
        return tuple(released or ())
