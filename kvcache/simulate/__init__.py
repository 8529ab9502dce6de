"""Workloads, and simulations of caches that serve them."""

from __future__ import annotations
