"""The manager's per-request methods, by name and over a wire.

A `Call` names a method of the table below and brings its arguments as a msgpack map; the result is
msgpack, too. Arrays of ids are little-endian int32 in a msgpack bin, as in wire.py. Refuses methods
that are not in the table, and requests of another client.

A request is sent as `request: {request_id, start, token_ids, num_computed_tokens}`: its tokens from
position `start` on, the number of tokens known here already. With `start` 0 it is created, and may
also have `num_prompt_tokens, lora_name, lora_path, mm_hashes, mm_offsets, mm_lengths, cache_salt,
tenant, skip_reading_prefix_cache`. It is known until `free`. A fork has its parent in the same
form, as `parent`. `hints`, maps with the fields of `CacheHint`, replace those of the request;
`free` takes them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import msgpack
import numpy as np

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.errors import RequestError, shown
from kvcache.manager import KVCacheManager
from kvcache.manager.cache_blocks import KVCacheBlocks
from kvcache.manager.pins import Pin
from kvcache.protocol.message_headers import UNREADABLE
from kvcache.protocol.messages import MAX_ITEMS, MAX_NAME_CHARS, Call
from kvcache.requests.hints import CacheHint, hints_from_plain
from kvcache.requests.request import LoRARequest, Request

MAX_REQUESTS_PER_CLIENT = 4096

_REQUEST_TEXTS = ("lora_name", "lora_path", "cache_salt", "tenant")
_REQUEST_KEYS = {
    "request_id",
    "start",
    "token_ids",
    "num_computed_tokens",
    "hints",
    "num_prompt_tokens",
    "mm_hashes",
    "mm_offsets",
    "mm_lengths",
    "skip_reading_prefix_cache",
    *_REQUEST_TEXTS,
}


def pack_values(values: object) -> bytes:
    """Return arguments or a result as bytes: plain values, dataclasses, blocks and int32 arrays.

    Raises RequestError for anything else, numbers beyond 64 bits and text that is not Unicode.
    """
    try:
        packed: bytes = msgpack.packb(values, default=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(
            f"arguments or result cannot be encoded: {error}: pass plain values and int32 arrays"
        ) from error
    return packed


def unpack_values(data: bytes) -> Any:
    """Return the values from `pack_values`, arrays as bytes; raises `RequestError` for others."""
    try:
        return msgpack.unpackb(
            data, strict_map_key=False, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS
        )
    except UNREADABLE as error:
        raise RequestError(f"arguments cannot be decoded: {error}: pack a map") from error


class _Arguments:
    """The arguments of one call, taken one by one with their types."""

    def __init__(self, method: str, data: bytes) -> None:
        values = unpack_values(data)
        if type(values) is not dict or not all(type(key) is str for key in values):
            raise RequestError(f"{method}: arguments are {type(values).__name__}: pass a map")
        self._method = method
        self._values: dict[str, Any] = values

    def take(self, name: str, kind: type[Any], default: Any = None) -> Any:
        """Return an argument of exactly `kind`, or the default if it is missing."""
        value = self._values.pop(name, default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise RequestError(f"{self._method}: {name} is {shown(value)}: pass {kind.__name__}")
        if kind is str:
            self._require_short(name, value)
        return value

    def take_names(self, name: str) -> list[str]:
        """Return a list of texts, empty if it is missing."""
        values: list[str] = self.take(name, list, [])
        for value in values:
            if type(value) is not str:
                raise RequestError(f"{self._method}: {name} holds {shown(value)}: pass texts")
            self._require_short(name, value)
        return values

    def _require_short(self, name: str, value: str) -> None:
        """The limit of texts in messages' fields: labels repeat some of them."""
        if len(value) > MAX_NAME_CHARS:
            raise RequestError(
                f"{self._method}: {name} has {len(value)} characters, at most {MAX_NAME_CHARS} "
                "travel: shorten it"
            )

    def take_hints(self, request_id: str) -> tuple[CacheHint, ...] | None:
        """Return the hints of a request, None if they are missing."""
        hints = self._values.pop("hints", None)
        return None if hints is None else hints_from_plain(f"request {request_id}", hints)

    def take_optional_text(self, name: str) -> str | None:
        return None if self._values.get(name) is None else str(self.take(name, str))

    def take_ids(self, name: str) -> Int32Array:
        return _ids(f"{self._method}: {name}", self._values.pop(name, b""))

    def take_lora(self) -> LoRARequest | None:
        """Return the adapter named by `lora_name` and `lora_path`, or None."""
        name, path = self.take_optional_text("lora_name"), self.take_optional_text("lora_path")
        return None if name is None else LoRARequest(name, path or "")

    def require_empty(self) -> None:
        """Raise if an argument was not taken."""
        if self._values:
            raise RequestError(
                f"{self._method} does not know {', '.join(sorted(self._values))}: leave it out"
            )


_Method = Callable[["RemoteCalls", str, _Arguments], object]


class RemoteCalls:
    """Per-request calls of all clients on one manager."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._requests: dict[str, dict[str, Request]] = {}

    def call(self, call: Call) -> bytes:
        """Execute one call; return its result, packed.

        Raises the errors of the method, and `RequestError` for an unknown method or wrong
        arguments; nothing was changed then, except that a request's new tokens may be known.
        """
        method = METHODS.get(call.method)
        if method is None:
            raise RequestError(
                f"there is no method {call.method!r}: use one of {', '.join(sorted(METHODS))}"
            )
        return pack_values(method(self, call.client_id, _Arguments(call.method, call.arguments)))

    def release_client(self, client_id: str) -> None:
        """Free all requests of a client."""
        for request in self._requests.pop(client_id, {}).values():
            self._manager.free(request)

    def _get_computed_blocks(self, client_id: str, arguments: _Arguments) -> object:
        request = self._take_request(client_id, arguments)
        blocks, num_tokens = self._manager.get_computed_blocks(request)
        return {"block_ids": blocks, "num_computed_tokens": num_tokens}

    def _allocate_slots(self, client_id: str, arguments: _Arguments) -> object:
        counts = {
            name: arguments.take(name, int, 0)
            for name in (
                "num_new_tokens",
                "num_new_computed_tokens",
                "num_draft_tokens",
                "num_lookahead_tokens",
                "num_external_computed_tokens",
                "num_encoder_tokens",
            )
        }
        delays = arguments.take("delay_cache_blocks", bool, False)
        tables = arguments.take("new_computed_blocks", list, [])
        computed = [_ids("new_computed_blocks", table).tolist() for table in tables]
        request = self._take_request(client_id, arguments)
        blocks = self._manager.allocate_slots(
            request,
            new_computed_blocks=KVCacheBlocks(computed) if computed else None,
            delay_cache_blocks=delays,
            **counts,
        )
        if blocks is None:
            return None
        slot = self._manager.slot_of(request.request_id)
        return {"block_ids": blocks, "unhashed": _packed(blocks, unhashed=True), "slot": slot}

    def _fork(self, client_id: str, arguments: _Arguments) -> object:
        of_parent, of_child = arguments.take("parent", dict), arguments.take("request", dict)
        arguments.require_empty()
        child_id = of_child.get("request_id")
        if isinstance(child_id, str) and self._manager.get_request(child_id) is not None:
            # Updating it would append the child's tokens to the known one.
            raise RequestError(f"request {child_id} is to be a child but known: use another id")
        parent, child = self._bring(client_id, of_parent), self._bring(client_id, of_child)
        blocks = self._manager.fork(parent, child)
        if blocks is None:
            return None
        return {"block_ids": blocks, "slot": self._manager.slot_of(child.request_id)}

    def _cache_blocks(self, client_id: str, arguments: _Arguments) -> object:
        num_tokens = arguments.take("num_computed_tokens", int)
        request = self._take_request(client_id, arguments)
        self._manager.cache_blocks(request, num_tokens)
        return None

    def _free(self, client_id: str, arguments: _Arguments) -> object:
        request_id = arguments.take("request_id", str)
        hints = arguments.take_hints(request_id)
        arguments.require_empty()
        request = self._requests.get(client_id, {}).get(request_id)
        if request is not None:
            if hints is not None:
                request.hints = hints
            self._manager.free(request)
            del self._requests[client_id][request_id]
        return None

    def _free_block_hashes(self, client_id: str, arguments: _Arguments) -> object:
        self._manager.free_block_hashes(self._take_request(client_id, arguments))
        return None

    def _get_block_ids(self, client_id: str, arguments: _Arguments) -> object:
        request_id = arguments.take("request_id", str)
        arguments.require_empty()
        return self._manager.get_blocks(request_id)

    def _common_prefix(self, client_id: str, arguments: _Arguments) -> object:
        num_running = arguments.take("num_running_requests", int)
        request = self._take_request(client_id, arguments)
        return self._manager.get_num_common_prefix_blocks(request, num_running)

    def _usage(self, client_id: str, arguments: _Arguments) -> object:
        arguments.require_empty()
        return self._manager.usage

    def _reset_prefix_cache(self, client_id: str, arguments: _Arguments) -> object:
        drain = arguments.take("drain", bool, False)
        arguments.require_empty()
        return self._manager.reset_prefix_cache(drain=drain)

    def _begin_model_epoch(self, client_id: str, arguments: _Arguments) -> object:
        arguments.require_empty()
        return self._manager.begin_model_epoch()

    def _evict_blocks(self, client_id: str, arguments: _Arguments) -> object:
        block_ids = arguments.take_ids("block_ids").tolist()
        arguments.require_empty()
        self._manager.evict_blocks(block_ids)
        return None

    def _pin_prefix(self, client_id: str, arguments: _Arguments) -> object:
        tokens, ttl_s = arguments.take_ids("token_ids"), arguments.take("ttl_s", float)
        lora = arguments.take_lora()
        salt, tenant = (arguments.take_optional_text(n) for n in ("cache_salt", "tenant"))
        arguments.require_empty()
        return self._manager.pin_prefix(tokens, ttl_s, lora=lora, cache_salt=salt, tenant=tenant)

    def _prefetch_prefix(self, client_id: str, arguments: _Arguments) -> object:
        tokens, lora = arguments.take_ids("token_ids"), arguments.take_lora()
        salt, tenant = (arguments.take_optional_text(n) for n in ("cache_salt", "tenant"))
        arguments.require_empty()
        return self._manager.prefetch_prefix(tokens, lora=lora, cache_salt=salt, tenant=tenant)

    def _unpin_prefix(self, client_id: str, arguments: _Arguments) -> object:
        pin = Pin(arguments.take("pin_id", int), 0, 0, 0.0)
        arguments.require_empty()
        return self._manager.unpin_prefix(pin)

    def _make_prefix_cache_stats(self, client_id: str, arguments: _Arguments) -> object:
        arguments.require_empty()
        return self._manager.make_prefix_cache_stats()

    def _statistics(self, client_id: str, arguments: _Arguments) -> object:
        arguments.require_empty()
        return self._manager.statistics()

    def _take_request(self, client_id: str, arguments: _Arguments) -> Request:
        """Return the request in the arguments, created or updated."""
        values = arguments.take("request", dict)
        arguments.require_empty()
        return self._bring(client_id, values)

    def _bring(self, client_id: str, values: dict[str, Any]) -> Request:
        """Return the request in `values`, created or updated."""
        if not set(values) <= _REQUEST_KEYS:
            raise RequestError(f"request does not know {sorted(map(str, set(values)))}")
        what = _Arguments("request", pack_values(values))
        request_id, start = what.take("request_id", str), what.take("start", int, 0)
        token_ids, computed = what.take_ids("token_ids"), what.take("num_computed_tokens", int, 0)
        hints = what.take_hints(request_id)
        own = self._requests.setdefault(client_id, {})
        request = own.get(request_id)
        if start == 0 and request is not None and self._manager.get_request(request_id) is None:
            # A refused call left it behind: the client sends the whole request again.
            request = None
        if request is None:
            if start or (request_id not in own and len(own) >= MAX_REQUESTS_PER_CLIENT):
                raise RequestError(
                    f"request {request_id!r} is not known, or {len(own)} are, the limit: send it "
                    "from token 0, and free finished requests"
                )
            request = self._make_request(request_id, token_ids, what)
            _advance(request, request.num_tokens, token_ids[request.num_tokens :], computed)
            own[request_id] = request
        else:
            _advance(request, start, token_ids, computed)
        if hints is not None:
            request.hints = hints
        return request

    def _make_request(self, request_id: str, token_ids: Int32Array, what: _Arguments) -> Request:
        num_prompt = what.take("num_prompt_tokens", int, len(token_ids))
        mm_hashes = what.take_names("mm_hashes")
        offsets, lengths = (what.take_ids(n).tolist() for n in ("mm_offsets", "mm_lengths"))
        if len(offsets) != len(lengths):
            raise RequestError(f"request {request_id!r}: unequal mm_offsets and mm_lengths")
        lora = what.take_lora()
        salt, tenant = (what.take_optional_text(n) for n in ("cache_salt", "tenant"))
        skip = what.take("skip_reading_prefix_cache", bool, False)
        what.require_empty()
        return Request(
            request_id,
            token_ids[: max(0, num_prompt)],
            lora=lora,
            mm_positions=list(zip(offsets, lengths, strict=True)),
            mm_hashes=mm_hashes,
            cache_salt=salt,
            skip_reading_prefix_cache=skip,
            tenant=tenant,
            model_epoch=self._manager.model_epoch,
        )


METHODS: Mapping[str, _Method] = {
    "get_computed_blocks": RemoteCalls._get_computed_blocks,
    "allocate_slots": RemoteCalls._allocate_slots,
    "fork": RemoteCalls._fork,
    "cache_blocks": RemoteCalls._cache_blocks,
    "free": RemoteCalls._free,
    "free_block_hashes": RemoteCalls._free_block_hashes,
    "get_block_ids": RemoteCalls._get_block_ids,
    "get_num_common_prefix_blocks": RemoteCalls._common_prefix,
    "usage": RemoteCalls._usage,
    "reset_prefix_cache": RemoteCalls._reset_prefix_cache,
    "begin_model_epoch": RemoteCalls._begin_model_epoch,
    "evict_blocks": RemoteCalls._evict_blocks,
    "pin_prefix": RemoteCalls._pin_prefix,
    "prefetch_prefix": RemoteCalls._prefetch_prefix,
    "unpin_prefix": RemoteCalls._unpin_prefix,
    "make_prefix_cache_stats": RemoteCalls._make_prefix_cache_stats,
    "statistics": RemoteCalls._statistics,
}
"""The methods that a call may name."""


def _advance(request: Request, start: int, token_ids: Int32Array, num_computed: int) -> None:
    """Append new tokens and set the number of computed ones; unchanged if invalid."""
    if not 0 <= start <= request.num_tokens or start + len(token_ids) < request.num_tokens:
        raise RequestError(
            f"request {request.request_id}: tokens [{start}, {start + len(token_ids)}) do not go "
            f"on from the {request.num_tokens} known ones: send those behind them"
        )
    if not np.array_equal(request.all_token_ids[start:], token_ids[: request.num_tokens - start]):
        raise RequestError(
            f"request {request.request_id}: tokens [{start}, {request.num_tokens}) differ from the "
            "known ones: free it, or use another id"
        )
    new = token_ids[request.num_tokens - start :]
    if not 0 <= num_computed <= request.num_tokens + len(new):
        raise RequestError(
            f"request {request.request_id}: {num_computed} computed tokens of "
            f"{request.num_tokens + len(new)}: pass 0 to that number"
        )
    if len(new):
        request.append_output_token_ids(new)
    request.num_computed_tokens = num_computed


def _ids(what: str, value: object) -> Int32Array:
    if type(value) is not bytes or len(value) % 4:
        raise RequestError(f"{what} is not a packed int32 array: pass its little-endian bytes")
    return np.frombuffer(value, "<i4").astype(np.int32, copy=False)


def _packed(blocks: KVCacheBlocks, *, unhashed: bool = False) -> list[bytes]:
    tables: Sequence[Sequence[int]]
    tables = blocks.get_unhashed_block_ids() if unhashed else blocks.get_block_ids()
    return [int32_array(table).astype("<i4").tobytes() for table in tables]


def _plain(value: object) -> object:
    """Return a value that msgpack can pack in place of `value`."""
    if isinstance(value, KVCacheBlocks):
        return _packed(value)
    if isinstance(value, np.ndarray):
        return value.astype("<i4").tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} cannot be packed")
