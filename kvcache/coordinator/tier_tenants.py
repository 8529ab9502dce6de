"""The tenants of stored blocks; and the queried tokens and hits of tenants in tiers, counted once
per request at its admission.

    tokens of a request    |  hit on the device   | loaded: host memory | loaded: disk | computed |
    asked of the device    |-------------------------- all of them ------------------------------|
    asked of host memory                          |----------------------------------------------|
    asked of the disk                                                   |------------------------|

Prefix loading knows which tokens were loaded for which request. A request that comes back after a
preemption, or does not read the cache, is not counted, as on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvcache.base.arrays import IndexArray
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.protocol.commands import Label
from kvcache.requests.request import Request
from kvcache.requests.request_content import Namespace, parse_namespace_name
from kvcache.tenants import TenantLedger


class LoadedTokens(NamedTuple):
    """Tokens loaded for one request, and how many of them came from files."""

    num_loaded: int = 0
    num_fetched: int = 0


NOTHING_LOADED = LoadedTokens()


def count_for_tenant(
    tiers: TierHierarchy, request: Request, num_hit_tokens: int, loaded: LoadedTokens
) -> None:
    """Add an admitted request to the statistics of its tenant in each tier, if there are tenants.

    `num_hit_tokens` are its hits at admission, including `loaded` tokens.
    """
    host = tiers.host.tenants
    if host is None or request.num_preemptions or request.skip_reading_prefix_cache:
        return
    num_loaded = min(loaded.num_loaded, num_hit_tokens)
    num_fetched = min(loaded.num_fetched, num_loaded)
    num_asked = request.num_tokens - (num_hit_tokens - num_loaded)
    account = host.account(request.namespace)
    account.num_asked_tokens += num_asked
    account.num_hit_tokens += num_loaded - num_fetched
    disk = None if tiers.disk is None else tiers.disk.tenants
    if disk is not None:
        account = disk.account(request.namespace)
        account.num_asked_tokens += num_asked - (num_loaded - num_fetched)
        account.num_hit_tokens += num_fetched


def rows_by_tenant(
    labels: Label, tenants: TenantLedger | None
) -> Iterator[tuple[IndexArray, Namespace | None]]:
    """Yield, for each tenant, its rows in ascending order, and a namespace of the tenant.

    Without tenants, all rows at once.
    """
    if tenants is None:
        yield np.arange(len(labels.block_ids)), None
        return
    found = [parse_namespace_name(name) for name in labels.namespace_names]
    owners = [tenants.shares.name_in(namespace) for namespace in found]
    of_tenant = {owner: number for number, owner in reversed(list(enumerate(owners)))}
    firsts = np.array([of_tenant[owner] for owner in owners])[labels.namespaces]
    for first in np.unique(firsts).tolist():
        yield np.flatnonzero(firsts == first), found[first]
