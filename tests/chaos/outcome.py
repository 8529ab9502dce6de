"""The results of schedules, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcache.replay.report import ReplayReport


@dataclass
class Outcome:
    """Sums over one schedule or many. `deeds`: faults that really happened to processes."""

    deeds: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    num_returns: int = 0
    num_epochs: int = 0
    num_hit_tokens: int = 0
    bytes_checked: int = 0

    def count(self, report: ReplayReport) -> None:
        """Add a game."""
        self.num_requests += report.num_requests
        self.num_returns += report.num_returns
        self.num_hit_tokens += report.num_hit_tokens
        self.bytes_checked += report.bytes_checked

    def add(self, other: Outcome) -> None:
        """Add another outcome."""
        self.deeds += other.deeds
        self.num_requests += other.num_requests
        self.num_returns += other.num_returns
        self.num_epochs += other.num_epochs
        self.num_hit_tokens += other.num_hit_tokens
        self.bytes_checked += other.bytes_checked

    def __str__(self) -> str:
        if not self.num_requests:
            return ""
        deeds = ", ".join(f"{count} {deed}" for deed, count in sorted(self.deeds.items()))
        return (
            f"{deeds or 'no deeds'}; {self.num_epochs} epochs, {self.num_requests} requests, "
            f"{self.num_returns} returns, {self.num_hit_tokens:,} tokens hit, "
            f"{self.bytes_checked:,} bytes checked"
        )
