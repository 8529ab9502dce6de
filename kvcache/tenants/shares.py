"""The tenants' shares of one tier, in blocks.

Made from the configuration's amounts for the ledger. Refuses guarantees that do not fit the tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256

from kvcache.base.errors import ConfigurationError, shown
from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.requests.request_content import Namespace

DEVICE_TIER = "device"
"""Name of the device tier."""

UNNAMED_TENANT = ""
"""Name of the tenant of requests without one."""

_SHOWN_CHARACTERS = 12


@dataclass(frozen=True)
class TenantShare:
    """The amounts of one tenant: see `TenantConfig`."""

    guaranteed_blocks: int
    limit_blocks: int
    max_pinned_blocks: int
    weight: float


@dataclass(frozen=True)
class TierShares:
    """The amounts of every tenant in a tier of `num_blocks` blocks."""

    tier: str
    num_blocks: int
    by_salt: bool
    named: Mapping[str, TenantShare]
    default: TenantShare

    @classmethod
    def of(
        cls, config: TenantsConfig, tier: str, num_blocks: int, blocks_per_slot: int = 1
    ) -> TierShares:
        """Return the shares of a tier of `num_blocks`.

        If a tier's slots have several blocks, slots are counted: `num_blocks` and all statistics
        are then in slots.

        Raises:
            ConfigurationError: more is guaranteed than there is, a guarantee is less than a block,
                or a limit less than a block or than the guarantee.
        """
        named = {
            name: _share(f"tenant {shown(name)}", tenant, tier, num_blocks, blocks_per_slot)
            for name, tenant in config.named.items()
        }
        total = sum(share.guaranteed_blocks for share in named.values())
        if total > num_blocks:
            listed = ", ".join(f"{shown(n)}: {s.guaranteed_blocks}" for n, s in named.items())
            raise ConfigurationError(
                f"{total} blocks of the {tier} tier are guaranteed ({listed}), it has "
                f"{num_blocks}: guarantee less, or enlarge it"
            )
        default = _share("every other tenant", config.default, tier, num_blocks, blocks_per_slot)
        return cls(tier, num_blocks, config.by == "salt", named, default)

    def name_in(self, namespace: Namespace) -> str:
        name = namespace.salt if self.by_salt else namespace.tenant
        return UNNAMED_TENANT if name is None else name

    def share_of(self, name: str) -> TenantShare:
        return self.named.get(name, self.default)

    def shown_name(self, name: str) -> str:
        """Return a tenant's name for statistics: a salt is a secret, and shown as its hash."""
        if not self.by_salt or not name:
            return name
        return "salt-" + sha256(name.encode()).hexdigest()[:_SHOWN_CHARACTERS]


def _share(
    whose: str, tenant: TenantConfig, tier: str, num_blocks: int, blocks_per_slot: int
) -> TenantShare:
    guaranteed = _blocks(tenant.guaranteed_in(tier), num_blocks, blocks_per_slot)
    limit = min(_blocks(tenant.limit_in(tier), num_blocks, blocks_per_slot), num_blocks)
    if tenant.guaranteed_in(tier) and not guaranteed:
        raise ConfigurationError(
            f"{whose} is guaranteed {tenant.guaranteed_in(tier)} of the {num_blocks} blocks of the "
            f"{tier} tier, which is less than one: guarantee more, or nothing"
        )
    if limit < max(1, guaranteed):
        raise ConfigurationError(
            f"{whose} may have {limit} of the {num_blocks} blocks of the {tier} tier, and is "
            f"guaranteed {guaranteed}: raise its limit to at least {max(1, guaranteed)}, or "
            "guarantee less"
        )
    pinned = min(_blocks(tenant.max_pinned, num_blocks), num_blocks)
    return TenantShare(guaranteed, limit, pinned, tenant.weight)


def _blocks(amount: int | float, num_blocks: int, blocks_per_slot: int = 1) -> int:
    if isinstance(amount, int):
        return amount // blocks_per_slot
    # By decimal digits: 0.29 of 100 blocks are 29, which 0.29 * 100 in floats is not.
    return int(Fraction(str(amount)) * num_blocks)
