"""How much device, host and disk memory to buy with a budget: the sizes worth a simulation.

    curves by policy ──▶ all ways to spend the budget ──▶ the best of each shape ──▶ simulated
    (one pool)           (estimated)                      (device; + host; + disk)   (measured)

An estimate takes hit rates from the curve of one pool. The device hits like a pool of its size;
device and host together like the larger of the two, because host memory also has the device's
blocks; with a disk, as if the disk had other blocks than those. The last is too optimistic if both
have the same blocks. So estimates only choose what to simulate, and the advice comes from
simulations.

A hit is worth the prefill time that it saves, minus the time of the transfer if its block comes
from below the device.

The usual policy stays unless another one saves more over the whole trace and has fewer hits in at
most half of its parts: what wins only now and then may be luck.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from kvcache.base.errors import ConfigurationError
from kvcache.simulate.regret import num_parts_behind
from kvcache.simulate.simulated_cache import SimulatedCache
from kvcache.simulate.simulation import SimulationResult

GIB = 2**30
_NUM_SHARES = 40
AS_GOOD = 0.002
"""Savings that differ by at most this share of prefill time count as equal, and so do hit rates."""


@dataclass(frozen=True)
class Prices:
    """Money per GiB; None: no such tier.

    Raises ConfigurationError for invalid values.
    """

    device: float
    host: float | None = None
    disk: float | None = None

    def __post_init__(self) -> None:
        for name, price in (("device", self.device), ("host", self.host), ("disk", self.disk)):
            if price is not None and not 0 < price < float("inf"):
                raise ConfigurationError(f"--{name}-price is {price}: give a price above 0")
        if self.disk is not None and self.host is None:
            raise ConfigurationError(
                "--disk-price without --host-price: what goes to disk comes from host memory, so "
                "price both"
            )


@dataclass(frozen=True)
class Speeds:
    """The speed of prefill and of loads, of all ranks together.

    Raises ConfigurationError for invalid values.
    """

    prefill_tokens_per_s: float = 10_000.0
    host_bytes_per_s: float = 25.0 * GIB
    disk_bytes_per_s: float = 5.0 * GIB

    def __post_init__(self) -> None:
        speeds = (self.prefill_tokens_per_s, self.host_bytes_per_s, self.disk_bytes_per_s)
        if not all(0 < speed < float("inf") for speed in speeds):
            raise ConfigurationError(
                f"speeds of {speeds[0]:g} tokens computed, {speeds[1]:g} bytes from host memory "
                f"and {speeds[2]:g} from disk a second: give numbers above 0"
            )

    def worth(self, bytes_per_token: float) -> tuple[float, float, float]:
        """Return the share of its prefill time that a hit saves on device, host and disk."""
        compute_s = 1 / self.prefill_tokens_per_s
        host_s = bytes_per_token / self.host_bytes_per_s
        disk_s = host_s + bytes_per_token / self.disk_bytes_per_s
        return 1.0, max(0.0, 1 - host_s / compute_s), max(0.0, 1 - disk_s / compute_s)


@dataclass(frozen=True)
class Memory:
    """Costs: `block_bytes` on all ranks together, prices, and the budget."""

    block_bytes: float
    prices: Prices
    budget: float

    def cost(self, cache: SimulatedCache) -> float:
        """Return the price of a cache, whose device is limited."""
        sizes = (cache.num_blocks or 0, cache.host_blocks, cache.disk_blocks)
        prices = (self.prices.device, self.prices.host or 0.0, self.prices.disk or 0.0)
        return sum(self.gib(n) * price for n, price in zip(sizes, prices, strict=True))

    def gib(self, num_blocks: int) -> float:
        """Return the size of this many blocks."""
        return num_blocks * self.block_bytes / GIB

    def most_blocks(self, price: float, money: float) -> int:
        """Return how many blocks this money buys."""
        return int(money / price * GIB / self.block_bytes)


class HitCurve:
    """Hit rate by size of one pool, interpolated linearly over the logarithm of the size."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """Use at least one point, blocks and rate."""
        self.points = tuple(sorted(points))
        self._logs = [log(num_blocks) for num_blocks, _ in self.points]

    def rate(self, num_blocks: int) -> float:
        """Return the rate: below the smallest pool it falls to 0, above the largest it is
        constant."""
        if num_blocks < 1:
            return 0.0
        least, least_rate = self.points[0]
        if num_blocks <= least:
            return least_rate * num_blocks / least
        at = log(num_blocks)
        i = bisect_left(self._logs, at)
        if i == len(self._logs):
            return self.points[-1][1]
        share = (at - self._logs[i - 1]) / (self._logs[i] - self._logs[i - 1])
        before, behind = self.points[i - 1][1], self.points[i][1]
        return before + share * (behind - before)


@dataclass(frozen=True)
class Candidate:
    """A purchase and its estimated effect. `saved` is a share of the prefill time, `hit_rate` of
    block references."""

    shape: str
    cache: SimulatedCache
    cost: float
    hit_rate: float
    saved: float


@dataclass(frozen=True)
class MeasuredCandidate:
    """A candidate and the result of its simulation."""

    candidate: Candidate
    result: SimulationResult
    saved: float


def best_candidates(
    curves: Mapping[str, HitCurve],
    memory: Memory,
    speeds: Speeds,
    tokens_per_block: int,
    least: int,
) -> list[Candidate]:
    """Return the best purchase of each shape: the one that saves most, or the cheapest of those
    that save about as much. A shape that is no better than the one with a tier less is left out.
    The device needs at least `least` blocks.

    Raises ConfigurationError if the budget does not buy those.
    """
    affordable = memory.most_blocks(memory.prices.device, memory.budget)
    if affordable < least:
        needed = memory.gib(least) * memory.prices.device
        raise ConfigurationError(
            f"a budget of {memory.budget:,.10g} buys {affordable:,} blocks of the device, the "
            f"longest request needs {least:,}: give at least {needed:,.4g}"
        )
    worth = speeds.worth(memory.block_bytes / tokens_per_block)
    estimates: dict[str, list[Candidate]] = {shape: [] for shape in SHAPES}
    for policy, curve in curves.items():
        for shape, cache in _ways(policy, memory, least, curve.points[-1][0]):
            estimates[shape].append(estimate(shape, cache, curve, memory, worth))
    chosen: list[Candidate] = []
    for ways in estimates.values():
        if not ways:
            continue
        most = max(way.saved for way in ways)
        best = min((way for way in ways if way.saved >= most - AS_GOOD), key=lambda w: w.cost)
        if not chosen or _is_better(best, chosen[-1]):
            chosen.append(best)
    return chosen


def _is_better(one: Candidate, other: Candidate) -> bool:
    """Return whether `one` saves more, or about as much for less money."""
    if one.saved > other.saved + AS_GOOD:
        return True
    return one.saved >= other.saved - AS_GOOD and one.cost < other.cost


SHAPES = ("device", "device, host", "device, host, disk")
"""The shapes of purchases, the simplest first."""


def measured(
    candidate: Candidate, result: SimulationResult, speeds: Speeds, bytes_per_token: float
) -> MeasuredCandidate:
    """Return the candidate with the savings in its simulation."""
    hits = (result.num_device_hits, result.num_host_hits, result.num_disk_hits)
    worth = speeds.worth(bytes_per_token)
    saved = sum(n * w for n, w in zip(hits, worth, strict=True)) / result.num_references
    return MeasuredCandidate(candidate, result, saved)


def choose(candidates: Sequence[MeasuredCandidate]) -> MeasuredCandidate:
    """Return the cheapest of those that save about as much as the best."""
    most = max(candidate.saved for candidate in candidates)
    return min((c for c in candidates if c.saved >= most - AS_GOOD), key=lambda c: c.candidate.cost)


def choose_policy(rivals: Sequence[MeasuredCandidate], usual: str) -> MeasuredCandidate:
    """Return which of the policies to use, simulated with the same sizes: the one that saves most
    of those that may take the place of `usual`, which is one of them. It stays if the trace is too
    short for parts."""
    (stays,) = [rival for rival in rivals if rival.result.cache.policy == usual]
    num_parts = len(stays.result.hit_rates_over_time)
    better = [
        rival
        for rival in rivals
        if num_parts
        and rival.saved > stays.saved + AS_GOOD
        and 2 * num_parts_behind(rival.result, stays.result) <= num_parts
    ]
    return max(better, key=lambda rival: rival.saved, default=stays)


def _ways(
    policy: str, memory: Memory, least: int, most: int
) -> Iterator[tuple[str, SimulatedCache]]:
    """Yield divisions of the budget, after the smallest device is paid.

    A device of `most` blocks, the end of the curves, hits all that can be hit: none is larger.
    """
    prices = memory.prices
    money = min(memory.budget, memory.gib(max(least, most)) * prices.device)
    share = money / _NUM_SHARES
    for device_shares in range(_NUM_SHARES + 1):
        num_blocks = memory.most_blocks(prices.device, device_shares * share)
        if num_blocks < least:
            following = memory.most_blocks(prices.device, (device_shares + 1) * share)
            if following <= least and device_shares < _NUM_SHARES:
                continue
            num_blocks = least
        left = money - memory.gib(num_blocks) * prices.device
        yield SHAPES[0], SimulatedCache(policy, num_blocks)
        if prices.host is None:
            continue
        for host_shares in range(1, int(left / share) + 1):
            host_blocks = min(most, memory.most_blocks(prices.host, host_shares * share))
            if not host_blocks:
                continue
            yield SHAPES[1], SimulatedCache(policy, num_blocks, host_blocks)
            if prices.disk is None:
                continue
            for disk_shares in range(1, int(left / share) - host_shares + 1):
                disk_blocks = min(most, memory.most_blocks(prices.disk, disk_shares * share))
                if disk_blocks:
                    yield SHAPES[2], SimulatedCache(policy, num_blocks, host_blocks, disk_blocks)


def estimate(
    shape: str,
    cache: SimulatedCache,
    curve: HitCurve,
    memory: Memory,
    worth: tuple[float, float, float],
) -> Candidate:
    """Return a purchase and what it saves by the curve of its policy; `worth` of a hit by tier."""
    num_blocks = cache.num_blocks or 0
    upper = max(num_blocks, cache.host_blocks)
    device = curve.rate(num_blocks)
    with_host = curve.rate(upper)
    with_disk = curve.rate(upper + cache.disk_blocks)
    saved = device * worth[0] + (with_host - device) * worth[1] + (with_disk - with_host) * worth[2]
    return Candidate(shape, cache, memory.cost(cache), with_disk, saved)
