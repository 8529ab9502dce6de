"""The cost of sending a prompt to a replica: what must be computed there, and the load there.

Only numbers; the router knows replicas and requests. A replica that has been silent for too long
counts as empty, so only its load ranks it.

    score = overlap_weight * missing blocks + load        the lowest score comes first
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.base.errors import ConfigurationError
from kvcache.events.prefix_index import PrefixMatch


@dataclass(frozen=True)
class RouterSettings:
    """How replicas are ranked.

    `overlap_weight`: cost of a block that must be computed, in blocks of load; 0 ranks by load
    alone. `host_worth` and `storage_worth`: share of a block's computation that is saved if it is
    in host memory or in files, 0 to 1. `block_tokens`: unit of scores and loads, in tokens,
    whatever the replicas' block sizes are. A replica is stale after `stale_heartbeats` silent
    heartbeats. Beyond `max_open_requests`, the oldest requests without an end are dropped.

    Raises ConfigurationError for invalid values.
    """

    overlap_weight: float = 1.0
    host_worth: float = 0.8
    storage_worth: float = 0.5
    block_tokens: int = 16
    stale_heartbeats: float = 3.0
    max_open_requests: int = 100_000

    def __post_init__(self) -> None:
        if not (math.isfinite(self.overlap_weight) and self.overlap_weight >= 0):
            raise ConfigurationError(
                f"overlap_weight is {self.overlap_weight!r}: set it to a number from 0 on"
            )
        for name in ("host_worth", "storage_worth"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}: set it from 0 to 1")
        for name in ("block_tokens", "stale_heartbeats", "max_open_requests"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}: set it above 0")


@dataclass(frozen=True)
class Candidate:
    """A replica when a prompt is to be placed.

    `match`: its hit for the prompt, None if unknown. `load`: in blocks of `block_tokens`.
    `last_begun`: number of the last request that began there, among all requests; 0 before any.
    `num_cached_blocks`: all its blocks, for any prompt.
    """

    name: str
    match: PrefixMatch | None
    load: float
    last_begun: int = 0
    num_cached_blocks: int = 0


@dataclass(frozen=True)
class RankedReplica:
    """A replica and the reasons for its rank.

    `num_cached_tokens`: tokens of the prompt that it has, in any medium. `missing_blocks`: blocks
    to compute, in `block_tokens`; blocks below the device count in part.
    """

    name: str
    score: float
    load: float
    missing_blocks: float
    num_cached_tokens: int
    device_blocks: int
    host_blocks: int
    storage_blocks: int
    is_stale: bool


def rank_candidates(
    candidates: Sequence[Candidate], num_tokens: int, settings: RouterSettings
) -> list[RankedReplica]:
    """Return the candidates for a prompt of `num_tokens` tokens, the best one first.

    Ties: the smaller load first, then the replica whose last request is oldest, so that unknown
    prompts spread, then the one with fewer blocks, then by name.
    """
    ranked = [(_ranked(candidate, num_tokens, settings), candidate) for candidate in candidates]
    ranked.sort(
        key=lambda pair: (
            pair[0].score,
            pair[0].load,
            pair[1].last_begun,
            pair[1].num_cached_blocks,
            pair[0].name,
        )
    )
    return [one for one, _ in ranked]


def _ranked(candidate: Candidate, num_tokens: int, settings: RouterSettings) -> RankedReplica:
    match = candidate.match
    device, host, storage, size = (
        (0, 0, 0, 0)
        if match is None
        else (match.device_blocks, match.host_blocks, match.storage_blocks, match.block_size)
    )
    below = settings.host_worth * (host - device) + settings.storage_worth * (storage - host)
    missing_blocks = (num_tokens - size * (device + below)) / settings.block_tokens
    return RankedReplica(
        name=candidate.name,
        score=settings.overlap_weight * missing_blocks + candidate.load,
        load=candidate.load,
        missing_blocks=missing_blocks,
        num_cached_tokens=size * storage,
        device_blocks=device,
        host_blocks=host,
        storage_blocks=storage,
        is_stale=match is None,
    )
