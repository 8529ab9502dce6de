"""Tenants that share a pool and its tiers: what each is sure of, has and may take.

TenantsConfig ─▶ TierShares ─▶ TenantLedger ◀── pools and tiers say what is taken and freed
                                    ▲
                               TenantPolicy ◀── and ask it what goes: a policy per tenant
"""

from __future__ import annotations

from kvcache.tenants.account import TenantAccount, TenantStatistics
from kvcache.tenants.ledger import TenantLedger
from kvcache.tenants.policy import TenantBook, TenantPolicy
from kvcache.tenants.shares import TenantShare, TierShares

__all__ = [
    "TenantAccount",
    "TenantBook",
    "TenantLedger",
    "TenantPolicy",
    "TenantShare",
    "TenantStatistics",
    "TierShares",
]
