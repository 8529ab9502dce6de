"""Which traces were typed, and in what sizes: read, checked, and made into arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.base.errors import ConfigurationError
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.opening import open_block_trace

UNLIMITED = "unlimited"

_STEPS = (1, 2, 5)
_MOST_CAPACITIES = 9


@dataclass(frozen=True)
class TraceChoices:
    """What was typed of traces."""

    names: tuple[str, ...]
    seed: int = 0
    limit: int | None = None
    block_size: int | None = None

    def read(self) -> list[BlockTrace]:
        """Return all traces, each once, under names that tell them apart. Raises TraceError."""
        names = list(dict.fromkeys(self.names))
        traces = [
            open_block_trace(name, limit=self.limit, seed=self.seed, block_size=self.block_size)
            for name in names
        ]
        uses = Counter(trace.name for trace in traces)
        return [
            replace(trace, name=name) if uses[trace.name] > 1 else trace
            for name, trace in zip(names, traces, strict=True)
        ]


def parse_capacity(text: str) -> int | None:
    """Return the capacity that was typed; None for unlimited. Raises ConfigurationError."""
    if text == UNLIMITED:
        return None
    digits = text.replace("_", "").replace(",", "")
    if not (digits.isascii() and digits.isdigit() and int(digits)):
        raise ConfigurationError(
            f"--blocks {text!r} is no capacity: give a number of at least 1, or {UNLIMITED}"
        )
    return int(digits)


def capacity_range(traces: Sequence[BlockTrace]) -> list[int]:
    """Return capacities worth a look: 1, 2, 5, 10, ... from the longest request on, until all
    blocks fit; the largest ones where they are many."""
    least = max(trace.most_blocks for trace in traces)
    enough = max(trace.num_distinct_blocks for trace in traces)
    capacities: list[int] = []
    power = 1
    while not capacities or capacities[-1] < enough:
        capacities.extend(step * power for step in _STEPS if step * power >= least)
        power *= 10
    while len(capacities) > 1 and capacities[-2] >= enough:
        capacities.pop()
    return capacities[-_MOST_CAPACITIES:]


def capacity_text(num_blocks: int | None) -> str:
    """Return a capacity for people."""
    return UNLIMITED if num_blocks is None else f"{num_blocks:,}"
