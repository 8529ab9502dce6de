"""Tenants' guarantees, in configurations and in blocks; and invalid guarantees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from kvcache.base.errors import ConfigurationError, MalformedMessageError
from kvcache.config import load_config, parse_config
from kvcache.config.tenants import TenantsConfig
from kvcache.recorder.manager_config import ManagerConfig
from kvcache.tenants import TierShares
from tests.recorder.recorded_life import manager_config_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def tenants(**values: Any) -> TenantsConfig:
    return TenantsConfig.model_validate(values)


def shares(num_blocks: int, tier: str = "device", **values: Any) -> TierShares:
    return TierShares.of(tenants(**values), tier, num_blocks)


def test_a_share_is_of_every_tier_and_blocks_are_of_the_device() -> None:
    config = tenants(
        named={
            "a": {"guaranteed": 0.29, "limit": 0.5, "max_pinned": 7},
            "b": {"guaranteed": 30},
            "c": {"guaranteed": {"host": 0.25, "disk": 10}, "limit": {"disk": 20}, "weight": 2},
        }
    )
    a, b, c = (TierShares.of(config, "device", 100).named[name] for name in "abc")
    assert (a.guaranteed_blocks, a.limit_blocks, a.max_pinned_blocks) == (29, 50, 7)
    assert (b.guaranteed_blocks, b.limit_blocks, b.max_pinned_blocks) == (30, 100, 100)
    assert (c.guaranteed_blocks, c.limit_blocks, c.weight) == (0, 100, 2.0)
    host = TierShares.of(config, "host", 40).named
    assert [host[name].guaranteed_blocks for name in "abc"] == [11, 0, 10]
    disk = TierShares.of(config, "disk", 1000).named
    assert [disk[name].limit_blocks for name in "abc"] == [500, 1000, 20]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"named": {"a": {"guaranteed": 0.6}, "b": {"guaranteed": 0.5}}},
            "guaranteed shares of the device tier add up to 1.1 ('a': 0.6, 'b': 0.5): lower them "
            "to 1.0 or less together",
        ),
        (
            {"named": {"a": {"guaranteed": 0.5, "limit": 0.4}}},
            "limit is 0.4 and guaranteed 0.5 of the device tier: raise the limit, or guarantee "
            "less",
        ),
        (
            {"named": {"a": {"limit": 0}}},
            "limit is 0 of the device tier, so that no request would ever run: raise it",
        ),
        (
            {"default": {"guaranteed": 0.1}},
            "default.guaranteed is 0.1 of the device tier, but it is not known how many tenants "
            "there will be: name those that are guaranteed something",
        ),
        ({"named": {"a": {"weight": 0}}}, "Input should be greater than 0"),
        ({"named": {"a": {"weight": -1.0}}}, "Input should be greater than 0"),
        ({"named": {"a": {"weight": float("nan")}}}, "Input should be a finite number"),
        ({"named": {"a": {"guaranted": 0.1}}}, "Extra inputs are not permitted"),
        ({"by": "user"}, "Input should be 'tenant' or 'salt'"),
        (
            {"named": {"x" * 300: {}}},
            "has a name of 300 characters: use 1 to 256",
        ),
        (
            {"named": {str(i): {} for i in range(1025)}},
            "1025 tenants are named, at most 1024 can be: leave those out that get what the "
            "default says",
        ),
    ],
)
def test_promises_that_cannot_be_meant_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, ValidationError)) as raised:
        tenants(**values)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("num_blocks", "values", "message"),
    [
        (
            100,
            {"named": {"a": {"guaranteed": 60}, "b": {"guaranteed": 0.5}}},
            "110 blocks of the device tier are guaranteed ('a': 60, 'b': 50), it has 100: "
            "guarantee less, or enlarge it",
        ),
        (
            9,
            {"named": {"a": {"guaranteed": 0.1}}},
            "tenant 'a' is guaranteed 0.1 of the 9 blocks of the device tier, which is less than "
            "one: guarantee more, or nothing",
        ),
        (
            100,
            {"named": {"a": {"guaranteed": 0.5, "limit": 40}}},
            "tenant 'a' may have 40 of the 100 blocks of the device tier, and is guaranteed 50: "
            "raise its limit to at least 50, or guarantee less",
        ),
        (
            9,
            {"default": {"limit": 0.1}},
            "every other tenant may have 0 of the 9 blocks of the device tier, and is guaranteed "
            "0: raise its limit to at least 1, or guarantee less",
        ),
    ],
)
def test_promises_that_so_many_blocks_cannot_keep_are_refused(
    num_blocks: int, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        shares(num_blocks, **values)
    assert str(raised.value) == message


def test_salts_are_not_shown() -> None:
    by_salt = shares(10, by="salt")
    assert by_salt.shown_name("secret").startswith("salt-")
    assert "secret" not in by_salt.shown_name("secret")
    assert shares(10).shown_name("alice") == "alice"


@pytest.mark.parametrize(
    ("alice", "message"),
    [
        ({"guaranted": 0.1}, "guaranted: 0.1: there is no such key: did you mean guaranteed?"),
        (
            {"guaranteed": -0.1},
            "guaranteed: -0.1 is not an amount: write a share from 0.0 to 1.0, with a point, or a "
            "whole number of blocks",
        ),
        (
            {"limit": {"host": "half"}},
            "limit: 'half' is not an amount: write a share from 0.0 to 1.0, with a point, or a "
            "whole number of blocks",
        ),
        ({"limit": {"gpu": 1}}, "limit: there is no tier 'gpu': use device, host, disk"),
        ({"weight": -2}, "weight: -2: must be more than 0.0"),
    ],
)
def test_a_file_is_refused_with_the_key_the_value_and_what_helps(
    alice: dict[str, Any], message: str
) -> None:
    config = load_config(CONFIGS / "cpu_tenants.yaml").model_dump()
    config["tenants"] = {"named": {"alice": alice}}
    with pytest.raises(ConfigurationError) as raised:
        parse_config(config, "file")
    assert str(raised.value) == f"file: tenants.named.alice.{message}"


def test_a_recording_keeps_the_tenants_of_its_manager() -> None:
    config = load_config(CONFIGS / "cpu_tenants.yaml").tenants
    manager_config = replace(manager_config_of("full"), tenants=config)
    again = ManagerConfig.from_dict(msgpack.unpackb(msgpack.packb(manager_config.to_dict())))
    assert again == manager_config
    old = {key: value for key, value in manager_config.to_dict().items() if key != "tenants"}
    assert ManagerConfig.from_dict(old).tenants is None
    broken = {**manager_config.to_dict(), "tenants": {"named": {"a": {"weight": 0}}}}
    with pytest.raises(MalformedMessageError, match="no plan or tenants of a manager"):
        ManagerConfig.from_dict(broken)
