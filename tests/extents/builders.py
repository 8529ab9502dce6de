"""Small cores of runs, and ways to fill them."""

from __future__ import annotations

from typing import Any

from kvcache.core import Reservation, TableChange
from kvcache.extents.extent_core import ExtentCore
from kvcache.hashing import get_hash_fn
from kvcache.request import Request
from kvcache.specs import KVCacheSpec
from tests.managers.core_builders import NONE_HASH, full, plan

HASH_FN = get_hash_fn("sha256")


def make_core(num_blocks: int, *specs: KVCacheSpec, **options: Any) -> ExtentCore:
    config = plan(num_blocks, *(specs or (full(),)))
    return ExtentCore(config, none_hash=NONE_HASH, hash_fn=HASH_FN, **options)


def run_request(
    core: ExtentCore, request: Request, num_tokens: int | None = None
) -> list[TableChange] | None:
    """Look up, then reserve and cache everything up to `num_tokens`."""
    hit = core.look_up(request)
    end = request.num_tokens if num_tokens is None else num_tokens
    return core.reserve(request, Reservation(hit.num_tokens, end, end), hit)
