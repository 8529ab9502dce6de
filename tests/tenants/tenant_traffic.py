"""Several tenants on one manager, and the hits of each.

    all tenants' requests, shuffled:  look up ──▶ allocate the whole prompt ──▶ free, tail first

As in the counting rule, a request holds its blocks until the next one comes. A tenant either
repeats a few prompts, or scans: all its prompts are new. Requests without room are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from kvcache.base.errors import ConfigurationError
from kvcache.manager import KVCacheManager
from kvcache.requests.request import Request

_FIRST_NEW_TOKEN = 1 << 20


@dataclass(frozen=True)
class TenantTraffic:
    """`num_requests` requests of one tenant. Each is one of `num_prompts` prompts, 0: a new one.

    After its `prompt_tokens` tokens each has a token of its own. Raises ConfigurationError for
    invalid counts.
    """

    tenant: str
    num_prompts: int
    prompt_tokens: int
    num_requests: int

    def __post_init__(self) -> None:
        if self.num_prompts < 0 or self.prompt_tokens < 1 or self.num_requests < 1:
            raise ConfigurationError(
                f"traffic of tenant {self.tenant!r}: {self.num_requests} requests of "
                f"{self.num_prompts} prompts of {self.prompt_tokens} tokens: use at least 1 "
                "request, 1 token and 0 prompts"
            )


@dataclass
class TenantCount:
    """The hits of one tenant's requests, in tokens, in order, and how many had no room."""

    hit_tokens: list[int] = field(default_factory=list)
    num_refused: int = 0


def count_tenants(
    manager: KVCacheManager, traffic: Sequence[TenantTraffic], seed: int
) -> dict[str, TenantCount]:
    """Play all tenants' requests, in an order shuffled by `seed`; return each one's count.

    A tenant's own requests come in the same order, whatever other tenants there are.
    """
    rng = Random(seed)
    turns = [each.tenant for each in traffic for _ in range(each.num_requests)]
    rng.shuffle(turns)
    counts = {each.tenant: TenantCount() for each in traffic}
    prompts = {each.tenant: (each, Random(f"{seed} {each.tenant}")) for each in traffic}
    held: Request | None = None
    for number, tenant in enumerate(turns):
        shape, own = prompts[tenant]
        first = own.randrange(shape.num_prompts) if shape.num_prompts else _FIRST_NEW_TOKEN + number
        tokens = [first] * shape.prompt_tokens + [_FIRST_NEW_TOKEN + number]
        request = Request(
            f"{tenant} {number}", tokens, tenant=tenant, model_epoch=manager.model_epoch
        )
        hit, num_hit = manager.get_computed_blocks(request)
        got = manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit)
        counts[tenant].hit_tokens.append(num_hit)
        counts[tenant].num_refused += got is None
        if held is not None:
            manager.free(held)
        held = request if got is not None else None
    if held is not None:
        manager.free(held)
    return counts
