"""The bytes by which a request's units are matched: its tokens, and what else sets them apart.

Between requests and the tree. Adapter, salt and tenant are in the namespace, so that only
multimodal items must be told apart here: a unit that one overlaps has, in place of its first token,
a negative number that stands for that token together with the items. Tokens are never negative, so
equal bytes mean equal contents. Refuses to hash.

    tokens      5  9  9  9 | 9  9  7  1          an item over the 9s, blocks of 4
    matched by -1  9  9  9 |-2  9  7  1          -1 is (5, item at 1), -2 is (9, item at -3)
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcache.errors import BlockError
from kvcache.hashing import ExtraKeys, generate_block_hash_extra_keys
from kvcache.request import Request

_MIN_FORGOTTEN = 128
_MAX_NUMBERS = 2**31 - 1


class MatchTokens:
    """Makes match tokens for one unit size, and remembers what its numbers stand for."""

    def __init__(self, unit_tokens: int) -> None:
        """Know no multimodal unit yet."""
        self._unit_tokens = unit_tokens
        self._numbers: dict[tuple[int, ExtraKeys], int] = {}
        self._last = 0

    def __len__(self) -> int:
        """Return how many numbers are known."""
        return len(self._numbers)

    def of(self, request: Request, first_unit: int, end_unit: int) -> bytes:
        """Return the match tokens of units `[first_unit, end_unit)` of a request."""
        size = self._unit_tokens
        if not request.mm_positions:
            return request.token_bytes(first_unit * size, end_unit * size)
        tokens = request.all_token_ids[first_unit * size : end_unit * size]
        marked = tokens.copy()
        for unit in self._overlapped(request, first_unit, end_unit):
            keys = _item_keys(request, unit * size, (unit + 1) * size)
            place = (unit - first_unit) * size
            marked[place] = self._number(int(tokens[place]), keys)
        matched: bytes = marked.tobytes()
        return matched

    def leading(self, request: Request, end_unit: int) -> bytes:
        """Return bytes that begin with the match tokens of units `[0, end_unit)`; more may follow.

        A request has at least so many.
        """
        if request.mm_positions:
            return self.of(request, 0, end_unit)
        return request.leading_token_bytes(end_unit * self._unit_tokens)

    def numbered(self, first_token: int, keys: ExtraKeys) -> int:
        """Return what stands for a unit's first token where it has these extra keys."""
        items = tuple(key for key in keys if key[0] == "mm")
        return self._number(first_token, items) if items else first_token

    def forget_unused(self, used: Iterable[int], num_units: int) -> None:
        """Forget numbers that are not in `used`, if many more are known than there are units."""
        if len(self._numbers) > 2 * num_units + _MIN_FORGOTTEN:
            kept = set(used)
            self._numbers = {key: n for key, n in self._numbers.items() if n in kept}

    def clear(self) -> None:
        """Forget every number, and count from the first one again. Nothing is cached."""
        self._numbers.clear()
        self._last = 0

    def is_crowded(self, num_units: int) -> bool:
        """Say whether it is time to forget."""
        known = self._numbers
        return bool(known) and len(known) > 2 * num_units + _MIN_FORGOTTEN

    def _overlapped(self, request: Request, first_unit: int, end_unit: int) -> list[int]:
        size = self._unit_tokens
        units: set[int] = set()
        for position in request.mm_positions:
            if position.end > position.offset:
                first = max(first_unit, position.offset // size)
                units.update(range(first, min(end_unit, -(-position.end // size))))
        return sorted(units)

    def _number(self, first_token: int, keys: ExtraKeys) -> int:
        if not keys:
            return first_token
        number = self._numbers.get((first_token, keys))
        if number is None:
            if self._last == _MAX_NUMBERS:
                raise BlockError(
                    f"{_MAX_NUMBERS} different multimodal units were cached: reset the prefix cache"
                )
            self._last += 1
            number = self._numbers[first_token, keys] = -self._last
        return number


def num_common(ours: bytes, tokens: bytes, offset: int, max_tokens: int) -> int:
    """Return how many of the first `max_tokens` match tokens are those from byte `offset` on."""
    theirs = np.frombuffer(tokens, np.int32, max_tokens, offset)
    differs = np.frombuffer(ours, np.int32, max_tokens) != theirs
    first = int(differs.argmax())
    return first if differs[first] else max_tokens


def numbers_in(tokens: bytes, unit_tokens: int) -> list[int]:
    """Return the numbers among a run's match tokens."""
    firsts = np.frombuffer(tokens, np.int32)[::unit_tokens]
    numbers: list[int] = firsts[firsts < 0].tolist()
    return numbers


def _item_keys(request: Request, start: int, end: int) -> ExtraKeys:
    keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    return tuple(key for key in keys or () if key[0] == "mm")
