"""What a replay is played on: a cluster made for it, one that is running, or this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcache.errors import ConfigurationError
from kvcache.replay.engine import EngineLimits
from kvcache.replay.stepper import Stepper


@dataclass(frozen=True)
class Playground:
    """Whom the engine drives, by which limits, and what to call it."""

    title: str
    stepper: Stepper
    limits: EngineLimits


@contextmanager
def open_playground(
    config_path: Path | None, name: str | None, is_local: bool
) -> Iterator[Playground]:
    """Yield what to play on; whatever was started for it is stopped afterwards.

    Raises ConfigurationError when the choices contradict each other, and what starting or
    connecting raises.
    """
    if name is not None and (is_local or config_path is not None):
        other = "--local" if is_local else "--config"
        raise ConfigurationError(
            f"--name {name} plays on a running cluster, {other} on a new one: give one of them"
        )
    if name is None and config_path is None:
        raise ConfigurationError(
            "nothing to play on: give --config FILE for a new cluster, or --name NAME for a "
            "running one"
        )
