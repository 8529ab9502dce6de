"""Tenants of a cluster: what each is guaranteed, and how much it may take.

One section of `ClusterConfig`. Refuses guarantees that contradict each other; `kvcache.tenants`
checks those that depend on the size of a pool.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from kvcache.base.errors import ConfigurationError, shown
from kvcache.config.sections import MAX_COUNT, Real, Section

TIERS = ("device", "host", "disk")
MAX_NAME_CHARACTERS = 256
MAX_NAMED_TENANTS = 1024


def require_amount(value: object) -> int | float:
    """Return `value`; raises ConfigurationError unless it is a share or a number of blocks."""
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return value
    if type(value) is float and 0.0 <= value <= 1.0:
        return value
    raise ConfigurationError(
        f"{shown(value)} is not an amount: write a share from 0.0 to 1.0, with a point, or a whole "
        "number of blocks"
    )


Amount: TypeAlias = Annotated[int | float, BeforeValidator(require_amount)]
"""A share of a tier, with a decimal point (`0.25`, `1.0`), or a number of blocks (`400`)."""


class TierAmounts(Section):
    """One amount for each tier. None: the field's default."""

    device: Amount | None = None
    host: Amount | None = None
    disk: Amount | None = None


def require_amounts(value: object) -> int | float | TierAmounts:
    """Return one amount, or one for each tier of a section; raises ConfigurationError."""
    if isinstance(value, TierAmounts):
        return value
    if not isinstance(value, dict):
        return require_amount(value)
    unknown = [key for key in value if key not in TIERS]
    if unknown:
        raise ConfigurationError(f"there is no tier {shown(unknown[0])}: use {', '.join(TIERS)}")
    amounts = {tier: value.get(tier) for tier in TIERS}
    return TierAmounts(**{t: None if a is None else require_amount(a) for t, a in amounts.items()})


Amounts: TypeAlias = Annotated[int | float | TierAmounts, BeforeValidator(require_amounts)]
"""One amount, or one for each tier."""


def _in_tier(amount: int | float | TierAmounts, tier: str, default: int | float) -> int | float:
    if isinstance(amount, TierAmounts):
        value: int | float | None = getattr(amount, tier)
        return default if value is None else value
    if isinstance(amount, int) and tier != "device":
        return default
    return amount


class TenantConfig(Section):
    """The part of one tenant.

    `guaranteed`: blocks that other tenants' running requests cannot take, and whose cached contents
    are not evicted for others. `limit`: the most blocks it may have, running and cached together.
    `max_pinned`: the most device blocks that it may pin. Tenants share the rest by `weight`. A
    share alone applies to every tier, a number of blocks alone to the device.

    A limit is above 0, and not below the guarantee of the same tier. A guaranteed share that is
    less than one block is refused when the size of the pool is known.
    """

    guaranteed: Amounts = 0
    limit: Amounts = 1.0
    max_pinned: Amount = 1.0
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False), Real] = 1.0

    @model_validator(mode="after")
    def _limits_hold_guarantees(self) -> TenantConfig:
        for tier in TIERS:
            guaranteed, limit = self.guaranteed_in(tier), self.limit_in(tier)
            if type(guaranteed) is type(limit) and limit < guaranteed:
                raise ConfigurationError(
                    f"limit is {limit} and guaranteed {guaranteed} of the {tier} tier: raise the "
                    "limit, or guarantee less"
                )
            if limit == 0:
                raise ConfigurationError(
                    f"limit is {limit} of the {tier} tier, so that no request would ever run: "
                    "raise it"
                )
        return self

    def guaranteed_in(self, tier: str) -> int | float:
        return _in_tier(self.guaranteed, tier, 0)

    def limit_in(self, tier: str) -> int | float:
        """Return the most blocks of a tier."""
        return _in_tier(self.limit, tier, 1.0)


class TenantsConfig(Section):
    """How tenants are told apart, and the part of each.

    `by` tells tenants apart by a request's `tenant` or by its `cache_salt`. `named` are tenants
    with a part of their own. Every other tenant has a `default` part; so do requests without a
    tenant.

    `named` has at most 1024 entries, of 1 to 256 characters each. Guaranteed shares may add up to
    1.0 in each tier. All guarantees together must not exceed the tier, which is checked when its
    size is known. `default` guarantees nothing, because the number of tenants is not known.
    """

    by: Literal["tenant", "salt"] = "tenant"
    default: TenantConfig = TenantConfig()
    named: dict[str, TenantConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_be_kept(self) -> TenantsConfig:
        if len(self.named) > MAX_NAMED_TENANTS:
            raise ConfigurationError(
                f"{len(self.named)} tenants are named, at most {MAX_NAMED_TENANTS} can be: leave "
                "those out that get what the default says"
            )
        for name in self.named:
            if not 0 < len(name) <= MAX_NAME_CHARACTERS:
                raise ConfigurationError(
                    f"tenant {shown(name)} has a name of {len(name)} characters: use 1 to "
                    f"{MAX_NAME_CHARACTERS}"
                )
        for tier in TIERS:
            if self.default.guaranteed_in(tier):
                raise ConfigurationError(
                    f"default.guaranteed is {self.default.guaranteed_in(tier)} of the {tier} tier, "
                    "but it is not known how many tenants there will be: name those that are "
                    "guaranteed something"
                )
            self._require_shares(tier)
        return self

    def _require_shares(self, tier: str) -> None:
        shares = {
            name: amount
            for name, tenant in self.named.items()
            if isinstance(amount := tenant.guaranteed_in(tier), float)
        }
        if sum(shares.values()) > 1 + 1e-9:
            listed = ", ".join(f"{shown(name)}: {share}" for name, share in shares.items())
            raise ConfigurationError(
                f"guaranteed shares of the {tier} tier add up to {sum(shares.values()):g} "
                f"({listed}): lower them to 1.0 or less together"
            )
