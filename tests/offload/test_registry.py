"""Tiers by name, and invalid options."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvcache.base.errors import ConfigurationError
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
    assert (
        make_tier(TierOptions("host", 4, policy="mine"), policies=policies)
        .statistics()
        .num_free_slots
        == 4
    )


def test_host_and_files_say_in_their_own_way_where_keys_lie() -> None:
    for medium in ("host", "file"):
        tier = make_tier(TierOptions(medium, 2))
        prepared = tier.prepare_store([KEY])
        assert prepared.keys_to_store == (KEY,)
        assert prepared.store_spec.medium() == medium
        assert isinstance(prepared.store_spec, HostLoadStoreSpec) == (medium == "host")


@pytest.mark.parametrize(
    ("slots", "blocks", "problem"),
    [
        (0, 1, "a tier of 0 slots of 1 blocks"),
        (-1, 1, "num_slots is -1"),
        (1, 0, "blocks_per_slot is 0"),
        (2**30, 2, f"a tier of {2**30} slots of 2 blocks"),
    ],
)
def test_sizes_that_cannot_be_meant_are_refused(slots: int, blocks: int, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        make_tier(TierOptions("host", slots, blocks_per_slot=blocks))


def test_settings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="store_after is 0"):
        make_tier(TierOptions("host", 4, store_after=0))
    with pytest.raises(ConfigurationError, match="digest_bytes is 0"):
        LabelShape(0, 16)
    with pytest.raises(ConfigurationError, match=r"spill_s is 0\.0: pass a number above 0"):
        Deadlines(spill_s=0.0)
    with pytest.raises(ConfigurationError, match=r"spare_share is 1\.5: pass a number"):
        HierarchyOptions(spare_share=1.5)
    with pytest.raises(ConfigurationError, match="max_spilling_blocks is 0"):
        HierarchyOptions(max_spilling_blocks=0)
