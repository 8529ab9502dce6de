"""A connector whose loads hang while the file `KVCACHE_TEST_HANG` exists, and write afterwards."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kvcache.integrations.vllm import KVCacheConnector as RealConnector
from kvcache.worker.copies.task import BlockMove, CpuBlockMove

__all__ = ["KVCacheConnector"]

_init = CpuBlockMove.__init__


def init(self: CpuBlockMove, move: BlockMove, *args: Any) -> None:
    _init(self, move, *args)
    while not move.to_host and Path(os.environ["KVCACHE_TEST_HANG"]).exists():
        time.sleep(0.01)


class KVCacheConnector(RealConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        CpuBlockMove.__init__ = init  # type: ignore[method-assign]
        super().register_kv_caches(kv_caches)
