"""A thousand damaged files below a running engine change no token.

    python -m tests.vllm.damaged_files

All blocks of many prompts go to files, few stay in memory. Then files are changed, cut and removed,
and the prompts come again, in batches.
"""

from __future__ import annotations

import random
import sys
import tempfile
import uuid
from pathlib import Path

from kvcache.memory_service.client import service_address
from kvcache.memory_service.process import end
from tests.vllm.conftest import PYTHON, Starter, made_model
from tests.vllm.schedules import damage

NUM_DAMAGED = 1000
NUM_PROMPTS = 64
PROMPT_TOKENS = 993
"""31 blocks, and a token to compute."""


def main() -> int:
    """Return the exit status."""
    draw = random.Random(11)
    prompts = [[draw.randrange(4, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    name = f"test-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory() as scratch:
        files, logs = Path(scratch, "files"), Path(scratch, "logs")
        for directory in (files, logs):
            directory.mkdir()
        start = Starter(str(PYTHON), made_model(str(PYTHON), Path(scratch, "model")), logs)
        disk = {"directory": str(files), "capacity_per_rank": "256MiB", "write": "on_store"}
        try:
            engine = start(
                {"name": name, "offload": {"host_memory_per_rank": "16MiB", "disk": disk}},
                max_num_batched_tokens=1024,
            )
            expected = engine.generate(prompts, 8).tokens
            engine.generate(prompts[:1], 1)
            paths = sorted(files.rglob("*.kvb"))
            chosen = draw.sample(paths, min(NUM_DAMAGED, len(paths)))
            num_damaged = sum(damage(path, draw) for path in chosen)
            engine.reset()
            found = engine.generate(prompts, 8)
            num_wrong = sum(a != b for a, b in zip(found.tokens, expected, strict=True))
        finally:
            start.end_all()
            end(service_address(name).address)
    print(
        f"{num_damaged} of {len(paths)} files damaged, {sum(found.cached)} of "
        f"{NUM_PROMPTS * PROMPT_TOKENS} tokens loaded, {num_wrong} prompts with wrong tokens"
    )
    return 0 if num_damaged == NUM_DAMAGED and sum(found.cached) and not num_wrong else 1


if __name__ == "__main__":
    sys.exit(main())
