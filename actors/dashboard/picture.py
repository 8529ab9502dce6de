"""A cluster's cache as plain values that a page can draw.

Pure functions, without clock and connection. A picture has a limited number of cells and boxes,
however large the pool and the tree are.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from actors.cli.contents import PrefixNode, namespace_text
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.metrics.inspection import CacheInspection

MAX_CELLS = 8192
MAX_BOXES = 2000

CELL_STATES = ("free", "cached", "recent", "in use", "shared")
"""States of a cell of the pool, by number: empty or unknown; cached and idle; cached and used
within `RECENT_S`; used by one request or pin; used by several. The highest of several blocks
counts."""

RECENT_S = 10.0


def pool_picture(inspection: CacheInspection) -> dict[str, Any]:
    """Return the device blocks as cells: `states` is base64 of a byte per cell, in order of ids.

    A cell stands for `blocks_per_cell` blocks. `counts`: blocks by state. The null block is
    excluded.
    """
    references, idle_s = inspection.reference_counts[1:], inspection.idle_s[1:]
    states = np.zeros(len(references), dtype=np.uint8)
    states[idle_s >= 0] = 1
    states[(idle_s >= 0) & (idle_s < RECENT_S)] = 2
    states[references == 1] = 3
    states[references > 1] = 4
    counts = np.bincount(states, minlength=len(CELL_STATES))
    per_cell = max(1, -(-len(states) // MAX_CELLS))
    padded = np.zeros(-(-len(states) // per_cell) * per_cell, dtype=np.uint8)
    padded[: len(states)] = states
    cells = padded.reshape(-1, per_cell).max(axis=1) if len(states) else padded
    return {
        "states": base64.b64encode(cells.tobytes()).decode(),
        "names": list(CELL_STATES),
        "counts": dict(zip(CELL_STATES, counts.tolist(), strict=True)),
        "num_blocks": len(states),
        "blocks_per_cell": per_cell,
    }


def tree_picture(roots: list[PrefixNode]) -> dict[str, Any]:
    """Return the prefix tree as boxes: tokens downwards, a share of all prefixes across.

    `boxes`: the widest ones, at most `MAX_BOXES`, each with its parent. `num_prefixes`,
    `num_nodes`: totals.
    """
    total = sum(root.num_ends for root in roots)
    boxes: list[dict[str, Any]] = []
    pending: list[tuple[PrefixNode, float, int]] = []
    left = 0.0
    for root in roots:
        pending.append((root, left, 0))
        left += root.num_ends / total
    # The widest first, level by level, so that only narrow boxes are omitted.
    while pending and len(boxes) < MAX_BOXES:
        pending.sort(key=lambda entry: -entry[0].num_ends)
        level, pending = pending[: MAX_BOXES - len(boxes)], []
        for node, begin, tokens_above in level:
            boxes.append(_box(node, begin, node.num_ends / total, tokens_above))
            left = begin
            for child in node.children:
                pending.append((child, left, node.num_tokens))
                left += child.num_ends / total
    num_nodes = sum(1 for root in roots for _ in root.walk())
    return {"boxes": boxes, "num_prefixes": total, "num_nodes": num_nodes}


def _box(node: PrefixNode, start: float, width: float, tokens_above: int) -> dict[str, Any]:
    return {
        "x": round(start, 6),
        "width": round(width, 6),
        "from": tokens_above,
        "to": node.num_tokens,
        "digest": node.digest.hex()[:16],
        "blocks": node.num_own_blocks,
        "references": node.num_references,
        "ends": node.num_ends,
        "idle_s": round(node.idle_s, 1),
        "namespace": namespace_text(node.namespace),
    }


def tiers_picture(statistics: CoordinatorStatistics) -> list[dict[str, Any]]:
    """Return each tier below the device with its fill, and its stored and loaded blocks so far."""
    offload = statistics.offload
    if offload is None:
        return []
    return [
        {
            "name": name,
            "capacity": tier.num_slots * tier.blocks_per_slot,
            "ready": tier.num_ready,
            "pending": tier.num_pending,
            "held": tier.num_held,
            "stored_bytes": tier.stored_bytes,
            "loaded_bytes": tier.loaded_bytes,
        }
        for name, tier in offload.tiers.by_name.items()
    ]


def facts_picture(statistics: CoordinatorStatistics) -> dict[str, Any]:
    """Return the statistics of the present epoch; empty between two epochs."""
    manager = statistics.manager
    if manager is None:
        return {}
    core = manager.core
    asked = manager.num_asked_tokens
    return {
        "epoch": statistics.epoch,
        "clients": statistics.num_clients,
        "running": manager.num_running_requests,
        "usage": (core.num_blocks - core.num_free_blocks) / max(1, core.num_blocks),
        "hit_rate": manager.num_hit_tokens / asked if asked else None,
        "evicted_blocks": core.num_evictions,
        "pinned_blocks": core.num_pinned_blocks,
    }
