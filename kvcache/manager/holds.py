"""Prefixes held for requests that are on their way in: all of them, before one takes a block.

For a warm start, where requests that ran before come back together and find what they had in the
cache: without a hold the first of them might evict what the next one comes for. Unlike pins, holds
are bounded by nothing but the requests themselves and last for one step. Refuses to know who runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.base.errors import RequestError
from kvcache.core import CacheHit
from kvcache.core.flat_core import FlatCore
from kvcache.manager.cache_control import CacheControl
from kvcache.manager.step_plan import make_request
from kvcache.protocol.step import NewRequest, checked_new
from kvcache.requests.request import BlockHasher


class PrefixHolds:
    """The holds of one manager, by owner."""

    def __init__(self, core: FlatCore, control: CacheControl, hasher: BlockHasher) -> None:
        """Hold nothing."""
        self._core = core
        self._control = control
        self._hasher = hasher
        self._held: dict[str, list[CacheHit]] = {}

    def __len__(self) -> int:
        """Return how many owners hold something."""
        return len(self._held)

    def hold(self, owner: str, requests: Sequence[NewRequest]) -> int:
        """Hold what is cached of `requests` until `let_go`; return how many tokens that is.

        What cannot be a request, or does not read the cache, is passed over: its step will be
        refused, or finds nothing.
        """
        num_tokens = 0
        for new in requests:
            try:
                plain = checked_new(f"held for {owner}", new)
                request = make_request(plain, self._control.model_epoch, self._hasher)
            except RequestError:
                continue
            hit = self._core.look_up(request)
            if hit.num_tokens and not request.skip_reading_prefix_cache:
                self._core.pin(hit)
                self._held.setdefault(owner, []).append(hit)
                num_tokens += hit.num_tokens
        if num_tokens:
            self._control.changed()
        return num_tokens

    def let_go(self, owner: str) -> None:
        """Hold nothing for `owner` any more."""
        for hit in self._held.pop(owner, ()):
            self._core.unpin(hit)
            self._control.changed()
