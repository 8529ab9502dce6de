"""Fingerprints of plans, so that processes with different plans refuse each other.

`plan_fingerprint` covers everything that must agree while a cluster runs, and is in every message.
`layout_fingerprint` covers the meaning of stored bytes, but no counts, so that files and labels
survive a change of capacity.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from kvcache.base.arguments import as_int, as_text, as_tuple, check_fields, check_kind
from kvcache.base.errors import ConfigurationError
from kvcache.specs import KVCacheConfig, require_count

FINGERPRINT_VERSION = 1
"""Part of every fingerprint: raised when the meaning of a plan's fields changes."""


@dataclass(frozen=True)
class RankCoordinates:
    """A rank's place: `tensor_rank` of `tensor_parallel_size` in its pipeline stage."""

    tensor_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_rank: int = 0
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_rank", "pipeline_rank"):
            check_fields(self, as_int, name, at_least=0)
        check_fields(self, as_int, "tensor_parallel_size", at_least=1)
        check_fields(self, as_int, "pipeline_parallel_size", at_least=1)
        for kind in ("tensor", "pipeline"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_parallel_size")
            if rank >= size:
                raise ConfigurationError(
                    f"{kind}_rank is {rank}, but {kind}_parallel_size is {size}: ranks count from 0"
                )

    @classmethod
    def of_rank(
        cls, rank: int, tensor_parallel_size: int, pipeline_parallel_size: int
    ) -> RankCoordinates:
        """Return the coordinates of global rank `pipeline_rank * tensor_parallel_size + tensor`."""
        size = require_count("tensor_parallel_size", tensor_parallel_size)
        rank = require_count("rank", rank, at_least=0)
        return cls(rank % size, size, rank // size, pipeline_parallel_size)


def plan_fingerprint(configs: Sequence[KVCacheConfig]) -> str:
    """Return 32 hex digits over the plans of all ranks, in rank order."""
    listed = as_tuple("configs", configs, ConfigurationError, KVCacheConfig)
    return _digest("plan", [config.to_dict() for config in listed])


def layout_fingerprint(
    config: KVCacheConfig,
    *,
    model: str,
    seed: str,
    algorithm: str,
    coordinates: RankCoordinates,
) -> str:
    """Return 32 hex digits over the meaning of one rank's stored bytes.

    Covers the model, hash seed and algorithm, the rank's coordinates, the specs of its groups
    (dtype, heads, page size) and the order of its pools, but no capacity.
    """
    check_kind("config", config, KVCacheConfig, ConfigurationError)
    check_kind("coordinates", coordinates, RankCoordinates, ConfigurationError)
    return _digest(
        "layout",
        {
            "model": as_text("model", model, ConfigurationError),
            "seed": as_text("seed", seed, ConfigurationError, may_be_empty=True),
            "algorithm": as_text("algorithm", algorithm, ConfigurationError),
            "coordinates": asdict(coordinates),
            "layout": config.layout,
            "groups": [group.to_dict() for group in config.kv_cache_groups],
            "pools": [list(tensor.shared_by) for tensor in config.kv_cache_tensors],
        },
    )


def _digest(what: str, values: Any) -> str:
    text = json.dumps([what, FINGERPRINT_VERSION, values], sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:32]
