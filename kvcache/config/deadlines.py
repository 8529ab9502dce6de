"""How long each wait may last, and which waits must outlast which.

One section of `ClusterConfig`. A cluster recovers by itself: a hanging worker is ended and
replaced, a coordinator that died is restarted. A wait for the cluster must outlast the recovery, or
it ends just before the cluster serves again. So the waits derive from `startup_s`,
`worker_silence_s` and `replacement_s`. Values that are set explicitly are checked against them:

    silent    refused     ended            proven dead, new epoch      waits for a forward end
    |---------|-----------|----------------|---------------------------|
    0         worker_     worker_kill_s    lost_s                      forward_s
              silence_s

Refuses values with which a client would give up before the cluster does.
"""

from __future__ import annotations

from pydantic import model_validator

from kvcache.base.errors import ConfigurationError
from kvcache.config.sections import Seconds, SecondsOrNever, Section

ENDING_S = 30.0
"""Time from the decision to end a process until its death is proven: a third to reach its node, a
third until Ray notices, and a third until Ray has ended it instead."""


class DeadlinesConfig(Section):
    """How long each wait may last before it is an error.

    A rank that is silent for `worker_silence_s` is reported. After `worker_kill_s` its process is
    ended and counts as lost (0: never). A lost rank's replacement is tried for `replacement_s` (0:
    not at all). Clients wait `step_s` for an answer, and `forward_s` while nothing moves. A client
    that is silent for `client_silence_s` is given up. A client that has lost its connection or its
    coordinator has `reattach_s` to return; after a warm restart, steps wait that long for earlier
    clients. Ray calls have no connections, so there only silence shows that a client is gone.

    Three values have defaults that follow from others. `worker_kill_s` is three times
    `worker_silence_s`. `step_s` is three times `worker_silence_s` or twice `reattach_s`, but at
    least 30. `forward_s` is `worker_kill_s`, plus 30 s to end a process, plus `worker_silence_s`;
    if `worker_kill_s` is 0, it is `step_s`.
    [Operating](operations.md#waits-that-must-outlast-others) has the table of waits that must
    outlast others.
    """

    startup_s: Seconds = 60.0
    worker_silence_s: Seconds = 10.0
    worker_kill_s: SecondsOrNever = 30.0
    replacement_s: SecondsOrNever = 600.0
    step_s: Seconds = 30.0
    forward_s: Seconds = 70.0
    shutdown_s: Seconds = 10.0
    client_silence_s: Seconds = 60.0
    reattach_s: Seconds = 5.0

    @property
    def lost_s(self) -> float:
        """Longest time until a hanging worker is proven dead and its clients learn that the epoch
        has ended; 0 if hanging workers are not ended."""
        return self.worker_kill_s + ENDING_S if self.worker_kill_s else 0.0

    @property
    def labels_s(self) -> float:
        """How long a new epoch waits for a rank's labels. Longer than a hanging rank lives: that
        rank is lost, and the epoch with it."""
        return self.lost_s or 3 * self.worker_silence_s

    @property
    def held_up_s(self) -> float:
        """How long transfers may hold up a content-checked forward before it fails. A worker that
        hangs is ended earlier, and clients wait longer."""
        return self.lost_s or self.forward_s / 2

    @property
    def return_s(self) -> float:
        """How long a cluster that has lost its coordinator or a worker may take until it serves
        steps again, or has given up."""
        return max(self.startup_s, self.replacement_s) + self.labels_s

    @property
    def closing_s(self) -> float:
        """Longest time for each step of a shutdown after the coordinator's answer, which has
        `shutdown_s`: its message loop, the workers' connections, all processes."""
        return self.shutdown_s / 3

    @model_validator(mode="after")
    def _derive(self) -> DeadlinesConfig:
        """Derive missing values from others; then compare the waits."""
        self._default("worker_kill_s", 3 * self.worker_silence_s)
        self._default("step_s", max(30.0, 3 * self.worker_silence_s, 2 * self.reattach_s))
        patience_s = self.lost_s + self.worker_silence_s
        self._default("forward_s", patience_s if self.lost_s else self.step_s)
        self._says_who_hangs_before_it_kills()
        self._outlasts(
            "step_s",
            "worker_silence_s",
            self.worker_silence_s,
            "a client would give up a step before it hears that a rank is silent",
        )
        self._outlasts(
            "step_s",
            "reattach_s",
            self.reattach_s,
            "a client that came back would give up before the others are waited for",
        )
        if self.lost_s:
            self._outlasts(
                "forward_s",
                f"worker_kill_s and the {ENDING_S:g} s that ending a process may take",
                self.lost_s,
                "a client would give up before a worker that hangs is ended and replaced",
                "or lower worker_kill_s, or set it to 0 to end none",
            )
        return self

    def _default(self, key: str, value: float) -> None:
        """Set a value that was not given; the model is frozen otherwise."""
        if key not in self.model_fields_set:
            self.__dict__[key] = float(value)

    def _outlasts(
        self, key: str, other: str, least_s: float, why: str, alternative: str = ""
    ) -> None:
        value = getattr(self, key)
        if value <= least_s:
            remedy = f", {alternative}" if alternative else ""
            raise ConfigurationError(
                f"{key} is {value}, not more than {other} ({least_s}), so that {why}: raise it"
                f"{remedy}, or leave {key} out"
            )

    def _says_who_hangs_before_it_kills(self) -> None:
        if 0 < self.worker_kill_s <= self.worker_silence_s:
            raise ConfigurationError(
                f"worker_kill_s is {self.worker_kill_s}, not more than worker_silence_s "
                f"({self.worker_silence_s}), so that a worker would be ended before a client hears "
                "that it is silent: raise it, or set it to 0 to end none"
            )
