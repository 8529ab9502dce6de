"""By what units are matched: equal bytes exactly for equal tokens with equal items."""

from __future__ import annotations

import random

import pytest

from kvcache.extents.match_tokens import MatchTokens, numbers_in
from kvcache.request import Request
from tests.managers.core_builders import make_request

UNIT = 4


def some_request(choose: random.Random, number: int) -> Request:
    tokens = [choose.randrange(2) for _ in range(6 * UNIT)]
    positions, hashes, at = [], [], 0
    while choose.random() < 0.6:
        at += choose.randrange(6)
        length = choose.randrange(1, 7)
        if at + length > len(tokens):
            break
        positions.append((at, length))
        hashes.append(choose.choice(["cat", "dog"]))
        at += length
    return make_request(f"r{number}", tokens, mm_positions=positions, mm_hashes=hashes)


@pytest.mark.parametrize("seed", range(3))
def test_units_match_exactly_when_their_digests_are_equal(seed: int) -> None:
    print(f"seed {seed}")
    choose = random.Random(seed)
    match_tokens = MatchTokens(UNIT)
    by_digest: dict[bytes, bytes] = {}
    for number in range(150):
        request = some_request(choose, number)
        matched = match_tokens.of(request, 0, 6)
        for unit, digest in enumerate(request.block_hashes):
            prefix = matched[: (unit + 1) * UNIT * 4]
            assert by_digest.setdefault(digest, prefix) == prefix
    assert len(set(by_digest.values())) == len(by_digest)


def test_a_part_of_a_request_has_that_part_of_its_match_tokens() -> None:
    choose = random.Random(7)
    match_tokens = MatchTokens(UNIT)
    request = some_request(choose, 0)
    while len(request.mm_positions) < 2:
        request = some_request(choose, 0)
    whole = match_tokens.of(request, 0, 6)
    for first in range(6):
        for end in range(first, 7):
            part = whole[first * UNIT * 4 : end * UNIT * 4]
            assert match_tokens.of(request, first, end) == part


def test_tokens_without_items_match_by_themselves() -> None:
    request = make_request("r", [5, 6, 7, 8])
    match_tokens = MatchTokens(UNIT)
    assert match_tokens.of(request, 0, 1) == request.all_token_ids.tobytes()
    assert len(match_tokens) == 0


def one_image(number: int) -> Request:
    return make_request("r", [5] * UNIT, mm_positions=[(0, 4)], mm_hashes=[f"image {number}"])


def test_numbers_in_use_are_kept_when_others_are_forgotten() -> None:
    match_tokens = MatchTokens(UNIT)
    used = match_tokens.of(one_image(0), 0, 1)
    count = 1
    while not match_tokens.is_crowded(1):
        match_tokens.of(one_image(count), 0, 1)
        count += 1
    match_tokens.forget_unused(numbers_in(used, UNIT), 1)
    assert len(match_tokens) == 1
    assert match_tokens.of(one_image(0), 0, 1) == used
    assert match_tokens.of(one_image(1), 0, 1) != used
