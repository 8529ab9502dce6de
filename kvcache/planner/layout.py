"""The place of each pool's pages in a rank's one allocation.

A pool holds a page per block for one layer of each group.

    block_first   | block 0: pool 0, pool 1, ... | block 1: pool 0, pool 1, ... |
    layer_first   | pool 0: block 0, block 1, ... | pool 1: block 0, block 1, ... |

Block first keeps all layers of a block together on a rank, so that one copy moves a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.specs import KVCacheGroupSpec, KVCacheTensor, Layout


@dataclass(frozen=True)
class Pool:
    """Layers that share pages of one size: at most one of each group."""

    page_size_bytes: int
    shared_by: tuple[str, ...]


def pools_of(groups: Sequence[KVCacheGroupSpec]) -> list[Pool]:
    """Return the pools of a rank: pool `i` is shared by the `i`-th layer of each group."""
    count = max((len(group.layer_names) for group in groups), default=0)
    pools = []
    for index in range(count):
        sharers = [group for group in groups if index < len(group.layer_names)]
        page = sharers[0].kv_cache_spec.page_size_bytes
        pools.append(Pool(page, tuple(group.layer_names[index] for group in sharers)))
    return pools


def lay_out(pools: Sequence[Pool], num_blocks: int, layout: Layout) -> tuple[KVCacheTensor, ...]:
    """Return a tensor per pool, all in one allocation of `num_blocks` blocks.

    Offsets and strides are multiples of the page sizes, which are multiples of the element sizes.
    """
    block_bytes = sum(pool.page_size_bytes for pool in pools)
    tensors = []
    before = 0
    for pool in pools:
        page = pool.page_size_bytes
        is_block_first = layout == "block_first"
        tensors.append(
            KVCacheTensor(
                size=num_blocks * page,
                shared_by=pool.shared_by,
                offset=before if is_block_first else num_blocks * before,
                block_stride=block_bytes if is_block_first else page,
                layer_stride=page if is_block_first else num_blocks * page,
            )
        )
        before += page
    return tuple(tensors)
