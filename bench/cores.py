"""The sides of a comparison by name: the cores of this package, and the peer."""

from __future__ import annotations

from kvcache.manager.core_registry import CORES

FAST = "flat"
"""The core that runs where only one does."""
REFERENCE = "blocks"
PEER = "peer"


def registered() -> tuple[str, ...]:
    """Return the cores of this version, the fast one first."""
    return tuple(sorted(CORES, key=lambda core: core != FAST))
