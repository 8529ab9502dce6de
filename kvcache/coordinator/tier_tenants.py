"""What tenants asked the tiers for, and got: counted once per request, when it is admitted.

    tokens of a request    |  hit on the device   | loaded: host memory | loaded: disk | computed |
    asked of the device    |-------------------------- all of them ------------------------------|
    asked of host memory                          |----------------------------------------------|
    asked of the disk                                                   |------------------------|

Beside the prefix loading, which knows what came up for whom. Whoever comes back after a preemption,
or does not read the cache, is not counted, as on the device. Refuses to know what lies where.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcache.offload.hierarchy import TierHierarchy
from kvcache.request import Request


class LoadedTokens(NamedTuple):
    """What was loaded on behalf of one request, and how much of that came from files."""

    num_loaded: int = 0
    num_fetched: int = 0


NOTHING_LOADED = LoadedTokens()


def count_for_tenant(
    tiers: TierHierarchy, request: Request, num_hit_tokens: int, loaded: LoadedTokens
) -> None:
    """Add an admitted request to the figures of its tenant in each tier, if there are tenants.

    `num_hit_tokens` are those that it found when it was admitted, `loaded` among them.
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
