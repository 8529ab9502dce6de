"""What sets a request's content apart from equal tokens: adapter, multimodal items, namespace.

Stands above requests, which check here what a caller hands in beside tokens. Refuses text that
cannot be hashed, and items that do not lie inside the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.errors import RequestError, shown


@dataclass(frozen=True)
class LoRARequest:
    """The adapter a request runs with. Both parts enter every block's digest.

    Raises:
        RequestError: the name is empty, or a part is not text that UTF-8 can encode.
    """

    name: str
    path: str

    def __post_init__(self) -> None:
        check_text("LoRA name", self.name)
        check_text("LoRA path", self.path, may_be_empty=True)


@dataclass(frozen=True)
class MultiModalPosition:
    """Where the placeholder tokens of one multimodal item stand: `[offset, offset + length)`.

    Raises:
        RequestError: the offset is negative or the length is below 1.
    """

    offset: int
    length: int

    def __post_init__(self) -> None:
        if type(self.offset) is not int or type(self.length) is not int:
            raise RequestError(
                f"multimodal position (offset {shown(self.offset)}, length "
                f"{shown(self.length)}): both must be plain integers"
            )
        if self.offset < 0 or self.length < 1:
            raise RequestError(
                f"multimodal position (offset {shown(self.offset)}, length "
                f"{shown(self.length)}): offset must be at least 0 and length at least 1"
            )

    @property
    def end(self) -> int:
        """First token behind the item."""
        return self.offset + self.length


@dataclass(frozen=True)
class Namespace:
    """What separates equal tokens that must not share blocks.

    A component of in-memory look-up keys, of block labels and of tier directories. `lora` is the
    adapter's name and path as a JSON array, so that no two adapters read the same.
    """

    model_epoch: int
    lora: str | None
    salt: str | None
    tenant: str | None


def sorted_items(
    request_id: str,
    mm_positions: Sequence[MultiModalPosition | tuple[int, int]],
    mm_hashes: Sequence[str],
    num_prompt_tokens: int,
) -> list[tuple[MultiModalPosition, str]]:
    """Multimodal items in order of position, each with its hash.

    Raises:
        RequestError: unequal numbers, or an item that does not lie inside the prompt.
    """
    for name, items_given in (("mm_positions", mm_positions), ("mm_hashes", mm_hashes)):
        if isinstance(items_given, str) or not isinstance(items_given, Sequence):
            raise RequestError(
                f"request {request_id}: {name} is {shown(items_given)}: pass a list, one entry "
                "per item"
            )
    if len(mm_hashes) != len(mm_positions):
        raise RequestError(
            f"request {request_id}: {len(mm_hashes)} mm_hashes for {len(mm_positions)} "
            "mm_positions: pass one hash per position"
        )
    items = []
    for given, mm_hash in zip(mm_positions, mm_hashes, strict=True):
        check_text(f"request {request_id}: multimodal hash", mm_hash)
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
                f"request {request_id}: multimodal item {mm_hash} stands at tokens "
                f"[{shown(position.offset)}, {shown(position.end)}), but the prompt has "
                f"{num_prompt_tokens} tokens: items lie inside the prompt"
            )
        items.append((position, mm_hash))
    return sorted(items, key=lambda item: item[0].offset)


def lora_label(lora: LoRARequest | None) -> str | None:
    """The adapter as a `Namespace` states it."""
    return None if lora is None else json.dumps([lora.name, lora.path], ensure_ascii=False)


def check_text(what: str, text: object, *, may_be_empty: bool = False) -> None:
    """Raise RequestError unless `text` is a str that can be hashed and sent."""
    if not isinstance(text, str) or not (text or may_be_empty):
        raise RequestError(
            f"{what} is {shown(text)}: pass a {'' if may_be_empty else 'non-empty '}str"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{what} is {shown(text)}: pass text that UTF-8 can encode") from None
