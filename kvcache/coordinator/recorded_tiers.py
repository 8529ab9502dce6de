"""Changes of a manager's loads by its tiers, recorded in order.

Changes within a step or call of the manager are recorded as part of it, others at once.
"""

from __future__ import annotations

from kvcache.coordinator.step_recorder import LoadBegun, LoadFinished, LoadReleased, StepRecorder
from kvcache.manager.loads import PrefixLoad, PrefixLoads
from kvcache.requests.request import Request


class RecordedLoads:
    """Changes a manager's `loads`; `recorder` gets every change."""

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
