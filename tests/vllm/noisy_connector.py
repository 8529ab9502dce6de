"""A connector whose loads write noise and report success: comparisons must notice it."""

from __future__ import annotations

from typing import Any

import torch

from kvcache.integrations.vllm import KVCacheConnector as RealConnector
from kvcache.integrations.vllm.rank_tiers import RankTiers, RunningLoad
from kvcache.protocol.messages import JobReport


class NoisyMemory(RankTiers):
    def _end_load(self, load: RunningLoad, report: JobReport) -> JobReport:
        for rows in self._jobs._pool.rows:
            floats = rows.view(torch.float32)
            for block in load.command.blocks:
                floats[block] = torch.randn(floats.shape[1])
        return super()._end_load(load, report)


class KVCacheConnector(RealConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._memory = NoisyMemory(self._setting, self._rank, kv_caches)
