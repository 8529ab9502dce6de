"""Labels whose digest does not follow from the rest of what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cbor2
import pytest

from kvcache.blocks.label_digests import wrong_digests
from kvcache.hashing import get_hash_fn
from kvcache.labels import BlockLabel
from kvcache.request import LoRARequest
from tests.core.builders import full, make_flat_core, make_request, run_request, window
from tests.core.labels import label_table
from tests.rebuild.ranks import packed

HASH_FN = get_hash_fn("sha256")

CONTENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "an adapter and a salt": {"lora": LoRARequest("a", "b"), "cache_salt": "s"},
    "an image": {"mm_positions": [(2, 9)], "mm_hashes": ["cat"]},
}


def labels_of(**options: Any) -> list[BlockLabel]:
    """Return the labels of a prompt in blocks of 4 and of 8 tokens, of 4 first."""
    core = make_flat_core(20, full(), window(40, 8))
    run_request(core, make_request("a", range(24), **options))
    return list(label_table(core, 20, 8).collect(0, 1, 1, "layout"))


@pytest.mark.parametrize("name", CONTENTS)
def test_what_a_core_says_is_right(name: str) -> None:
    labels = labels_of(**CONTENTS[name])
    assert len(labels) == 9
    assert not len(wrong_digests(packed(labels), HASH_FN, 4))


SPOILT: dict[str, Callable[[BlockLabel], BlockLabel]] = {
    "digest": lambda one: replace(one, digest=bytes(32)),
    "parent": lambda one: replace(one, parent_digest=bytes(32)),
    "tokens": lambda one: replace(one, token_ids=(*one.token_ids[:-1], 99)),
    "fewer tokens": lambda one: replace(one, token_ids=one.token_ids[:-1]),
    "no tokens": lambda one: replace(one, token_ids=()),
    "keys": lambda one: replace(one, extra_keys=cbor2.dumps([["cache_salt", "t"]])),
    "unreadable keys": lambda one: replace(one, extra_keys=b"\xff"),
}


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("content", ["plain", "an adapter and a salt"])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_digest_that_does_not_fit_is_found(name: str, content: str, place: int) -> None:
    labels = labels_of(**CONTENTS[content])
    labels[place] = SPOILT[name](labels[place])
    assert wrong_digests(packed(labels), HASH_FN, 4).tolist() == [labels[place].block_id]


def test_digests_of_another_length_are_all_wrong() -> None:
    label = replace(labels_of()[0], digest=bytes(16), parent_digest=bytes(16))
    assert wrong_digests(packed([label], 16), HASH_FN, 4).tolist() == [label.block_id]
