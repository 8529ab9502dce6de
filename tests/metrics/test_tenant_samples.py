"""Statistics of tenants: the first ones by name, the others together."""

from __future__ import annotations

from kvcache.metrics import declarations as known
from kvcache.metrics.samples import TenantLabels, tenant_samples
from kvcache.tenants import TenantStatistics


def tenant(name: str, held: int, asked: int, tier: str = "device") -> TenantStatistics:
    return TenantStatistics(name, tier, 0, 100, 1.0, held, 1, 0, asked, 5, 2, 0, 3, "")


def values(labels: TenantLabels, *tenants: TenantStatistics) -> dict[tuple[object, ...], float]:
    samples = list(tenant_samples("x", tenants, labels))
    assert all(len(s.labels) == len(s.metric.labels) for s in samples)
    return {(s.metric, *s.labels[1:]): s.value for s in samples}


def test_tenants_beyond_the_bound_are_added_up() -> None:
    labels = TenantLabels(2)
    found = values(labels, tenant("a", 10, 7), tenant("b", 20, 8), tenant("c", 30, 9))
    found_later = values(labels, tenant("d", 5, 1), tenant("c", 30, 9), tenant("a", 11, 7))
    assert found[known.TENANT_BLOCKS, "a", "device", "held"] == 10
    assert found[known.TENANT_BLOCKS, "other", "device", "held"] == 30
    assert found[known.TENANT_QUERIED_TOKENS, "b"] == 8
    assert found_later[known.TENANT_BLOCKS, "other", "device", "held"] == 35
    assert found_later[known.TENANT_REFUSALS, "other", "device"] == 6
    assert found_later[known.TENANT_BLOCKS, "a", "device", "held"] == 11


def test_what_tiers_were_asked_for_is_apart_from_the_device() -> None:
    tiers = [tenant("a", 10, 90), tenant("a", 10, 70, "host"), tenant("a", 10, 30, "disk")]
    found = values(TenantLabels(1), *tiers, tenant("b", 1, 8, "disk"))
    assert found[known.TENANT_QUERIED_TOKENS, "a"] == 90
    assert found[known.TENANT_HIT_TOKENS, "a"] == 5
    assert found[known.TENANT_TIER_QUERIED_TOKENS, "a", "host"] == 70
    assert found[known.TENANT_TIER_QUERIED_TOKENS, "a", "disk"] == 30
    assert found[known.TENANT_TIER_HIT_TOKENS, "a", "host"] == 5
    assert found[known.TENANT_TIER_QUERIED_TOKENS, "other", "disk"] == 8
    assert (known.TENANT_QUERIED_TOKENS, "other") not in found


def test_no_tenant_has_a_label_where_none_may() -> None:
    found = values(TenantLabels(0), tenant("a", 10, 7))
    assert {key[1] for key in found} == {"other"}
