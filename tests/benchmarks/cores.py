"""The sides of a comparison by name: the two cores of this package, and the peer."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.manager.core_registry import CORES

FAST = "extents"
REFERENCE = "blocks"
PEER = "peer"


def present(wanted: Sequence[str] = (FAST, REFERENCE)) -> tuple[str, ...]:
    """Return those of the wanted cores that this version has; the others' columns stay empty."""
    return tuple(core for core in wanted if core in CORES)
