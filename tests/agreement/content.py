"""The contents of requests as numbers, and the reads and writes of one forward.

A number stands for a whole prefix: namespace, images, and all tokens up to a position. Two
positions have the same number exactly if a forward would write the same bytes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvcache.requests.request import LoRARequest, Request

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Image:
    """A multimodal item: placeholders `[offset, offset + length)` of the prompt."""

    offset: int
    length: int
    digest: str


@dataclass(frozen=True)
class Origin:
    """What distinguishes a request's content from equal tokens of others."""

    salt: str | None = None
    lora: str | None = None
    tenant: str | None = None
    images: tuple[Image, ...] = ()

    @property
    def name(self) -> tuple[str | None, str | None, str | None]:
        """Namespace without the model epoch."""
        return self.salt, self.lora, self.tenant

    def cut(self, num_tokens: int) -> Origin:
        """Return the content of a prompt that diverges after `num_tokens`."""
        images = tuple(i for i in self.images if i.offset + i.length <= num_tokens)
        return replace(self, images=images)

    def crosses_image(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` end inside an image."""
        return any(i.offset < num_tokens < i.offset + i.length for i in self.images)

    def request(
        self, request_id: str, tokens: Sequence[int], epoch: int, *, skips_reading: bool = False
    ) -> Request:
        """Return a request of this content for per-request calls."""
        return Request(
            request_id,
            list(tokens),
            lora=None if self.lora is None else LoRARequest(self.lora, f"/{self.lora}"),
            mm_positions=[(image.offset, image.length) for image in self.images],
            mm_hashes=[image.digest for image in self.images],
            cache_salt=self.salt,
            tenant=self.tenant,
            skip_reading_prefix_cache=skips_reading,
            model_epoch=epoch,
        )


@dataclass(frozen=True)
class Forward:
    """One request's part of a forward: positions `[start, own_end)` and the drafts after them.

    `tokens` are the request's own up to `own_end`, then the drafts. The `num_external` positions
    before `start` come from elsewhere and are written first. The state that it continues is
    `num_accepted` columns after that of `last_own` tokens. `step` is the client and step it belongs
    to, so that a failure makes its bytes unknown.
    """

    name: str
    origin: Origin
    tokens: tuple[int, ...]
    start: int
    own_end: int
    num_external: int = 0
    last_own: int = 0
    num_accepted: int = 0
    is_new: bool = False
    encoder_key: str = ""
    step: tuple[str, int] = ("", 0)


@dataclass
class Chains:
    """Numbers of prefixes, from 1 on. 0 means no content."""

    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    _links: dict[int, tuple[int, int]] = field(default_factory=dict)

    def number(self, *key: object) -> int:
        """Return the number of a key; equal keys, equal numbers."""
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def of(self, origin: Origin, epoch: int, tokens: Sequence[int]) -> Numbers:
        """Return the numbers of all prefixes of 1, 2, ... tokens."""
        last = self.number("root", origin.salt, origin.lora, origin.tenant, epoch)
        places = {
            image.offset + i: (image.digest, i)
            for image in origin.images
            for i in range(image.length)
        }
        numbers = np.empty(len(tokens), dtype=np.int64)
        for position, token in enumerate(tokens):
            before, last = last, self.number(last, token, places.get(position))
            self._links[last] = before, token
            numbers[position] = last
        return numbers

    def last_numbers(self, number: int, count: int) -> list[int]:
        """Return the numbers of the last `count` prefixes up to this one, included."""
        numbers = [number]
        while len(numbers) < count:
            numbers.append(self._links[numbers[-1]][0])
        return numbers[::-1]

    def last_tokens(self, number: int, count: int) -> tuple[int, ...]:
        """Return the last `count` tokens of a prefix."""
        return tuple(self._links[n][1] for n in self.last_numbers(number, count))
