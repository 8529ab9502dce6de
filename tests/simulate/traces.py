"""Small random traces, and files of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from kvcache.simulate.block_trace import BlockTrace, read_block_trace
from kvcache.simulate.mooncake import MooncakeTrace

SIZE = 4
CONVERSATION = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_conversation.jsonl.gz"


def trace_line(length: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids, **more}


def write_lines(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def block_trace(path: Path, requests: list[tuple[int, list[int]]], size: int = SIZE) -> BlockTrace:
    """Write requests, lengths and block ids, to a file and read it."""
    write_lines(path, *(trace_line(length, ids) for length, ids in requests))
    return read_block_trace(MooncakeTrace(path, block_size=size))


def random_requests(
    rng: random.Random, num_requests: int, most_new: int = 5, least_new: int = 0
) -> list[tuple[int, list[int]]]:
    """Draw requests that continue earlier ones by `least_new` to `most_new` blocks; an id stands
    for a block and all before it."""
    known: list[list[int]] = [[]]
    next_id = 0
    requests = []
    for _ in range(num_requests):
        base = rng.choice(known)
        ids = base[: rng.randrange(len(base) + 1)]
        for _ in range(rng.randrange(least_new if ids else 1, most_new + 1)):
            ids.append(next_id)
            next_id += 1
        length = len(ids) * SIZE - rng.choice([0, 0, 1, 3])
        known.append(ids[: length // SIZE])
        requests.append((length, ids))
    return requests
