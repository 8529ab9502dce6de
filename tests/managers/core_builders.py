"""Cores of `kvcache/managers` for tests, and what all tests of cores make."""

from __future__ import annotations

from typing import Any

from kvcache.managers.block_core import BlockCore
from kvcache.specs import KVCacheSpec
from tests.core.builders import (
    NONE_HASH,
    RequestTokens,
    block_lists,
    chunked,
    cross,
    extend,
    full,
    make_request,
    mamba,
    mla,
    plan,
    row_batch,
    run_request,
    window,
)

__all__ = [
    "NONE_HASH",
    "RequestTokens",
    "block_lists",
    "chunked",
    "cross",
    "extend",
    "full",
    "make_core",
    "make_request",
    "mamba",
    "mla",
    "plan",
    "row_batch",
    "run_request",
    "window",
]


def make_core(num_blocks: int, *specs: KVCacheSpec, **options: Any) -> BlockCore:
    return BlockCore(plan(num_blocks, *(specs or (full(),))), none_hash=NONE_HASH, **options)
