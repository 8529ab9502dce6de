"""How far a coordinator is: one word for what it serves and whom it listens to."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """How far the coordinator is."""

    NEW = "new"
    FENCING = "fencing"
    COLLECTING = "collecting"
    RUNNING = "running"
    SUPERSEDED = "superseded"
    CLOSED = "closed"


OBEYED = (Phase.FENCING, Phase.COLLECTING, Phase.RUNNING)
"""The phases in which workers are listened to."""
