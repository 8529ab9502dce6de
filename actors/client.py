"""The synchronous client: an engine's way to the coordinator, by steps or request by request.

The methods are those of `KVCacheManager`. Each checks its arguments as a manager does, packs them
into a `RemoteCall` and runs it; a refused call is not sent. step_client.py has waits, threads and
deadlines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from actors.calls import RemoteCall, pack_ids, pack_texts, tables_of
from actors.connection import result_of_call
from actors.step_client import StepClient
from kvcache.base.arguments import (
    MAX_INT32,
    as_bool,
    as_int,
    as_integers,
    as_number,
    as_text,
    check_kind,
)
from kvcache.base.errors import BlockError, RequestError
from kvcache.manager.cache_blocks import KVCacheBlocks
from kvcache.manager.kv_cache_manager import COUNTS, checked_counts
from kvcache.manager.pins import Pin
from kvcache.manager.statistics import PrefixCacheStats
from kvcache.protocol.step import NO_STEP
from kvcache.requests.request import LoRARequest, Request, TokenIds, as_token_ids, check_request

T = TypeVar("T")


class KVCacheClient(StepClient):
    """Steps, and the manager's methods for single requests.

    The caller keeps its `Request` objects, appends their tokens and sets their
    `num_computed_tokens`, as with a manager in its own process. A refused call raises what the
    manager raised.
    """

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """See `KVCacheManager.get_computed_blocks`."""
        check_kind("request", request, Request, RequestError)

        def read(values: Any) -> tuple[KVCacheBlocks, int]:
            return KVCacheBlocks(tables_of(values["block_ids"])), values["num_computed_tokens"]

        return self._run(self._sent.call("get_computed_blocks", request, {}, read))

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
        if new_computed_blocks is not None:
            check_kind("new_computed_blocks", new_computed_blocks, KVCacheBlocks, RequestError)

        def read(values: Any) -> KVCacheBlocks | None:
            if values is None:
                return None
            return KVCacheBlocks(tables_of(values["block_ids"]), tables_of(values["unhashed"]))

        arguments: dict[str, Any] = dict(zip(COUNTS, counts, strict=True))
        arguments["delay_cache_blocks"] = as_bool(
            "delay_cache_blocks", delay_cache_blocks, RequestError
        )
        if new_computed_blocks is not None:
            tables = new_computed_blocks.get_block_ids()
            arguments["new_computed_blocks"] = [pack_ids(table) for table in tables]
        return self._run(self._sent.call("allocate_slots", request, arguments, read))

    def fork(self, parent_request: Request, child_request: Request) -> KVCacheBlocks | None:
        """See `KVCacheManager.fork`. Forwards wait for `last_seq` afterwards."""
        check_request(parent_request)
        check_request(child_request)
        num_tokens, num_computed = parent_request.num_tokens, parent_request.num_computed_tokens

        def read(values: Any) -> KVCacheBlocks | None:
            self._sent.remember(parent_request.request_id, num_tokens)
            if values is None:
                return None
            child_request.num_computed_tokens = num_computed
            return KVCacheBlocks(tables_of(values["block_ids"]))

        arguments = {"parent": self._sent.describe(parent_request)}
        return self._run(self._sent.call("fork", child_request, arguments, read))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """See `KVCacheManager.cache_blocks`."""
        check_request(request)
        what = f"request {request.request_id}: num_computed_tokens"
        arguments = {"num_computed_tokens": as_int(what, num_computed_tokens, error=RequestError)}
        return self._run(self._sent.call("cache_blocks", request, arguments, _nothing))

    def free(self, request: Request) -> None:
        """See `KVCacheManager.free`."""
        check_request(request)
        arguments = {"request_id": request.request_id, "hints": request.hints}
        forget = partial(self._sent.forget, request.request_id)
        return self._run(RemoteCall("free", arguments, _nothing, forget))

    def free_block_hashes(self, request: Request) -> None:
        """See `KVCacheManager.free_block_hashes`."""
        check_request(request)
        return self._run(self._sent.call("free_block_hashes", request, {}, _nothing))

    def get_num_common_prefix_blocks(
        self, request: Request, num_running_requests: int
    ) -> list[int]:
        """See `KVCacheManager.get_num_common_prefix_blocks`."""
        check_kind("request", request, Request, RequestError)
        count = as_int("num_running_requests", num_running_requests, error=RequestError)
        arguments = {"num_running_requests": count}
        return self._run(self._sent.call("get_num_common_prefix_blocks", request, arguments, list))

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """See `KVCacheManager.get_blocks`."""
        request_id = as_text("request id", request_id, RequestError, may_be_empty=True)
        return self._run(RemoteCall("get_block_ids", {"request_id": request_id}, _blocks))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """See `KVCacheManager.get_block_ids`."""
        request_id = as_text("request id", request_id, RequestError, may_be_empty=True)
        return self._run(RemoteCall("get_block_ids", {"request_id": request_id}, _block_ids))

    def usage(self) -> float:
        """Return the share of blocks in use, 0 to 1."""
        return self._run(RemoteCall("usage", {}, float))

    def reset_prefix_cache(self, drain: bool = False) -> bool:
        """See `KVCacheManager.reset_prefix_cache`."""
        arguments = {"drain": as_bool("drain", drain, RequestError)}
        return self._run(RemoteCall("reset_prefix_cache", arguments, bool))

    def begin_model_epoch(self) -> int:
        """See `KVCacheManager.begin_model_epoch`."""
        return self._run(RemoteCall("begin_model_epoch", {}, int))

    def evict_blocks(self, block_ids: Sequence[int]) -> None:
        """See `KVCacheManager.evict_blocks`."""
        ids = as_integers("block_ids", block_ids, at_most=MAX_INT32, error=BlockError)
        return self._run(RemoteCall("evict_blocks", {"block_ids": pack_ids(ids)}, _nothing))

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
        arguments = _prefix(token_ids, lora, cache_salt, tenant)
        arguments["ttl_s"] = as_number("ttl_s", ttl_s, above=0, error=RequestError)
        return self._run(RemoteCall("pin_prefix", arguments, _pin))

    def prefetch_prefix(
        self,
        token_ids: TokenIds,
        *,
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> int:
        """See `KVCacheManager.prefetch_prefix`."""
        arguments = _prefix(token_ids, lora, cache_salt, tenant)
        return self._run(RemoteCall("prefetch_prefix", arguments, int))

    def unpin_prefix(self, pin: Pin) -> bool:
        """See `KVCacheManager.unpin_prefix`."""
        check_kind("pin", pin, Pin, RequestError)
        arguments = {"pin_id": as_int("pin_id", pin.pin_id, error=RequestError)}
        return self._run(RemoteCall("unpin_prefix", arguments, bool))

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """See `KVCacheManager.make_prefix_cache_stats`."""

        def read(values: Any) -> PrefixCacheStats | None:
            return None if values is None else PrefixCacheStats(**values)

        return self._run(RemoteCall("make_prefix_cache_stats", {}, read))

    def _run(self, call: RemoteCall[T]) -> T:
        """Send a call, wait for its answer, and decode it."""
        session, arguments = self._connection.session, call.pack()
        number = self._submit(partial(session.call, call.method, arguments, NO_STEP), None)
        return call.answer(result_of_call(number, self._wait_answer(number, None)))


def _prefix(
    token_ids: TokenIds, lora: LoRARequest | None, cache_salt: str | None, tenant: str | None
) -> dict[str, Any]:
    """Return the checked arguments that name a prefix."""
    if lora is not None:
        check_kind("lora", lora, LoRARequest, RequestError)
    if cache_salt is not None:
        cache_salt = as_text("cache salt", cache_salt, RequestError)
    if tenant is not None:
        tenant = as_text("tenant", tenant, RequestError)
    packed = pack_ids(as_token_ids(token_ids, "token id"))
    return {"token_ids": packed, **pack_texts(lora, cache_salt, tenant)}


def _blocks(packed: Sequence[bytes]) -> KVCacheBlocks:
    return KVCacheBlocks(tables_of(packed))


def _block_ids(packed: Sequence[bytes]) -> tuple[list[int], ...]:
    return _blocks(packed).get_block_ids()


def _pin(values: Mapping[str, Any]) -> Pin:
    return Pin(**values)


def _nothing(values: Any) -> None:
    return None
