"""Flat cores for tests."""

from __future__ import annotations

from typing import Any

from kvcache.core.flat_core import FlatCore
from kvcache.hashing import get_hash_fn
from kvcache.specs import KVCacheSpec
from tests.managers.core_builders import NONE_HASH, full, plan


def make_flat_core(num_blocks: int, *specs: KVCacheSpec, **options: Any) -> FlatCore:
    settings: dict[str, Any] = {"hash_fn": get_hash_fn("sha256"), "none_hash": NONE_HASH, **options}
    return FlatCore(plan(num_blocks, *(specs or (full(),))), **settings)
