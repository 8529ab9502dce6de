"""What tells equal tokens of two requests apart: adapter, multimodal items, namespace.

Refuses text that cannot be hashed, and items outside the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import cbor2

from kvcache.base.arguments import as_int, as_text, as_tuple, check_fields
from kvcache.base.errors import MalformedMessageError, RequestError, shown


@dataclass(frozen=True)
class LoRARequest:
    """The adapter a request runs with. Both parts enter every block's digest.

    Raises:
        RequestError: the name is empty, or a part is not text that UTF-8 can encode.
    """

    name: str
    path: str

    def __post_init__(self) -> None:
        name = as_text("LoRA name", self.name, RequestError)
        path = as_text("LoRA path", self.path, RequestError, may_be_empty=True)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "path", path)


@dataclass(frozen=True)
class MultiModalPosition:
    """The placeholder tokens of one multimodal item: `[offset, offset + length)`.

    Raises:
        RequestError: the offset is negative or the length is below 1.
    """

    offset: int
    length: int

    def __post_init__(self) -> None:
        offset = as_int("offset of a multimodal position", self.offset, error=RequestError)
        length = as_int("length of a multimodal position", self.length, 1, error=RequestError)
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "length", length)

    @property
    def end(self) -> int:
        """First token after the item."""
        return self.offset + self.length


@dataclass(frozen=True)
class Namespace:
    """What separates equal tokens that must not share blocks.

    Part of look-up keys, block labels and tier directories. `lora` is the adapter's name and path
    as a JSON array, so that two adapters never have the same text.

    Raises:
        RequestError: the epoch is not an integer of at least 0, or another part is not text.
    """

    model_epoch: int
    lora: str | None
    salt: str | None
    tenant: str | None

    def __post_init__(self) -> None:
        check_fields(self, as_int, "model_epoch", error=RequestError)
        for name in ("lora", "salt", "tenant"):
            value = getattr(self, name)
            if value is not None:
                as_text(name, value, RequestError, may_be_empty=True)


DEFAULT_NAMESPACE = Namespace(model_epoch=0, lora=None, salt=None, tenant=None)
"""The namespace of requests without adapter, salt or tenant under the first weights: one object,
compared by identity."""

MAX_NAMES = 1024
"""Number of namespace names that are cached, the latest ones."""


@lru_cache(MAX_NAMES)
def namespace_name(namespace: Namespace) -> bytes:
    """Return the canonical bytes of a namespace, as in labels."""
    return cbor2.dumps(
        [namespace.model_epoch, namespace.lora, namespace.salt, namespace.tenant], canonical=True
    )


def parse_namespace_name(name: bytes) -> Namespace:
    """Return the namespace from its `namespace_name`; raises MalformedMessageError."""
    try:
        epoch, *rest = cbor2.loads(name)
    except (cbor2.CBORDecodeError, TypeError, ValueError) as error:
        raise MalformedMessageError(f"namespace name {name!r} is not readable: {error}") from error
    if (
        type(epoch) is not int
        or len(rest) != 3
        or not all(part is None or isinstance(part, str) for part in rest)
    ):
        raise MalformedMessageError(f"namespace name {name!r} is not an epoch and three texts")
    try:
        return Namespace(epoch, *rest)
    except RequestError as error:
        raise MalformedMessageError(f"namespace name {name!r} is not readable: {error}") from error


def sorted_items(
    request_id: str,
    mm_positions: Sequence[MultiModalPosition | tuple[int, int]],
    mm_hashes: Sequence[str],
    num_prompt_tokens: int,
) -> list[tuple[MultiModalPosition, str]]:
    """Multimodal items in order of position, each with its hash.

    Raises:
        RequestError: numbers differ, or an item is outside the prompt.
    """
    mm_positions = as_tuple(f"request {request_id}: mm_positions", mm_positions, RequestError)
    mm_hashes = as_tuple(f"request {request_id}: mm_hashes", mm_hashes, RequestError)
    if len(mm_hashes) != len(mm_positions):
        raise RequestError(
            f"request {request_id}: {len(mm_hashes)} mm_hashes for {len(mm_positions)} "
            "mm_positions: pass one hash per position"
        )
    items = []
    for given, given_hash in zip(mm_positions, mm_hashes, strict=True):
        mm_hash = as_text(f"request {request_id}: multimodal hash", given_hash, RequestError)
        if isinstance(given, MultiModalPosition):
            position = given
        elif isinstance(given, (tuple, list)) and len(given) == 2:
            position = MultiModalPosition(*given)
        else:
            raise RequestError(
                f"request {request_id}: multimodal position {shown(given)}: pass a "
                "MultiModalPosition or a pair (offset, length)"
            )
        if position.end > num_prompt_tokens:
            raise RequestError(
                f"request {request_id}: multimodal item {mm_hash} is at tokens "
                f"[{shown(position.offset)}, {shown(position.end)}), but the prompt has "
                f"{num_prompt_tokens} tokens: items lie inside the prompt"
            )
        items.append((position, mm_hash))
    return sorted(items, key=lambda item: item[0].offset)


def lora_label(lora: LoRARequest | None) -> str | None:
    """The adapter as text, for a `Namespace`."""
    return None if lora is None else json.dumps([lora.name, lora.path], ensure_ascii=False)
