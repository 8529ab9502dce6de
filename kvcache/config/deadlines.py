"""How long each wait may last, and which wait has to outlast which.

One section of `ClusterConfig`. A cluster heals itself: a worker that hangs is ended and replaced, a
coordinator that died is restarted. Whatever waits for the cluster has to outlast that, or it gives
up at the moment at which it would be served. So the waits derive from `startup_s`,
`worker_silence_s` and `replacement_s`, and values that are set all the same are compared:

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
"""How long it may take, from the decision to end a process, until it is proven dead: a third to
reach its node, a third until Ray notices, and a third until Ray has ended it instead."""


class DeadlinesConfig(Section):
    """How long each wait may last before it is an error.

    A rank that is silent for `worker_silence_s` is reported, for `worker_kill_s` its process is
    ended and counts as lost (0: never). Another process for a lost rank is tried for
    `replacement_s` (0: not at all). Clients wait `step_s` for an answer, and `forward_s` while
    nothing moves. A client that is silent for `client_silence_s` is given up. One that has lost
    its connection, or its coordinator, may take `reattach_s` to come back: after a restart steps
    wait so long for the clients of before. Ray calls have no connections: there, only silence
    tells that a client is gone.

    Unless they are set, three follow from others. `worker_kill_s` is three times
    `worker_silence_s`. So is `step_s`, or twice `reattach_s`, but at least 30. `forward_s` is
    `worker_kill_s`, the 30 s that ending a process may take, and `worker_silence_s`; where
    `worker_kill_s` is 0, it is `step_s`. [Operating](operations.md#waits-that-must-outlast-others)
    has the table of waits that must outlast others.
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
        """How long a worker may hang until it is proven dead and its clients hear that its epoch is
        over; 0 where it is never ended."""
        return self.worker_kill_s + ENDING_S if self.worker_kill_s else 0.0

    @property
    def labels_s(self) -> float:
        """How long a new epoch waits for what a rank tells of its blocks. Longer than a rank that
        hangs lives: it is lost then, and the epoch with it."""
        return self.lost_s or 3 * self.worker_silence_s

    @property
    def held_up_s(self) -> float:
        """How long a content-checked forward may be held up by transfers before it fails. A worker
        in which one hangs is ended before, and clients wait longer."""
        return self.lost_s or self.forward_s / 2

    @property
    def return_s(self) -> float:
        """How long a cluster that has lost its coordinator or a worker may take until it serves
        steps again. After that it has given up."""
        return max(self.startup_s, self.replacement_s) + self.labels_s

    @property
    def closing_s(self) -> float:
        """How long each step of a shutdown may take behind the coordinator's answer, which has
        `shutdown_s`: its message loop, the workers' connections, all processes."""
        return self.shutdown_s / 3

    @model_validator(mode="after")
    def _derive(self) -> DeadlinesConfig:
        """Fill in what follows from other values; then compare what must outlast what."""
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
        """Set what was not set; the model is frozen for everybody else."""
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
                f"({self.worker_silence_s}), so that a worker would be ended before anybody hears "
                "that it is silent: raise it, or set it to 0 to end none"
            )
