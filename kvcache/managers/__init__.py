"""Which blocks a request needs and may share, by attention kind, and the kinds combined."""

from __future__ import annotations
