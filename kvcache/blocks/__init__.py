"""The reference core's pool: blocks, the free queue, what is cached where, and who holds it."""

from __future__ import annotations
