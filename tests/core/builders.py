"""Flat cores for tests, and a way to fill them."""

from __future__ import annotations

from typing import Any

from kvcache.core import Core, Reservation, TableChange
from kvcache.core.flat_core import FlatCore
from kvcache.hashing import get_hash_fn
from kvcache.request import Request
from kvcache.specs import KVCacheSpec
from tests.managers.core_builders import NONE_HASH, full, plan


def make_flat_core(num_blocks: int, *specs: KVCacheSpec, **options: Any) -> FlatCore:
    settings: dict[str, Any] = {"hash_fn": get_hash_fn("sha256"), "none_hash": NONE_HASH, **options}
    return FlatCore(plan(num_blocks, *(specs or (full(),))), **settings)


def run_request(
    core: Core, request: Request, num_tokens: int | None = None
) -> list[TableChange] | None:
    """Look up, then reserve and cache everything up to `num_tokens`."""
    hit = core.look_up(request)
    end = request.num_tokens if num_tokens is None else num_tokens
    return core.reserve(request, Reservation(hit.num_tokens, end, end), hit)
