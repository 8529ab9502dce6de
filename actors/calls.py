"""Per-request calls as a client makes them: arguments to bytes, answers to what they mean.

The methods and their rules are `KVCacheManager`'s; here is only how they travel. A request's tokens
are sent once: the table remembers how many the coordinator knows. Sends nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from kvcache.base.arguments import (
    MAX_INT32,
    as_bool,
    as_int,
    as_integers,
    as_number,
    as_text,
    check_kind,
)
from kvcache.base.arrays import int32_array
from kvcache.base.errors import BlockError, RequestError
from kvcache.coordinator.remote_calls import pack_values, unpack_values
from kvcache.manager.cache_blocks import KVCacheBlocks
from kvcache.manager.kv_cache_manager import COUNTS
from kvcache.manager.pins import Pin
from kvcache.manager.statistics import PrefixCacheStats
from kvcache.requests.request import LoRARequest, Request, TokenIds, as_token_ids, check_request

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteCall(Generic[T]):
    """A call that is ready to be sent, and how to read its answer. `on_served` is called once it
    was executed."""

    method: str
    arguments: bytes
    read: Callable[[Any], T]
    on_served: Callable[[], None] = lambda: None


class CallTable:
    """Makes the calls of one client in one epoch. `forget` what an epoch's end made void.

    Arguments are checked here as a manager checks them: what is refused is not sent.
    """

    def __init__(self) -> None:
        self._num_sent: dict[str, int] = {}

    def forget(self) -> None:
        """Assume that the coordinator knows no request any more."""
        self._num_sent.clear()

    def get_computed_blocks(self, request: Request) -> RemoteCall[tuple[KVCacheBlocks, int]]:
        """The longest cached prefix of the request."""
        check_kind("request", request, Request, RequestError)

        def read(values: Any) -> tuple[KVCacheBlocks, int]:
            return KVCacheBlocks(_tables(values["block_ids"])), values["num_computed_tokens"]

        return self._with_request("get_computed_blocks", request, {}, read)

    def allocate_slots(
        self,
        request: Request,
        counts: Sequence[int],
        new_computed_blocks: KVCacheBlocks | None,
        delay_cache_blocks: bool,
    ) -> RemoteCall[KVCacheBlocks | None]:
        """Slots for more tokens: as many as `checked_counts` returned."""
        if new_computed_blocks is not None:
            check_kind("new_computed_blocks", new_computed_blocks, KVCacheBlocks, RequestError)

        def read(values: Any) -> KVCacheBlocks | None:
            if values is None:
                return None
            return KVCacheBlocks(_tables(values["block_ids"]), _tables(values["unhashed"]))

        arguments: dict[str, Any] = dict(zip(COUNTS, counts, strict=True))
        arguments["delay_cache_blocks"] = as_bool(
            "delay_cache_blocks", delay_cache_blocks, RequestError
        )
        if new_computed_blocks is not None:
            tables = new_computed_blocks.get_block_ids()
            arguments["new_computed_blocks"] = [_packed(table) for table in tables]
        return self._with_request("allocate_slots", request, arguments, read)

    def fork(self, parent: Request, child: Request) -> RemoteCall[KVCacheBlocks | None]:
        """Share a parent's blocks with a child."""
        check_request(parent)
        check_request(child)
        start = self._num_sent.get(parent.request_id, 0)
        num_tokens, num_computed = parent.num_tokens, parent.num_computed_tokens

        def read(values: Any) -> KVCacheBlocks | None:
            self._remember(parent.request_id, num_tokens)
            if values is None:
                return None
            child.num_computed_tokens = num_computed
            return KVCacheBlocks(_tables(values["block_ids"]))

        return self._with_request("fork", child, {"parent": _describe(parent, start)}, read)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> RemoteCall[None]:
        """Make full blocks hittable after a delay."""
        check_request(request)
        what = f"request {request.request_id}: num_computed_tokens"
        arguments = {"num_computed_tokens": as_int(what, num_computed_tokens, error=RequestError)}
        return self._with_request("cache_blocks", request, arguments, _nothing)

    def free(self, request: Request) -> RemoteCall[None]:
        """Give the request's blocks back."""
        check_request(request)
        return RemoteCall(
            "free",
            pack_values({"request_id": request.request_id}),
            _nothing,
            lambda: self._forget_request(request.request_id),
        )

    def free_block_hashes(self, request: Request) -> RemoteCall[None]:
        """Make no further block of the request hittable."""
        check_request(request)
        return self._with_request("free_block_hashes", request, {}, _nothing)

    def get_num_common_prefix_blocks(
        self, request: Request, num_running_requests: int
    ) -> RemoteCall[list[int]]:
        """Leading blocks per group that every running request shares."""
        check_kind("request", request, Request, RequestError)
        count = as_int("num_running_requests", num_running_requests, error=RequestError)
        arguments = {"num_running_requests": count}
        return self._with_request("get_num_common_prefix_blocks", request, arguments, list)

    def get_blocks(self, request_id: str) -> RemoteCall[KVCacheBlocks]:
        """The request's tables."""
        request_id = as_text("request id", request_id, RequestError, may_be_empty=True)
        return _plain_call(
            "get_block_ids",
            {"request_id": request_id},
            lambda tables: KVCacheBlocks(_tables(tables)),
        )

    def usage(self) -> RemoteCall[float]:
        """The share of blocks in use."""
        return _plain_call("usage", {}, float)

    def reset_prefix_cache(self, drain: bool) -> RemoteCall[bool]:
        """Forget everything cached."""
        arguments = {"drain": as_bool("drain", drain, RequestError)}
        return _plain_call("reset_prefix_cache", arguments, bool)

    def evict_blocks(self, block_ids: Sequence[int]) -> RemoteCall[None]:
        """Forget the contents of these blocks and their descendants."""
        ids = as_integers("block_ids", block_ids, at_most=MAX_INT32, error=BlockError)
        return _plain_call("evict_blocks", {"block_ids": _packed(ids)}, _nothing)

    def pin_prefix(
        self,
        token_ids: TokenIds,
        ttl_s: float,
        lora: LoRARequest | None,
        cache_salt: str | None,
        tenant: str | None,
    ) -> RemoteCall[Pin]:
        """Hold a cached prefix for a time."""
        arguments: dict[str, Any] = {
            "token_ids": _packed(as_token_ids(token_ids, "token id")),
            "ttl_s": as_number("ttl_s", ttl_s, above=0, error=RequestError),
        }
        if lora is not None:
            check_kind("lora", lora, LoRARequest, RequestError)
        if cache_salt is not None:
            cache_salt = as_text("cache salt", cache_salt, RequestError)
        if tenant is not None:
            tenant = as_text("tenant", tenant, RequestError)
        arguments.update(_texts(lora, cache_salt, tenant))
        return _plain_call("pin_prefix", arguments, lambda values: Pin(**values))

    def unpin_prefix(self, pin: Pin) -> RemoteCall[bool]:
        """Let a pinned prefix go."""
        check_kind("pin", pin, Pin, RequestError)
        arguments = {"pin_id": as_int("pin_id", pin.pin_id, error=RequestError)}
        return _plain_call("unpin_prefix", arguments, bool)

    def make_prefix_cache_stats(self) -> RemoteCall[PrefixCacheStats | None]:
        """Look-ups since the last time."""
        return _plain_call(
            "make_prefix_cache_stats",
            {},
            lambda values: None if values is None else PrefixCacheStats(**values),
        )

    def _with_request(
        self,
        method: str,
        request: Request,
        arguments: dict[str, Any],
        read: Callable[[Any], T],
    ) -> RemoteCall[T]:
        start = self._num_sent.get(request.request_id, 0)
        num_tokens = request.num_tokens
        packed = pack_values({**arguments, "request": _describe(request, start)})
        return RemoteCall(
            method, packed, read, lambda: self._remember(request.request_id, num_tokens)
        )

    def _remember(self, request_id: str, num_tokens: int) -> None:
        self._num_sent[request_id] = num_tokens

    def _forget_request(self, request_id: str) -> None:
        self._num_sent.pop(request_id, None)


def read_answer(call: RemoteCall[T], packed: bytes) -> T:
    """Return what the answer to `call` means, and note that the call was served."""
    call.on_served()
    return call.read(unpack_values(packed))


def _plain_call(method: str, values: dict[str, Any], read: Callable[[Any], T]) -> RemoteCall[T]:
    return RemoteCall(method, pack_values(values), read)


def _describe(request: Request, start: int) -> dict[str, Any]:
    """Return the request as it travels: its tokens from `start` on, all of it with `start` 0."""
    described: dict[str, Any] = {
        "request_id": request.request_id,
        "start": start,
        "token_ids": _packed(request.all_token_ids[start:]),
        "num_computed_tokens": request.num_computed_tokens,
    }
    if start == 0:
        described["num_prompt_tokens"] = request.num_prompt_tokens
        described["skip_reading_prefix_cache"] = request.skip_reading_prefix_cache
        described["mm_hashes"] = list(request.mm_hashes)
        described["mm_offsets"] = _packed([p.offset for p in request.mm_positions])
        described["mm_lengths"] = _packed([p.length for p in request.mm_positions])
        described.update(_texts(request.lora, request.cache_salt, request.namespace.tenant))
    return described


def _texts(
    lora: LoRARequest | None, cache_salt: str | None, tenant: str | None
) -> dict[str, str | None]:
    """Return what sets a prefix apart, without what is not set."""
    texts = {
        "lora_name": None if lora is None else lora.name,
        "lora_path": None if lora is None else lora.path,
        "cache_salt": cache_salt,
        "tenant": tenant,
    }
    return {name: text for name, text in texts.items() if text is not None}


def _packed(values: Any) -> bytes:
    return int32_array(values).astype("<i4").tobytes()


def _tables(packed: Sequence[bytes]) -> list[list[int]]:
    return [np.frombuffer(table, "<i4").tolist() for table in packed]


def _nothing(values: Any) -> None:
    return None
