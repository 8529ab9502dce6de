"""The asyncio client: an engine's way to the coordinator, by steps or request by request.

    async with await cluster.async_client() as client:
        result = await client.step(StepRequest(...))

What the methods mean is `KVCacheManager`'s; how they travel is calls.py's; waiting and deadlines
are async_step_client.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from actors.async_step_client import AsyncStepClient
from actors.calls import RemoteCall, read_answer
from actors.connection import require_served
from kvcache.base.errors import RequestError
from kvcache.manager.cache_blocks import KVCacheBlocks
from kvcache.manager.kv_cache_manager import checked_counts
from kvcache.manager.pins import Pin
from kvcache.manager.statistics import PrefixCacheStats
from kvcache.protocol.messages import CallResult
from kvcache.protocol.step import NO_STEP
from kvcache.requests.request import LoRARequest, Request, TokenIds

T = TypeVar("T")


class AsyncKVCacheClient(AsyncStepClient):
    """Steps, and the manager's methods for single requests.

    The caller keeps its `Request` objects, appends their tokens and sets their
    `num_computed_tokens`, as with a manager in its own process. A refused call raises what the
    manager raised.
    """

    async def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """See `KVCacheManager.get_computed_blocks`."""
        return await self._run(self._call_table.get_computed_blocks(request))

    async def allocate_slots(  # noqa: PLR0917 - the order of arguments is the field's
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
        return await self._run(call)

    async def fork(self, parent_request: Request, child_request: Request) -> KVCacheBlocks | None:
        """See `KVCacheManager.fork`. Forwards wait for `last_seq` afterwards."""
        return await self._run(self._call_table.fork(parent_request, child_request))

    async def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """See `KVCacheManager.cache_blocks`."""
        await self._run(self._call_table.cache_blocks(request, num_computed_tokens))

    async def free(self, request: Request) -> None:
        """See `KVCacheManager.free`."""
        await self._run(self._call_table.free(request))

    async def free_block_hashes(self, request: Request) -> None:
        """See `KVCacheManager.free_block_hashes`."""
        await self._run(self._call_table.free_block_hashes(request))

    async def get_num_common_prefix_blocks(
        self, request: Request, num_running_requests: int
    ) -> list[int]:
        """See `KVCacheManager.get_num_common_prefix_blocks`."""
        return await self._run(
            self._call_table.get_num_common_prefix_blocks(request, num_running_requests)
        )

    async def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """See `KVCacheManager.get_blocks`."""
        return await self._run(self._call_table.get_blocks(request_id))

    async def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """See `KVCacheManager.get_block_ids`."""
        return (await self.get_blocks(request_id)).get_block_ids()

    async def usage(self) -> float:
        """Return the share of blocks in use, 0 to 1."""
        return await self._run(self._call_table.usage())

    async def reset_prefix_cache(self, drain: bool = False) -> bool:
        """See `KVCacheManager.reset_prefix_cache`."""
        return await self._run(self._call_table.reset_prefix_cache(drain))

    async def evict_blocks(self, block_ids: Sequence[int]) -> None:
        """See `KVCacheManager.evict_blocks`."""
        await self._run(self._call_table.evict_blocks(block_ids))

    async def pin_prefix(
        self,
        token_ids: TokenIds,
        ttl_s: float,
        *,
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> Pin:
        """See `KVCacheManager.pin_prefix`."""
        return await self._run(
            self._call_table.pin_prefix(token_ids, ttl_s, lora, cache_salt, tenant)
        )

    async def unpin_prefix(self, pin: Pin) -> bool:
        """See `KVCacheManager.unpin_prefix`."""
        return await self._run(self._call_table.unpin_prefix(pin))

    async def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """See `KVCacheManager.make_prefix_cache_stats`."""
        return await self._run(self._call_table.make_prefix_cache_stats())

    async def _run(self, call: RemoteCall[T]) -> T:
        """Make a call, wait for its answer, read it."""
        session = self._connection.session
        number = await self._submit(
            lambda: session.call(call.method, call.arguments, NO_STEP), None
        )
        answer = await self._wait_answer(number, None)
        require_served(answer)
        if not isinstance(answer, CallResult):
            raise RequestError(f"number {number} was a step, not a call")
        return read_answer(call, answer.result)
