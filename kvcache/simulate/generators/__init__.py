"""Synthetic traffic by name: chat, agents, retrieval, scans. Everything follows from a seed.

    sessions.py    sessions become requests in order of arrival     draws.py   distributions
    chat.py  agents.py  retrieval.py  scans.py                      sessions by kind

The shapes are invented: they show how policies and sizes treat kinds of traffic, and do not claim
to be like any real one. Users can record their own load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvcache.base.errors import TraceError
from kvcache.simulate.generators.agents import Agents, AgentShape
from kvcache.simulate.generators.chat import Chat, ChatShape
from kvcache.simulate.generators.retrieval import Retrieval, RetrievalShape
from kvcache.simulate.generators.scans import Scans, ScanShape
from kvcache.simulate.generators.sessions import SessionKind, SyntheticWorkload

DEFAULT_NUM_REQUESTS = 5_000
"""Default number of requests."""

GENERATORS: Mapping[str, Callable[[int], SessionKind]] = MappingProxyType(
    {"agents": Agents, "chat": Chat, "retrieval": Retrieval, "scans": Scans}
)
"""Kinds of traffic by name, each made from a seed."""

__all__ = [
    "DEFAULT_NUM_REQUESTS",
    "GENERATORS",
    "AgentShape",
    "Agents",
    "Chat",
    "ChatShape",
    "Retrieval",
    "RetrievalShape",
    "ScanShape",
    "Scans",
    "SessionKind",
    "SyntheticWorkload",
    "generate",
]


def generate(
    name: str, *, seed: int = 0, num_requests: int = DEFAULT_NUM_REQUESTS
) -> SyntheticWorkload:
    """Return the workload of the kind `name`. Raises TraceError for an unknown name."""
    if name not in GENERATORS:
        raise TraceError(f"no generator {name!r}: choose one of {', '.join(sorted(GENERATORS))}")
    return SyntheticWorkload(GENERATORS[name](seed), num_requests)
