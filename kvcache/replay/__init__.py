"""Plays a workload step by step, like an engine, on any stepper."""

from __future__ import annotations
