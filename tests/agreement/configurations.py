"""The models of the agreement suite, by their KV cache groups, and the operations of a walk.

`CONFIGURATIONS` is the one list to change: a configuration names its groups and the operations that
it allows. `DENSE` are the same models in small pools, where rare errors become frequent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.specs import KVCacheSpec
from tests.core.builders import chunked, cross, full, mamba, mla, window


class Operation(Enum):
    """Operations of a walk in addition to admitting, running and freeing requests."""

    CALLS = "per-request calls"
    STEPS = "batched steps"
    CLIENTS = "two clients"
    PIPELINE = "completed_step lags behind"
    FAILURES = "failed_step"
    PREEMPTION = "preempted, and resumed"
    DRAFTS = "accepted and rejected drafts"
    LOOKAHEAD = "lookahead tokens"
    EXTERNAL = "external tokens"
    ENCODER = "encoder tokens"
    DELAYED_CACHING = "delay_cache_blocks, cache_blocks"
    FORGET_HASHES = "free_block_hashes"
    SKIPPED_READING = "skip_reading_prefix_cache"
    FORKS = "forks, by calls and in steps"
    DELAYED_FORKS = "forks of what is not cached yet"
    PINS = "pin_prefix, unpin_prefix, pins that run out"
    EVICTIONS = "evict_blocks"
    RESETS = "reset_prefix_cache"
    DRAINS = "reset_prefix_cache(drain=True)"
    NEW_WEIGHTS = "begin_model_epoch"
    NAMESPACES = "salt, LoRA, tenant"
    IMAGES = "multimodal items"
    MISTAKES = "calls that are refused"
    HINTS = "hints, by calls and in steps"


class Family(Enum):
    """The size of the pool: so large that nothing is evicted, or so small that blocks are evicted
    and requests find no room."""

    ROOM = "room"
    PRESSURE = "pressure"


TENANTS = TenantsConfig(
    named={"t": TenantConfig(guaranteed=0.3, limit=0.8)},
    default=TenantConfig(limit=0.9, max_pinned=0.3, weight=2.5),
)

EVERYTHING = frozenset(Operation) - {Operation.ENCODER, Operation.HINTS}
HINTED = EVERYTHING | {Operation.HINTS}


@dataclass(frozen=True)
class Configuration:
    """A model, and the operations that it allows."""

    name: str
    specs: tuple[KVCacheSpec, ...]
    operations: frozenset[Operation] = EVERYTHING
    use_eagle: bool = False
    enable_caching: bool = True
    max_model_len: int = 72
    tenants: TenantsConfig | None = None
    factors: Mapping[Operation, float] = field(default_factory=dict, hash=False)
    """Factors for the frequencies of operations."""
    has_small_pools: bool = False

    def factor(self, operation: Operation | None) -> float:
        """Return the factor for this operation."""
        return 1.0 if operation is None else self.factors.get(operation, 1.0)

    @property
    def pools(self) -> tuple[int, ...]:
        """Sizes of the pool, in blocks, from which a walk under pressure draws one."""
        if self.has_small_pools:
            return (20, 24, 32) if len(self.specs) == 1 else (32, 40, 52)
        return (24, 40, 56) if len(self.specs) == 1 else (40, 64, 90)

    @property
    def keeps_states(self) -> bool:
        return any(spec.num_state_blocks is not None for spec in self.specs)

    @property
    def can_hit(self) -> bool:
        return self.enable_caching and all(spec.can_prefix_cache for spec in self.specs)

    @property
    def max_drafts(self) -> int:
        limits = [spec.max_draft_tokens for spec in self.specs]
        return min((limit for limit in limits if limit is not None), default=3)


CONFIGURATIONS = (
    Configuration("full", (full(4),)),
    Configuration("latent", (mla(4),)),
    Configuration("full, window", (full(4), window(9))),
    Configuration("full, two windows", (full(4), window(6), window(17))),
    Configuration("two full", (full(4), full(8))),
    Configuration("window", (window(10),)),
    Configuration("chunked", (chunked(8),)),
    Configuration("full, chunked", (full(4), chunked(8))),
    Configuration("full, states", (full(4), mamba(num_drafts=2))),
    Configuration(
        "full, window, states", (full(4), window(13, 8), mamba(block_size=16, num_drafts=2))
    ),
    Configuration("one state", (mamba("none", num_drafts=2),)),
    Configuration(
        "full, encoder",
        (full(4), cross(max_encoder_tokens=24)),
        operations=frozenset(Operation) - {Operation.HINTS},
    ),
    Configuration("EAGLE: full", (full(4),), use_eagle=True),
    Configuration("EAGLE: full, window", (full(4), window(9)), use_eagle=True),
    Configuration("tenants: full", (full(4),), tenants=TENANTS),
    Configuration("tenants: full, window", (full(4), window(9)), tenants=TENANTS),
    Configuration("hints: full", (full(4),), HINTED),
    Configuration("hints: full, window", (full(4), window(9)), HINTED),
    Configuration("hints, tenants: full", (full(4),), HINTED, tenants=TENANTS),
    Configuration("caching off", (full(4), window(9)), enable_caching=False),
)

FORKS_OFTEN = {
    Operation.DELAYED_FORKS: 20.0,
    Operation.DELAYED_CACHING: 5.0,
    Operation.FORKS: 5.0,
    Operation.FAILURES: 2.0,
    Operation.PIPELINE: 1.5,
    Operation.FORGET_HASHES: 2.0,
}
"""Parents forked before their contents are cached; forks of forks; both withdrawn."""

LOSSES_OFTEN = {
    Operation.FAILURES: 4.0,
    Operation.PREEMPTION: 3.0,
    Operation.EVICTIONS: 5.0,
    Operation.PINS: 4.0,
    Operation.RESETS: 3.0,
    Operation.DRAINS: 5.0,
    Operation.FORKS: 2.0,
    Operation.DELAYED_CACHING: 2.0,
    Operation.FORGET_HASHES: 4.0,
}
"""Contents that are dropped while requests hold them, pin them, or wait for their step."""

DENSE = tuple(
    replace(c, name=f"{name}: {c.name}", factors=factors, has_small_pools=True)
    for name, factors in (("forks", FORKS_OFTEN), ("losses", LOSSES_OFTEN))
    for c in CONFIGURATIONS
    if c.enable_caching
)
"""Every model twice more; factors apply in `Walk.operate` and `Walk.allows`."""


def configuration_named(name: str) -> Configuration:
    """Return a configuration by name."""
    return next(c for c in (*CONFIGURATIONS, *DENSE) if c.name == name)
