"""Operations on the whole cache: pins, manual eviction, resets, drains, the model epoch.

Calls and steps of requests do not depend on them. While blocks are in use, a reset is refused, and
a drain waits until the last one is free. Only new weights empty the cache at once.

    reset ──▶ in use? ──yes──▶ refused
                └─no──▶ empty
    drain ──▶ no hits, pins gone ──▶ running requests leave ──▶ empty, next model epoch
    new weights ──▶ pins gone, empty, next model epoch; running requests cache nothing more
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.base.clock import Clock
from kvcache.base.errors import RequestError
from kvcache.base.logs import get_logger
from kvcache.core import CacheHit
from kvcache.core.flat_core import FlatCore
from kvcache.core.prefix_cache import PrefixCache
from kvcache.manager.admission import Admission
from kvcache.manager.pins import Pin, PinTable, held_blocks
from kvcache.manager.request_table import RequestTable
from kvcache.manager.settings import ManagerSettings
from kvcache.manager.step_plan import make_request
from kvcache.protocol.commands import Command, Reset
from kvcache.protocol.step import NewRequest, checked_new
from kvcache.requests.request import BlockHasher, Request, copy_request
from kvcache.tenants import TenantLedger

logger = get_logger(__name__)


class CacheControl:
    """The cache of one manager, as a whole."""

    def __init__(
        self,
        core: FlatCore,
        table: RequestTable,
        admission: Admission,
        clock: Clock,
        *,
        settings: ManagerSettings,
        tenants: TenantLedger | None,
    ) -> None:
        """Control `core`. Without workers no commands are kept."""
        self._core = core
        self._cache = core.cache
        self._table = table
        self._admission = admission
        self._clock = clock
        self._pins = PinTable(settings.max_pinned_blocks, tenants)
        self.pinned = self._pins.hits
        """The live pins by id, oldest first, each with its hit. While there are any, callers must
        call `refresh`."""
        self._commands: list[Command] = []
        self._has_workers = settings.has_workers
        self.model_epoch = settings.model_epoch
        self.is_draining = False
        self.num_blocks_refusing_reset = 0

    def request(self, request_id: str) -> Request | None:
        """Return the manager's own request with all its tokens, None if it is not known. Do not
        change it."""
        return self._table.up_to_date(request_id)

    def users_of_blocks(self) -> Int32Array:
        """Return how many running requests and pins use each block, by id. Shape `(num_blocks,)`.

        A request with a block in two columns counts once. O(blocks of all tables).
        """
        users = np.zeros(self._core.statistics().num_blocks + 1, dtype=np.int32)
        for known in self._table.known.values():
            tables = self._core.block_ids(known.request.request_id)
            users[list({b for table in tables for b in table})] += 1
        for _, hit in self.pinned.values():
            users[held_blocks(hit)] += 1
        users[0] = 0
        return users

    def refresh(self) -> None:
        """Unpin expired pins, and end a drain once no block is in use."""
        if self._pins.hits:
            for hit in self._pins.take_expired(self._clock.now()):
                self._cache.unpin(hit)
        if self.is_draining:
            self._try_to_empty()

    def pin(self, request: Request, ttl_s: float) -> Pin:
        """Pin the cached prefix of `request`, which has one token more than the prefix wanted.

        Raises:
            PinLimitError: pins would exceed their share of the pool, or the tenant's limit.
        """
        hit = self._cache.look_up(request)
        self._pins.require_room(hit)
        self._pins.require_tenant_room(hit, request.namespace, self._cache.num_free_blocks())
        self._cache.pin(hit)
        return self._pins.add(hit, self._clock.now() + ttl_s, request.namespace)

    def unpin(self, pin_id: int) -> bool:
        """End a pin; False if it is not live."""
        hit = self._pins.remove(pin_id)
        if hit is None:
            return False
        self._cache.unpin(hit)
        return True

    def reset(self, *, drain: bool) -> bool:
        """Empty the cache now, or with `drain` once no block is in use; return whether it is."""
        if self.is_draining:
            return self._try_to_empty()
        if drain:
            self._cache.stop_hits()
            self.is_draining = True
            logger.info(
                "the prefix cache drains: %d requests run, %d pins go, nothing hits until then",
                self._table.counts()[0],
                len(self._pins),
            )
            self._unpin_all()
        return self._try_to_empty()

    def begin_model_epoch(self) -> int:
        """Empty the cache although blocks are in use; return the number of the new epoch."""
        self._unpin_all()
        self._cache.forget_all()
        self._emptied(has_new_weights=True)
        return self.model_epoch

    def take_commands(self) -> list[Command]:
        """Return the commands since the last call, in order."""
        commands = [*self._commands, *self._core.take_commands()]
        self._commands.clear()
        return commands

    def check(self) -> None:
        """Raise `InvariantError` if the pins do not add up."""
        self._pins.check()

    def dump_state(self) -> dict[str, object]:
        """Return pins, epoch and drain as plain values."""
        return {
            "pins": self._pins.dump_state(),
            "model_epoch": self.model_epoch,
            "is_draining": self.is_draining,
        }

    def _unpin_all(self) -> None:
        for hit in self._pins.take_all():
            self._cache.unpin(hit)

    def _try_to_empty(self) -> bool:
        num_used = self._cache.reset()
        if num_used:
            self.num_blocks_refusing_reset = num_used
            return False
        self._emptied(has_new_weights=self.is_draining)
        return True

    def _emptied(self, *, has_new_weights: bool) -> None:
        self._admission.record_reset()
        self.is_draining = False
        self.model_epoch += has_new_weights
        if self._has_workers:
            self._commands += [*self._core.take_commands(), Reset(self.model_epoch)]
        logger.info("the prefix cache is reset: model epoch %d", self.model_epoch)


def named_by_prefix(request: Request) -> Request:
    """Return a copy of a request with an id that only requests for the same prefix have."""
    digest = blake2b(request.all_token_ids.tobytes(), digest_size=16)
    digest.update(repr((request.lora, request.namespace)).encode())
    return copy_request(request, f"prefetch {digest.hexdigest()}")


class PrefixHolds:
    """The prefixes that one manager holds for clients that come back, by owner."""

    def __init__(self, cache: PrefixCache, control: CacheControl, hasher: BlockHasher) -> None:
        """Hold nothing."""
        self._cache = cache
        self._control = control
        self._hasher = hasher
        self._held: dict[str, list[CacheHit]] = {}

    def __len__(self) -> int:
        """Return how many owners hold something."""
        return len(self._held)

    def hold(self, owner: str, requests: Sequence[NewRequest]) -> int:
        """Hold the cached prefixes of `requests` until `let_go`; return how many tokens they have.

        Invalid requests are skipped, because their step will be refused. Requests that do not read
        the cache are skipped, too.
        """
        num_tokens = 0
        for new in requests:
            try:
                plain = checked_new(f"held for {owner}", new)
                request = make_request(plain, self._control.model_epoch, self._hasher)
            except RequestError:
                continue
            hit = self._cache.look_up(request)
            if hit.num_tokens and not request.skip_reading_prefix_cache:
                self._cache.pin(hit)
                self._held.setdefault(owner, []).append(hit)
                num_tokens += hit.num_tokens
        return num_tokens

    def let_go(self, owner: str) -> None:
        """Release all prefixes held for `owner`."""
        for hit in self._held.pop(owner, ()):
            self._cache.unpin(hit)
