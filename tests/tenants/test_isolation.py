"""A salted tenant learns nothing of others' contents, by any call."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.core import BlocksStored
from kvcache.manager import KVCacheManager
from kvcache.offload import Place, TierHierarchy, TierOptions, make_tier
from kvcache.offload.keys import make_offload_keys
from kvcache.requests.request import Request
from tests.manager.managers_under_test import FULL, HYBRID, Shape, make_manager

SALTS = TenantsConfig(
    by="salt", named={"alice's salt": TenantConfig(guaranteed=0.25), "bob's salt": TenantConfig()}
)
TOKENS = [list(range(start, start + 28)) for start in (0, 0, 100, 0, 200, 100)]


def make(shape: Shape, **settings: Any) -> KVCacheManager:
    return make_manager(shape, 129, tenants=SALTS, log_stats=True, **settings)


def answers(manager: KVCacheManager, salt: str, *, other: str | None) -> list[object]:
    """Let one tenant work, optionally with another one that repeats each request's tokens; return
    all answers to the first one."""
    told: list[object] = []
    for number, tokens in enumerate(TOKENS):
        for who in [salt] if other is None else [other, salt, other]:
            request = Request(f"{who} {number} {len(told)} {who == salt}", tokens, cache_salt=who)
            hit, num_hit = manager.get_computed_blocks(request)
            got = manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit)
            if who == salt:
                told.append((num_hit, [len(ids) for ids in hit.get_block_ids()], got is None))
                pin = manager.pin_prefix(tokens, 60.0, cache_salt=who)
                told.append((pin.num_tokens, pin.num_blocks))
                manager.unpin_prefix(pin)
            manager.free(request)
    return told


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda shape: shape.name)
@pytest.mark.parametrize("merges", [False, True])
def test_answers_are_the_same_whether_or_not_another_has_the_same_tokens(
    shape: Shape, merges: bool
) -> None:
    alone = answers(make(shape, merge_duplicates=merges), "alice's salt", other=None)
    manager = make(shape, merge_duplicates=merges)
    shared = answers(manager, "alice's salt", other="bob's salt")
    assert shared == alone
    assert any(told[0] == 24 for told in alone[::2])
    mine = manager.statistics().tenants[0]
    assert mine.num_hit_tokens == sum(told[0] for told in alone[::2])


def test_digests_of_events_are_of_no_use_to_another_tenant() -> None:
    """A salt is in the first block's digest, and so in all: equal tokens, other digests."""
    manager = make(FULL, enable_kv_cache_events=True)
    digests = []
    for salt in ("alice's salt", "bob's salt"):
        request = Request(salt, TOKENS[0], cache_salt=salt)
        hit, num_hit = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit)
        stored = [e for e in manager.take_events() if isinstance(e, BlocksStored)]
        digests.append({bytes(digest) for event in stored for digest in event.digests})
    assert len(digests[0]) == len(digests[1]) == 7
    assert not digests[0] & digests[1]


def test_tiers_find_nothing_of_another_tenant() -> None:
    number = iter(range(1, 100))
    tiers = TierHierarchy(
        make_tier(TierOptions("host", 16, tenants=SALTS)),
        make_tier(TierOptions("file", 16, tenants=SALTS)),
        lambda: next(number),
    )
    requests = [
        Request(salt, TOKENS[0], cache_salt=salt) for salt in ("alice's salt", "bob's salt")
    ]
    manager = make(FULL)
    keys = []
    for request in requests:
        manager.get_computed_blocks(request)
        keys.append(make_offload_keys(request.block_hashes, 0, request.namespace))
    job = tiers.plan_store(keys[0], 0.0, namespace=requests[0].namespace)
    tiers.end(job.job_id, ok=True)
    spill = tiers.plan_spills(0.0)
    if spill is not None:
        tiers.end(spill.job_id, ok=True)
    assert (tiers.locate(keys[0]) == Place.HOST).all()
    assert tiers.locate(keys[1]).tolist() == [Place.NOWHERE] * 7
    # Not even with the digests themselves, under its own namespace.
    stolen = make_offload_keys(requests[0].block_hashes, 0, requests[1].namespace)
    assert tiers.locate(stolen).tolist() == [Place.NOWHERE] * 7
    statistics = {each.name: each for each in tiers.statistics().host.tenants}
    assert sum(each.num_held_blocks for each in statistics.values()) == 7
    assert not any("salt" in name.removeprefix("salt-") for name in statistics)


def test_statistics_do_not_tell_salts() -> None:
    manager = make(FULL)
    answers(manager, "alice's salt", other="a secret")
    assert "alice's" not in str(manager.statistics())
    assert "secret" not in str(manager.statistics())
