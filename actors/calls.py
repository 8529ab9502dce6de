"""Encodes per-request calls and decodes their answers.

client.py makes the calls, and its connection sends them. A request's tokens travel once: the client
remembers how many of them the coordinator knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.coordinator.remote_calls import pack_values, unpack_values
from kvcache.requests.request import LoRARequest, Request

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteCall(Generic[T]):
    """A call ready to be sent, and the decoder of its answer. `on_served` is called once it was
    executed."""

    method: str
    arguments: Mapping[str, Any]
    read: Callable[[Any], T]
    on_served: Callable[[], None] = lambda: None

    def pack(self) -> bytes:
        """Return the encoded arguments."""
        return pack_values(self.arguments)

    def answer(self, packed: bytes) -> T:
        """Decode an answer, and note that the call was served."""
        self.on_served()
        return self.read(unpack_values(packed))


class SentTokens:
    """How many tokens of each request the coordinator knows; makes calls that add the rest."""

    def __init__(self) -> None:
        self._num_sent: dict[str, int] = {}

    def forget_all(self) -> None:
        """Note that an epoch has ended: the coordinator knows no request."""
        self._num_sent.clear()

    def forget(self, request_id: str) -> None:
        """Note that the coordinator has freed the request."""
        self._num_sent.pop(request_id, None)

    def remember(self, request_id: str, num_tokens: int) -> None:
        """Note how many tokens of the request the coordinator has received."""
        self._num_sent[request_id] = num_tokens

    def call(
        self, method: str, request: Request, arguments: Mapping[str, Any], read: Callable[[Any], T]
    ) -> RemoteCall[T]:
        """Return a call about a request, with the tokens that the coordinator does not know."""
        return RemoteCall(
            method,
            {**arguments, "request": self.describe(request)},
            read,
            partial(self.remember, request.request_id, request.num_tokens),
        )

    def describe(self, request: Request) -> dict[str, Any]:
        """Return the encoded request: at first all of it, later only unknown tokens."""
        start = self._num_sent.get(request.request_id, 0)
        described: dict[str, Any] = {
            "request_id": request.request_id,
            "start": start,
            "token_ids": pack_ids(request.all_token_ids[start:]),
            "num_computed_tokens": request.num_computed_tokens,
            "hints": request.hints,
        }
        if start == 0:
            described["num_prompt_tokens"] = request.num_prompt_tokens
            described["skip_reading_prefix_cache"] = request.skip_reading_prefix_cache
            described["mm_hashes"] = list(request.mm_hashes)
            described["mm_offsets"] = pack_ids([p.offset for p in request.mm_positions])
            described["mm_lengths"] = pack_ids([p.length for p in request.mm_positions])
            described.update(pack_texts(request.lora, request.cache_salt, request.namespace.tenant))
        return described


def pack_texts(
    lora: LoRARequest | None, cache_salt: str | None, tenant: str | None
) -> dict[str, str | None]:
    """Return the parts of a namespace that are set."""
    texts = {
        "lora_name": None if lora is None else lora.name,
        "lora_path": None if lora is None else lora.path,
        "cache_salt": cache_salt,
        "tenant": tenant,
    }
    return {name: text for name, text in texts.items() if text is not None}


def pack_ids(values: Any) -> bytes:
    """Return encoded token or block ids."""
    return int32_array(values).astype("<i4").tobytes()


def tables_of(packed: Sequence[bytes]) -> list[list[int]]:
    """Decode the block tables of an answer."""
    return [np.frombuffer(table, "<i4").tolist() for table in packed]
