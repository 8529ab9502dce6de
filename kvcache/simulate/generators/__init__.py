"""Synthetic traffic by name: chat, agents, retrieval, scans. Everything follows from a seed.

    sessions.py    sessions become requests in order of arrival     draws.py   what is drawn how
    chat.py  agents.py  retrieval.py  scans.py                      what a session is, by kind

The shapes are ours: they show what policies and sizes do to kinds of traffic, and are no claim
about anybody's. Users with a load of their own record it.
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
"""As many requests are made where nothing else is said."""

GENERATORS: Mapping[str, Callable[[int], SessionKind]] = MappingProxyType(
    {"agents": Agents, "chat": Chat, "retrieval": Retrieval, "scans": Scans}
)
"""Kinds of traffic by name, each made with a seed."""

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
