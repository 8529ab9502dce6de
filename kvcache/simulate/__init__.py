"""Workloads and what-if: requests to play, and what a cache of some size would make of them."""

from __future__ import annotations

from kvcache.simulate.conversations import Conversations, ConversationShape
from kvcache.simulate.mooncake import MOONCAKE_BLOCK_SIZE, MooncakeTrace
from kvcache.simulate.opening import CONVERSATIONS, open_workload
from kvcache.simulate.text import ReadingOptions, TextDocuments
from kvcache.simulate.workload import LimitedWorkload, Workload, WorkloadRequest

__all__ = [
    "CONVERSATIONS",
    "MOONCAKE_BLOCK_SIZE",
    "ConversationShape",
    "Conversations",
    "LimitedWorkload",
    "MooncakeTrace",
    "ReadingOptions",
    "TextDocuments",
    "Workload",
    "WorkloadRequest",
    "open_workload",
]
