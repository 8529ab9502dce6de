"""Which cached blocks are of no use once others are forgotten, and in which order all of them go.

Beside the content index, for what is forgotten although contents continue it. Looks, changes
nothing; refuses to hurry: it reads every cached block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcache.hashing import BlockHash

if TYPE_CHECKING:
    from kvcache.blocks.contents import ContentIndex


def with_descendants(contents: ContentIndex, block_ids: Sequence[int]) -> list[int]:
    """Return these cached blocks and all blocks whose digests would lose their ancestors.

    Descendants come first. A digest that stays in another block keeps its children. O(cached).
    """
    children: dict[tuple[int, BlockHash], list[int]] = {}
    cached = np.flatnonzero(contents.table_numbers)
    numbers, parents = contents.table_numbers[cached].tolist(), contents.parents[cached].tolist()
    for block_id, number, parent in zip(cached.tolist(), numbers, parents, strict=True):
        children.setdefault((number, parent), []).append(block_id)
    doomed = dict.fromkeys(block_ids)
    pending = list(block_ids)
    while pending:
        block_id = pending.pop()
        table, digest = contents.table_of(block_id), contents.digests[block_id]
        if table is None or any(copy not in doomed for copy in table.blocks(digest)):
            continue
        for child in children.get((table.number, digest), ()):
            if child not in doomed:
                doomed[child] = None
                pending.append(child)
    return _descendants_first(contents, list(doomed))


def _descendants_first(contents: ContentIndex, block_ids: list[int]) -> list[int]:
    """Order blocks so that every block comes before its ancestors."""
    numbers, digests, parents = contents.table_numbers, contents.digests, contents.parents
    keys = {b: (int(numbers[b]), digests[b]) for b in block_ids}
    above = {key: parents[b] for b, key in keys.items()}
    depths: dict[tuple[int, BlockHash], int] = {}
    for start in above:
        path = []
        key = start
        while key in above and key not in depths:
            path.append(key)
            key = (key[0], above[key])
        depth = depths.get(key, 0)
        for step in reversed(path):
            depth += 1
            depths[step] = depth
    return sorted(block_ids, key=lambda b: -depths[keys[b]])
