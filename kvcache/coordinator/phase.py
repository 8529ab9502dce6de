"""The phase of a coordinator."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """What a coordinator is doing."""

    NEW = "new"
    FENCING = "fencing"
    COLLECTING = "collecting"
    RUNNING = "running"
    SUPERSEDED = "superseded"
    CLOSED = "closed"


OBEYED = (Phase.FENCING, Phase.COLLECTING, Phase.RUNNING)
"""The phases in which the coordinator accepts messages of workers."""
