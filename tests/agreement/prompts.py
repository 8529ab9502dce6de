"""Random tokens: few different ones, so that prefixes often coincide."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.agreement.configurations import Configuration, Operation
from tests.agreement.content import Image, Origin

ORIGINS = (Origin(), Origin(), Origin(), Origin(salt="s"), Origin(lora="l"), Origin(tenant="t"))

MAX_LIBRARY = 12


class Prompts:
    """Random prompts and output tokens."""

    def __init__(self, configuration: Configuration, rng: random.Random) -> None:
        self._rng = rng
        self._operations = configuration.operations
        self._max_tokens = configuration.max_model_len - 24
        self._templates = [[rng.randrange(3) for _ in range(44)] for _ in range(3)]
        self.library: list[tuple[Origin, tuple[int, ...]]] = []

    def output(self, tokens: list[int], count: int) -> tuple[int, ...]:
        """Return tokens that continue `tokens`."""
        for template in self._templates:
            if template[: len(tokens)] == tokens and len(tokens) + count <= len(template):
                return tuple(template[len(tokens) : len(tokens) + count])
        return tuple(self._rng.randrange(3) for _ in range(count))

    def prompt(self) -> tuple[Origin, tuple[int, ...]]:
        """Return a prompt with a long prefix in common with others."""
        rng = self._rng
        origin = rng.choice(ORIGINS) if Operation.NAMESPACES in self._operations else Origin()
        known = [one for one in self.library if one[0].salt == origin.salt]
        if known and rng.random() < 0.3:
            origin, tokens = rng.choice(known)
            return origin, tokens[: self._max_tokens]
        template = rng.choice(self._templates)
        end = rng.choice([rng.randint(1, 40), 8 * rng.randint(1, 5)])
        tail = [rng.randrange(3) for _ in range(rng.choice([0, 0, 1, 5]))]
        tokens = (*template[:end], *tail)
        return self._with_image(origin, tokens), tokens

    def continued(self) -> tuple[Origin, tuple[int, ...]] | None:
        """Return an earlier sequence, cut somewhere; None if there was none."""
        if not self.library:
            return None
        origin, tokens = self._rng.choice(self.library)
        end = self._rng.randint(1, min(len(tokens), self._max_tokens))
        while origin.crosses_image(end):
            end -= 1
        return origin.cut(end), tokens[:end]

    def remember(self, origin: Origin, tokens: list[int]) -> None:
        """Remember a sequence whose prefixes others may use."""
        self.library.append((origin, tuple(tokens)))
        if len(self.library) > MAX_LIBRARY:
            del self.library[self._rng.randrange(len(self.library))]

    def _with_image(self, origin: Origin, tokens: tuple[int, ...]) -> Origin:
        rng = self._rng
        if Operation.IMAGES not in self._operations or len(tokens) < 12 or rng.random() > 0.25:
            return origin
        # An image's hash says how long the image is.
        return replace(
            origin, images=(Image(3, *rng.choice([(2, "cat"), (6, "dog"), (6, "cow")])),)
        )
