"""The sides of a comparison by name: this package, an earlier revision of it, and the peer."""

from __future__ import annotations

OURS = "ours"
BEFORE = "before"
PEER = "peer"
