"""Counts what requests of an engine found in the tiers, and how long they waited for it.

Fed by the block store. Reads no clock: the time is passed in.
"""

from __future__ import annotations

from dataclasses import replace

from kvcache.metrics.engine_samples import RequestStatistics


class WaitTimes:
    """The seconds that requests have waited for one cause."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._total_s = 0.0

    def __len__(self) -> int:
        return len(self._since_s)

    def begin(self, request_id: str, now_s: float) -> None:
        """Have a request wait, unless it does already."""
        self._since_s.setdefault(request_id, now_s)

    def end(self, request_id: str, now_s: float) -> None:
        """Add the time that a request has waited, if it has."""
        since_s = self._since_s.pop(request_id, None)
        if since_s is not None:
            self._total_s += now_s - since_s

    def total_s(self, now_s: float) -> float:
        """Return the time of all requests together, those that wait still included."""
        return self._total_s + sum(now_s - since_s for since_s in list(self._since_s.values()))


class RequestCounts:
    """Counts requests, tokens and waits. One user, but `statistics` may be called in any thread."""

    def __init__(self) -> None:
        self._counted = RequestStatistics()
        self._jobs: dict[int, tuple[int, int]] = {}
        self.for_files = WaitTimes()
        self.for_loads = WaitTimes()

    def admitted(self, num_tokens: int, num_device_tokens: int) -> None:
        """Count a request that got its blocks, and how much of it the device had."""
        self._add(num_requests=1, num_asked_tokens=num_tokens, num_device_tokens=num_device_tokens)

    def begins(self, job_id: int, num_blocks: int, num_tokens: int) -> None:
        """Note how many blocks and tokens a load, a fetch from files or an import moves."""
        self._jobs[job_id] = num_blocks, num_tokens

    def load_ends(self, job_id: int, num_failed: int | None) -> None:
        """Count a load, once; `num_failed` of its blocks have failed, all of them if it is None.

        Tokens that were fetched and not loaded yet count as loaded from files, imported ones as
        loaded from other nodes.
        """
        if job_id not in self._jobs:
            return  # it was given up
        num_blocks, num_tokens = self._jobs.pop(job_id)
        num_failed = num_blocks if num_failed is None else num_failed
        num_lost = num_tokens * num_failed // num_blocks
        num_loaded, old = num_tokens - num_lost, self._counted
        num_from_files = min(old.num_fetched_tokens - old.num_file_tokens, num_loaded)
        num_unloaded = old.num_imported_tokens - old.num_remote_tokens
        self._add(
            num_loaded_tokens=num_loaded,
            num_file_tokens=num_from_files,
            num_remote_tokens=min(num_unloaded, num_loaded - num_from_files),
            num_failed_tokens=num_lost,
            num_failed_loads=int(num_failed > 0),
        )

    def fetch_ends(self, job_id: int, num_fetched: int) -> None:
        """Count a fetch that has read `num_fetched` blocks."""
        num_blocks, num_tokens = self._jobs.pop(job_id, (1, 0))
        self._add(num_fetched_tokens=num_tokens * num_fetched // num_blocks)

    def import_ends(self, job_id: int, num_imported: int) -> None:
        """Count an import that has brought `num_imported` blocks."""
        num_blocks, num_tokens = self._jobs.pop(job_id, (1, 0))
        self._add(num_imported_tokens=num_tokens * num_imported // num_blocks)

    def ended(self, request_id: str, now_s: float) -> None:
        """End the waits of a request that has ended."""
        self.for_files.end(request_id, now_s)
        self.for_loads.end(request_id, now_s)

    def statistics(self, now_s: float) -> RequestStatistics:
        return replace(
            self._counted,
            files_wait_s=self.for_files.total_s(now_s),
            load_wait_s=self.for_loads.total_s(now_s),
            num_waiting=len(self.for_files) + len(self.for_loads),
        )

    def _add(self, **counts: int) -> None:
        old = self._counted
        sums = {name: getattr(old, name) + count for name, count in counts.items()}
        self._counted = replace(old, **sums)
