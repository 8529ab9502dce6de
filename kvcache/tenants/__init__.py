"""Tenants that share a pool and its tiers: guarantees, limits, and blocks in use.

TenantsConfig ─▶ TierShares ─▶ TenantLedger ◀── pools and tiers report blocks taken and freed
                                    ▲
                               TenantPolicy ◀── and ask it for victims: a policy per tenant
"""

from __future__ import annotations

from kvcache.tenants.ledger import TenantAccount, TenantLedger, TenantStatistics
from kvcache.tenants.policy import TenantEntryTable, TenantPolicy
from kvcache.tenants.shares import TenantShare, TierShares

__all__ = [
    "TenantAccount",
    "TenantEntryTable",
    "TenantLedger",
    "TenantPolicy",
    "TenantShare",
    "TenantStatistics",
    "TierShares",
]
