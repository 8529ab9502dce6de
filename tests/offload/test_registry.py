"""Tiers by name, and what cannot be meant."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvcache.errors import ConfigurationError
from kvcache.offload import (
    TIERS,
    Deadlines,
    HierarchyOptions,
    HostLoadStoreSpec,
    LabelShape,
    TierManager,
    TierOptions,
    make_offload_key,
    make_tier,
)
from kvcache.policies import EVICTION_POLICIES, PolicyFactory

KEY = make_offload_key(b"digest", 0)


def test_an_unknown_tier_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_tier(TierOptions("tape", 4))
    assert str(caught.value) == "unknown tier 'tape': choose one of file, host"


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_tier(TierOptions("host", 4, policy="random"))
    assert str(caught.value) == (
        f"unknown eviction policy 'random': choose one of {', '.join(sorted(EVICTION_POLICIES))}"
    )


def test_a_tier_from_outside_is_made_by_its_name() -> None:
    made = []

    def tape(options: TierOptions, policies: Mapping[str, PolicyFactory]) -> TierManager:
        made.append(options)
        return TierManager(options, policies)

    tier = make_tier(TierOptions("tape", 4), {**TIERS, "tape": tape})
    assert (tier.medium, made) == ("tape", [TierOptions("tape", 4)])
    policies = {"mine": EVICTION_POLICIES["lru"]}
    assert make_tier(TierOptions("host", 4, policy="mine"), policies=policies).num_free_slots == 4


def test_host_and_files_say_in_their_own_way_where_keys_lie() -> None:
    for medium in ("host", "file"):
        tier = make_tier(TierOptions(medium, 2))
        prepared = tier.prepare_store([KEY])
        assert prepared is not None
        assert prepared.keys_to_store == (KEY,)
        assert prepared.store_spec.medium() == medium
        assert isinstance(prepared.store_spec, HostLoadStoreSpec) == (medium == "host")


@pytest.mark.parametrize(("slots", "blocks"), [(0, 1), (1, 0), (2**30, 2)])
def test_sizes_that_cannot_be_meant_are_refused(slots: int, blocks: int) -> None:
    with pytest.raises(ConfigurationError, match=f"a tier of {slots} slots of {blocks} blocks"):
        make_tier(TierOptions("host", slots, blocks_per_slot=blocks))


def test_settings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="store threshold 0 with room for"):
        make_tier(TierOptions("host", 4, store_after=0))
    with pytest.raises(ConfigurationError, match="digests of 0 bytes"):
        LabelShape(0, 16)
    with pytest.raises(ConfigurationError, match=r"deadline of 0\.0 s for a spill"):
        Deadlines(spill_s=0.0)
    with pytest.raises(ConfigurationError, match=r"spare_share is 1\.5: give 0\.0 to 1\.0"):
        HierarchyOptions(spare_share=1.5)
    with pytest.raises(ConfigurationError, match="at most 0 blocks spilled"):
        HierarchyOptions(max_spilling_blocks=0)
