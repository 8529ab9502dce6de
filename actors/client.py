"""The synchronous client: an engine's way to the coordinator, by steps or request by request.

What the methods mean is `KVCacheManager`'s; how they travel is calls.py's; waiting, threads and
deadlines are step_client.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from actors.calls import RemoteCall, read_answer
from actors.connection import require_served
from actors.step_client import StepClient
from kvcache.base.errors import RequestError
from kvcache.manager.cache_blocks import KVCacheBlocks
from kvcache.manager.kv_cache_manager import checked_counts
from kvcache.manager.pins import Pin
from kvcache.manager.statistics import PrefixCacheStats
from kvcache.protocol.messages import CallResult
from kvcache.protocol.step import NO_STEP
from kvcache.requests.request import LoRARequest, Request, TokenIds

T = TypeVar("T")


class KVCacheClient(StepClient):
    """Steps, and the manager's methods for single requests.

    The caller keeps its `Request` objects, appends their tokens and sets their
    `num_computed_tokens`, as with a manager in its own process. A refused call raises what the
    manager raised.
    """

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """See `KVCacheManager.get_computed_blocks`."""
        return self._run(self._call_table.get_computed_blocks(request))

    def allocate_slots(  # noqa: PLR0917 - the order of arguments is the field's
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_draft_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_external_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """See `KVCacheManager.allocate_slots`. Forwards wait for `last_seq` afterwards."""
        counts = checked_counts(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            num_draft_tokens,
            num_lookahead_tokens,
            num_external_computed_tokens,
            num_encoder_tokens,
        )
        call = self._call_table.allocate_slots(
            request, counts, new_computed_blocks, delay_cache_blocks
        )
        return self._run(call)

    def fork(self, parent_request: Request, child_request: Request) -> KVCacheBlocks | None:
        """See `KVCacheManager.fork`. Forwards wait for `last_seq` afterwards."""
        return self._run(self._call_table.fork(parent_request, child_request))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """See `KVCacheManager.cache_blocks`."""
        self._run(self._call_table.cache_blocks(request, num_computed_tokens))

    def free(self, request: Request) -> None:
        """See `KVCacheManager.free`."""
        self._run(self._call_table.free(request))

    def free_block_hashes(self, request: Request) -> None:
        """See `KVCacheManager.free_block_hashes`."""
        self._run(self._call_table.free_block_hashes(request))

    def get_num_common_prefix_blocks(
        self, request: Request, num_running_requests: int
    ) -> list[int]:
        """See `KVCacheManager.get_num_common_prefix_blocks`."""
        return self._run(
            self._call_table.get_num_common_prefix_blocks(request, num_running_requests)
        )

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """See `KVCacheManager.get_blocks`."""
        return self._run(self._call_table.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """See `KVCacheManager.get_block_ids`."""
        return self.get_blocks(request_id).get_block_ids()

    def usage(self) -> float:
        """Return the share of blocks in use, 0 to 1."""
        return self._run(self._call_table.usage())

    def reset_prefix_cache(self, drain: bool = False) -> bool:
        """See `KVCacheManager.reset_prefix_cache`."""
        return self._run(self._call_table.reset_prefix_cache(drain))

    def evict_blocks(self, block_ids: Sequence[int]) -> None:
        """See `KVCacheManager.evict_blocks`."""
        self._run(self._call_table.evict_blocks(block_ids))

    def pin_prefix(
        self,
        token_ids: TokenIds,
        ttl_s: float,
        *,
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> Pin:
        """See `KVCacheManager.pin_prefix`."""
        return self._run(self._call_table.pin_prefix(token_ids, ttl_s, lora, cache_salt, tenant))

    def unpin_prefix(self, pin: Pin) -> bool:
        """See `KVCacheManager.unpin_prefix`."""
        return self._run(self._call_table.unpin_prefix(pin))

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """See `KVCacheManager.make_prefix_cache_stats`."""
        return self._run(self._call_table.make_prefix_cache_stats())

    def _run(self, call: RemoteCall[T]) -> T:
        """Make a call, wait for its answer, read it."""
        session, send = self._connection.session, self._connection.send_step
        number = self._submit(
            lambda: send(session.call(call.method, call.arguments, NO_STEP)), None
        )
        answer = self._wait_answer(number, None)
        require_served(answer)
        if not isinstance(answer, CallResult):
            raise RequestError(f"number {number} was a step, not a call")
        return read_answer(call, answer.result)
