"""The cache of a simulation: policy, sizes of its tiers, kinds of layers, pace of requests.

The options of `simulation.py`, checked as far as possible before a trace is played.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.base.errors import ConfigurationError
from kvcache.policies.registry import EVICTION_POLICIES, require_eviction_policy
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.hinting import NO_HINTS, require_hints, require_known
from kvcache.simulate.running_counting import Pace, require_room_for_answers
from kvcache.specs import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

OPTIMUM = "optimum"
"""The name of the optimum in place of a policy's."""


@dataclass(frozen=True)
class SimulatedCache:
    """A cache to simulate: sizes in blocks, `num_blocks` None for as many as are ever needed.

    With `groups` of a model, blocks are theirs, and hits are counted in tokens. With a `pace`,
    requests run concurrently, including their answers. `hints` is one of `KINDS_OF_HINTS`.

    Raises ConfigurationError for invalid values.
    """

    policy: str
    num_blocks: int | None
    host_blocks: int = 0
    disk_blocks: int = 0
    groups: tuple[KVCacheGroupSpec, ...] = ()
    pace: Pace | None = None
    hints: str = NO_HINTS

    def __post_init__(self) -> None:
        require_hints(self.hints)
        if self.hints != NO_HINTS and (self.host_blocks or self.pace is not None):
            raise ConfigurationError(
                f"hints {self.hints} with tiers, or with requests that run side by side: hints are "
                "simulated on the device alone, one request after another"
            )
        if self.policy != OPTIMUM:
            require_eviction_policy(self.policy)
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigurationError(
                f"a cache of {self.num_blocks} blocks cannot serve anything: give at least 1"
            )
        if min(self.host_blocks, self.disk_blocks) < 0:
            raise ConfigurationError(
                f"tiers of {self.host_blocks} and {self.disk_blocks} blocks: give at least 0"
            )
        if self.disk_blocks and not self.host_blocks:
            raise ConfigurationError(
                f"{self.disk_blocks} blocks on disk, none in host memory: what goes to disk comes "
                "from there, so give host blocks too"
            )
        if self.host_blocks and self.num_blocks is None:
            raise ConfigurationError(
                "a device without a limit needs no tiers: give its number of blocks"
            )
        unserved = sorted(
            {
                group.kv_cache_spec.kind
                for group in self.groups
                if not group.kv_cache_spec.can_prefix_cache
            }
        )
        if unserved and self.host_blocks:
            raise ConfigurationError(
                f"tiers cannot serve groups of kind {unserved}, whose blocks no other request can "
                "use: simulate the device alone"
            )
        if self.pace is not None and self.policy == OPTIMUM:
            raise ConfigurationError(
                "the optimum of requests that run side by side is not known: leave one of them out"
            )
        if self.pace is not None and self.num_blocks is None:
            raise ConfigurationError(
                "requests that run side by side without a limit of blocks: give their number"
            )

    @property
    def label(self) -> str:
        """Its policy, with the hints that it gets."""
        return self.policy if self.hints == NO_HINTS else f"{self.policy}, {self.hints} hints"

    @property
    def total_blocks(self) -> int | None:
        """Blocks of all tiers together; None for no limit."""
        if self.num_blocks is None:
            return None
        return self.num_blocks + self.host_blocks + self.disk_blocks

    def require_room(self, trace: BlockTrace) -> None:
        """Raise an error that names the line if a request does not fit: ConfigurationError for a
        prompt, OutOfBlocksError for it with its answer. With `groups`, only playing shows it. Raise
        ConfigurationError, too, if the trace lacks what the hints need."""
        require_known(trace, self.hints)
        if self.num_blocks is None or self.groups:
            return
        if trace.most_blocks <= self.num_blocks:
            if self.pace is not None:
                require_room_for_answers(trace, self.num_blocks)
            return
        raise ConfigurationError(
            f"{trace.place_of(trace.longest)}: the request needs {trace.most_blocks} blocks of "
            f"{trace.block_size} tokens, more than the {self.num_blocks} of the device: simulate "
            f"at least {trace.most_blocks}"
        )


def window_groups(block_size: int, window_tokens: int) -> tuple[KVCacheGroupSpec, ...]:
    """Return the groups of a model with full attention and a sliding window, in equal shares.

    Raises ConfigurationError for an invalid window.
    """
    full = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1)
    window = SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, sliding_window=window_tokens
    )
    return KVCacheGroupSpec(("layer.0",), full), KVCacheGroupSpec(("layer.1",), window)


def all_policies() -> tuple[str, ...]:
    """Return the names of all policies, sorted, without the optimum."""
    return tuple(sorted(EVICTION_POLICIES))
