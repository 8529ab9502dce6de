"""Plays a workload step by step, like an engine, on any stepper."""

from __future__ import annotations

from kvcache.replay.engine import ReplayEngine
from kvcache.replay.limits import EngineLimits, ModelTraits
from kvcache.replay.report import ReplayReport
from kvcache.replay.stepper import CacheCounters, ForwardProgress, Stepper

__all__ = [
    "CacheCounters",
    "EngineLimits",
    "ForwardProgress",
    "ModelTraits",
    "ReplayEngine",
    "ReplayReport",
    "Stepper",
]
