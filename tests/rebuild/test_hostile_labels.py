"""Labels that all ranks agree on and that must be wrong: cores drop them, without an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cbor2
import numpy as np
import pytest

from kvcache.base.errors import BlockError
from kvcache.core.flat_core import FlatCore
from kvcache.protocol.commands import Unlabel
from kvcache.protocol.labels import BlockLabel, LabelSet
from kvcache.requests.hashing import BlockHash, get_hash_fn
from kvcache.requests.request import LoRARequest, Request
from kvcache.requests.request_content import Namespace, namespace_name
from kvcache.specs import KVCacheSpec
from tests.core.builders import (
    NONE_HASH,
    eviction_order,
    full,
    make_flat_core,
    make_request,
    run_request,
    window,
)
from tests.rebuild.ranks import packed

HASH_FN = get_hash_fn("sha256")
NO_NAMESPACE = namespace_name(Namespace(0, None, None, None))


BELOW_ZERO = (1, 1, -1, 1)


def digest_of(parent: bytes, tokens: Sequence[int]) -> BlockHash:
    """Return a block's digest, also of tokens that no request can have."""
    return HASH_FN.hash_block(parent, np.array(tokens, "<i4").tobytes(), None)


def label_of(
    block_id: int,
    parent: bytes,
    tokens: Sequence[int],
    *,
    group: int = 0,
    namespace: bytes = NO_NAMESPACE,
    extra_keys: bytes = b"",
) -> BlockLabel:
    """Return a label whose digest is that of its parent and tokens."""
    digest = digest_of(parent, tokens)
    return BlockLabel(block_id, group, -1, digest, parent, tuple(tokens), namespace, extra_keys)


def chain_of(*block_ids: int) -> list[BlockLabel]:
    """Return the labels of a prompt of ones, twos, threes, ... in these blocks."""
    labels: list[BlockLabel] = []
    for number, block_id in enumerate(block_ids, 1):
        parent = labels[-1].digest if labels else NONE_HASH
        labels.append(label_of(block_id, parent, [number] * 4))
    return labels


def prompt(num_blocks: int, **options: Any) -> Request:
    tokens = [number for number in range(1, num_blocks + 1) for _ in range(4)]
    return make_request("probe", [*tokens, 9], **options)


def restored(
    labels: Sequence[BlockLabel] | LabelSet, *specs: KVCacheSpec
) -> tuple[FlatCore, int, list[int]]:
    """Return a core rebuilt from two ranks' labels, its kept blocks, and dropped labels."""
    core = make_flat_core(20, *specs)
    label_set = labels if isinstance(labels, LabelSet) else packed(labels)
    num_kept = core.cache.restore([label_set, label_set])
    core.check()
    assert core.cache.num_free_blocks() == 19
    withdrawn: list[int] = []
    for command in core.take_commands():
        assert isinstance(command, Unlabel)
        withdrawn += command.block_ids.tolist()
    return core, num_kept, withdrawn


SPOILT: dict[str, Callable[[BlockLabel], BlockLabel]] = {
    "a group that is not there": lambda one: replace(one, group=1),
    "a group below zero": lambda one: replace(one, group=-1),
    "too few tokens": lambda one: replace(one, token_ids=one.token_ids[:3]),
    "too many tokens": lambda one: replace(one, token_ids=one.token_ids * 2),
    "no tokens": lambda one: replace(one, token_ids=()),
    "a token below zero": lambda one: replace(
        one, token_ids=BELOW_ZERO, digest=digest_of(one.parent_digest, BELOW_ZERO)
    ),
    "an unknown parent": lambda one: replace(one, parent_digest=bytes(32)),
    "itself as its parent": lambda one: replace(one, parent_digest=one.digest),
    "the digest of no block": lambda one: replace(one, digest=NONE_HASH),
    "an unreadable namespace": lambda one: replace(one, namespace=b"\xff"),
    "no namespace": lambda one: replace(one, namespace=cbor2.dumps([0, None])),
    "an adapter in its namespace only": lambda one: replace(
        one, namespace=namespace_name(Namespace(0, '["a", "b"]', None, None))
    ),
    "an adapter in its keys only": lambda one: replace(
        one, extra_keys=cbor2.dumps([["lora", "a", "b"]])
    ),
    "half an adapter": lambda one: replace(one, extra_keys=cbor2.dumps([["lora", "a"]])),
    "a nameless adapter": lambda one: replace(one, extra_keys=cbor2.dumps([["lora", "", "b"]])),
    "the salt of another": lambda one: replace(one, extra_keys=cbor2.dumps([["cache_salt", "s"]])),
    "unreadable keys": lambda one: replace(one, extra_keys=b"\xff"),
    "the same namespace spelt differently": lambda one: replace(
        one, namespace=b"\x9f\x00\xf6\xf6\xf6\xff"
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_label_that_cannot_be_right_takes_along_what_continues_it(name: str) -> None:
    first, second, third = chain_of(5, 6, 7)
    labels = [first, SPOILT[name](second), third]
    core, num_kept, withdrawn = restored(labels)
    assert (num_kept, withdrawn) == (1, [6, 7])
    assert core.cache.look_up(prompt(3)).num_tokens == 4


def test_a_label_with_another_digest_leaves_those_before_it() -> None:
    first, second, third = chain_of(5, 6, 7)
    wrong = replace(third, digest=type(third.digest)(b"x" * 32))
    core, num_kept, _ = restored([first, second, wrong])
    assert num_kept >= 2
    assert core.cache.look_up(prompt(3)).num_tokens >= 8


def test_a_label_with_the_right_digest_behind_one_with_another_is_dropped() -> None:
    first, second, third = chain_of(5, 6, 7)
    other = type(second.digest)(b"x" * 32)
    labels = [first, replace(second, digest=other), replace(third, parent_digest=other)]
    _, num_kept, withdrawn = restored(labels)
    assert (num_kept, withdrawn) == (1, [6, 7])


def test_labels_of_blocks_that_are_not_there_are_passed_over() -> None:
    first, second = chain_of(5, 6)
    strays = [replace(label, block_id=b) for b in (-1, 0, 20, 2**31 - 1) for label in (second,)]
    core, num_kept, withdrawn = restored([*strays, first])
    assert (num_kept, withdrawn) == (1, [])
    core, num_kept, withdrawn = restored([*strays, first, second])
    assert (num_kept, withdrawn) == (2, [])
    assert core.cache.look_up(prompt(2)).num_tokens == 8


def test_digests_of_another_length_are_worth_nothing() -> None:
    label = replace(chain_of(5)[0], digest=bytes(16), parent_digest=bytes(16))
    assert restored(packed([label], 16))[1:] == (0, [5])
    core = make_flat_core(20)
    assert core.cache.restore([packed([label], 16), packed(chain_of(5))]) == 0
    core.check()


def test_blocks_that_go_round_in_a_circle_have_no_beginning() -> None:
    first, second, third = chain_of(5, 6, 7)
    labels = [
        first,
        replace(second, parent_digest=b"b" * 32, digest=b"a" * 32),
        replace(third, parent_digest=b"a" * 32, digest=b"b" * 32),
    ]
    for specs in ((full(),), (window(9),)):
        _, num_kept, withdrawn = restored(labels, *specs)
        assert (num_kept, withdrawn) == (1, [6, 7])


def test_of_equal_contents_the_first_block_stays() -> None:
    labels = [*chain_of(8, 3), *chain_of(5, 6)]
    core, num_kept, withdrawn = restored(labels)
    assert (num_kept, withdrawn) == (2, [6, 8])
    assert [ids.tolist() for ids in core.cache.look_up(prompt(2)).block_ids] == [[5, 3]]


def test_two_digests_for_one_place_become_one_block() -> None:
    (first,) = chain_of(5)
    _, num_kept, withdrawn = restored([first, replace(first, block_id=6, digest=bytes([1] * 32))])
    assert (num_kept, withdrawn) == (1, [6])


def test_a_core_in_use_is_not_restored() -> None:
    core = make_flat_core(20)
    run_request(core, make_request("a", [1] * 8))
    with pytest.raises(BlockError) as error:
        core.cache.restore([packed(chain_of(5))])
    assert str(error.value) == (
        "cannot restore: 2 blocks are in use and 2 are cached: restore an empty pool"
    )
    core.check()


def test_tails_of_a_windowed_group_go_first_where_the_prefix_groups_labels_are_lost() -> None:
    labels = [replace(one, group=1) for one in chain_of(5, 6, 7)]
    core, num_kept, _ = restored(labels, full(), window(25))
    assert num_kept == 3
    run_request(core, make_request("filler", [7] * 4 * 9))  # of 19 blocks it takes 18
    tokens = core.store.columns.tokens
    kept = {int(tokens[n, 0]) for n, g, _, _ in core.store.contents() if g == 1}
    assert kept == {1, 7}


def test_one_branch_is_evicted_after_the_other() -> None:
    labels = chain_of(1, 2, 3)
    labels.append(label_of(4, labels[0].digest, [8] * 4))
    labels.append(label_of(5, labels[-1].digest, [9] * 4))
    core, num_kept, _ = restored(labels)
    assert num_kept == 5
    assert eviction_order(core) in ([3, 2, 5, 4, 1], [5, 4, 3, 2, 1])


def test_a_namespace_keeps_its_adapter_and_its_salt() -> None:
    request = prompt(2, lora=LoRARequest("a", "b"), cache_salt="s")
    name, digests = namespace_name(request.namespace), request.block_hashes
    adapter, salt = ["lora", "a", "b"], ["cache_salt", "s"]
    keys = [cbor2.dumps([adapter, salt]), cbor2.dumps([adapter])]
    labels = [
        BlockLabel(5, 0, -1, digests[0], NONE_HASH, (1,) * 4, name, keys[0]),
        BlockLabel(6, 0, -1, digests[1], digests[0], (2,) * 4, name, keys[1]),
    ]
    core, num_kept, _ = restored(labels)
    assert num_kept == 2
    assert core.cache.look_up(prompt(2, lora=LoRARequest("a", "b"), cache_salt="s")).num_tokens == 8
    assert core.cache.look_up(prompt(2)).num_tokens == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda one: replace(one, token_ids=(7, 7, 7, 7)),
        lambda one: replace(one, parent_digest=NONE_HASH),
        lambda one: replace(one, extra_keys=cbor2.dumps([["mm", "cat", 0]])),
    ],
    ids=["tokens", "parent", "keys"],
)
def test_a_block_that_contradicts_a_unit_does_not_belong_to_it(
    spoil: Callable[[BlockLabel], BlockLabel],
) -> None:
    labels = chain_of(1, 2, 3)
    windowed = [replace(one, block_id=one.block_id + 10, group=1) for one in labels]
    core, num_kept, withdrawn = restored(
        [*labels, windowed[0], spoil(windowed[1]), windowed[2]], full(), window(5)
    )
    assert (num_kept, withdrawn) == (5, [12])
    assert [ids.tolist() for ids in core.cache.look_up(prompt(3)).block_ids] == [
        [1, 2, 3],
        [0, 0, 13],
    ]


def test_nothing_is_kept_of_no_ranks_or_no_labels() -> None:
    core = make_flat_core(20)
    assert core.cache.restore([]) == 0
    assert core.cache.restore([packed([])]) == 0
    assert core.take_commands() == []
    core.check()


def test_any_number_of_tenants_is_kept_and_kept_apart() -> None:
    labels = [
        label_of(
            number + 1,
            NONE_HASH,
            [number % 2] * 4,
            namespace=namespace_name(Namespace(0, None, None, f"tenant {number}")),
        )
        for number in range(200)
    ]
    core = make_flat_core(300)
    assert core.cache.restore([packed(labels)]) == 200
    core.check()
    for number in range(200):
        own = make_request("own", [number % 2] * 5, tenant=f"tenant {number}")
        other = make_request("other", [1 - number % 2] * 5, tenant=f"tenant {number}")
        assert core.cache.look_up(own).block_ids[0].tolist() == [number + 1]
        assert core.cache.look_up(other).num_tokens == 0
