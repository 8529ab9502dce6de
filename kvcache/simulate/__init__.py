"""Workloads, and simulations of caches that serve them."""

from __future__ import annotations

from kvcache.simulate.conversations import Conversations, ConversationShape
from kvcache.simulate.generators import GENERATORS, SyntheticWorkload, generate
from kvcache.simulate.mooncake import MOONCAKE_BLOCK_SIZE, MooncakeTrace
from kvcache.simulate.opening import CONVERSATIONS, open_workload
from kvcache.simulate.text import ReadingOptions, TextDocuments
from kvcache.simulate.trace_writing import trace_lines, write_trace
from kvcache.simulate.workload import LimitedWorkload, Workload, WorkloadRequest

__all__ = [
    "CONVERSATIONS",
    "GENERATORS",
    "MOONCAKE_BLOCK_SIZE",
    "ConversationShape",
    "Conversations",
    "LimitedWorkload",
    "MooncakeTrace",
    "ReadingOptions",
    "SyntheticWorkload",
    "TextDocuments",
    "Workload",
    "WorkloadRequest",
    "generate",
    "open_workload",
    "trace_lines",
    "write_trace",
]
