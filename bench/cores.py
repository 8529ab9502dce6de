"""The sides of a comparison by name: this package, and the peer."""

from __future__ import annotations

OURS = "ours"
PEER = "peer"
