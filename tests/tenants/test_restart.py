"""Tenants' counts rebuilt from labels equal those of before."""

from __future__ import annotations

import random

import pytest

from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.manager import KVCacheManager
from kvcache.requests.request import Request
from tests.manager.managers_under_test import FULL, HYBRID, Shape, make_manager
from tests.rebuild.ranks import Ranks

NAMES = ("alice", "bob", "carol", None)
TENANTS = TenantsConfig(
    named={"alice": TenantConfig(guaranteed=0.3), "bob": TenantConfig(limit=0.5, weight=2.0)}
)
NUM_BLOCKS = 61


def make(shape: Shape) -> KVCacheManager:
    return make_manager(shape, NUM_BLOCKS, tenants=TENANTS, has_workers=True)


def blocks_of_tenants(manager: KVCacheManager) -> dict[str, tuple[int, int]]:
    return {
        each.name: (each.num_held_blocks, each.num_cached_blocks)
        for each in manager.statistics().tenants
        if each.num_held_blocks
    }


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda shape: shape.name)
def test_every_tenant_has_again_what_it_had_cached(shape: Shape) -> None:
    rng = random.Random(3)
    manager, ranks = make(shape), Ranks(2, NUM_BLOCKS, 4)
    for number in range(40):
        tokens = [rng.randrange(3)] * rng.randint(1, 24) + [100 + number]
        request = Request(f"r{number}", tokens, tenant=rng.choice(NAMES))
        hit, num_hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, len(tokens) - num_hit, num_hit, hit) is not None
        manager.free(request)
        ranks.obey(manager.take_commands())
    again = make(shape)
    assert again.restore(ranks.collect()) == manager.statistics().core.num_cached_blocks
    again.check()
    assert blocks_of_tenants(again) == blocks_of_tenants(manager)
    assert len(blocks_of_tenants(again)) == 4
    # And they follow the same rule: guarantees are kept.
    for number in range(30):
        request = Request(f"n{number}", [200 + number] * 20, tenant="noisy")
        assert again.allocate_slots(request, 20) is not None
        again.free(request)
        again.check()
    kept = blocks_of_tenants(again)["alice"][0]
    assert kept >= min(blocks_of_tenants(manager)["alice"][0], 18)
