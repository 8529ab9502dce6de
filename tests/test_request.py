"""Requests: appending and removing tokens, and mistakes that are refused and change nothing."""

from __future__ import annotations

import copy
import pickle
import random
import re
from array import array

import numpy as np
import pytest

from kvcache.base.errors import MalformedMessageError, RequestError
from kvcache.requests.hashing import get_hash_fn, get_request_block_hasher
from kvcache.requests.request import LoRARequest, MultiModalPosition, Namespace, Request
from kvcache.requests.request_content import namespace_name, parse_namespace_name

TOO_LARGE = 2**31


def refused(message: str):
    return pytest.raises(RequestError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    "ids",
    [
        [5, 0, 1, TOO_LARGE - 1],
        (5, 0, 1, TOO_LARGE - 1),
        array("i", [5, 0, 1, TOO_LARGE - 1]),
        array("q", [5, 0, 1, TOO_LARGE - 1]),
        [np.int64(5), np.int32(0), 1, np.uint32(TOO_LARGE - 1)],
        np.array([5, 0, 1, TOO_LARGE - 1], np.int32),
        np.array([5, 0, 1, TOO_LARGE - 1], ">i4"),
        np.array([5, 0, 1, TOO_LARGE - 1], np.uint64),
        np.array([5, 0, 1, TOO_LARGE - 1], object),
        np.array([5, 9, 0, 9, 1, 9, TOO_LARGE - 1], np.int64)[::2],
    ],
    ids=lambda ids: f"{type(ids).__name__}-{getattr(ids, 'dtype', getattr(ids, 'typecode', ''))}",
)
def test_any_sequence_of_integers_is_kept_as_int32(ids):
    request = Request("r1", ids)
    assert request.all_token_ids.dtype == np.int32
    assert request.all_token_ids.tolist() == [5, 0, 1, TOO_LARGE - 1]
    assert (request.num_tokens, request.num_prompt_tokens) == (4, 4)
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 0)
    request.append_output_token_ids(ids)
    assert request.all_token_ids.tolist() == [5, 0, 1, TOO_LARGE - 1] * 2


def test_a_range_is_a_sequence_of_integers():
    assert Request("r1", range(40)).all_token_ids.tolist() == list(range(40))


@pytest.mark.parametrize(
    ("ids", "index", "shown"),
    [
        ([3, 4, -5, -6], 2, "-5"),
        ([3, TOO_LARGE], 1, "2147483648"),
        ([3, 2**70, -1], 1, "1180591620717411303424"),
        ([3, 4.0, -1], 1, "4.0"),
        ([3, "4"], 1, "'4'"),
        ([3, None], 1, "None"),
        ([3, 1, True], 2, "True"),
        ([False], 0, "False"),
        ([3, 0, np.bool_(True)], 2, "True"),
        ([3, np.int64(-5)], 1, "-5"),
        (["x" * 1000], 0, f"'{'x' * 27}...{'x' * 28}'"),
        (np.array([3, -5, -6], np.int32), 1, "-5"),
        (np.array([3, -5], np.int8), 1, "-5"),
        (np.array([3, TOO_LARGE], np.int64), 1, "2147483648"),
        (np.array([3, 2**64 - 1], np.uint64), 1, "18446744073709551615"),
        (np.array([3.0, 4.0]), 0, "3.0"),
        (np.array([True, False]), 0, "True"),
        (np.array([3, 4.5], object), 1, "4.5"),
        (np.array([1], "m8[s]"), 0, "datetime.timedelta(seconds=1)"),
        (array("f", [1.5]), 0, "1.5"),
    ],
)
def test_the_first_value_that_is_no_token_id_is_named_with_its_index(ids, index, shown):
    rule = "token ids are integers from 0 to 2147483647"
    with refused(f"request r1: prompt token id at index {index} is {shown}: {rule}"):
        Request("r1", ids)
    request = Request("r1", [7])
    with refused(f"request r1: output token id at index {index} is {shown}: {rule}"):
        request.append_output_token_ids(ids)
    assert request.all_token_ids.tolist() == [7]


@pytest.mark.parametrize("fill", [0, 1, 1000])
def test_a_boolean_hides_nowhere_in_a_long_list(fill):
    ids = [fill] * 5000
    ids[4321] = True
    with pytest.raises(RequestError, match="prompt token id at index 4321 is True"):
        Request("r1", ids)


@pytest.mark.parametrize("ids", [b"abcd", bytearray(b"abcd"), "1234", {1, 2}, 7, None, iter([1])])
def test_values_that_are_not_integers_are_refused(ids):
    with refused(
        f"request r1: prompt token ids cannot be read from {type(ids).__name__}: "
        "pass a list, an array or a one-dimensional numpy array of integers"
    ):
        Request("r1", ids)


def test_an_array_with_more_than_one_dimension_is_refused():
    with refused("request r1: prompt token ids of shape (2, 3): pass a one-dimensional array"):
        Request("r1", np.zeros((2, 3), np.int32))


@pytest.mark.parametrize("ids", [[], (), np.array([]), array("i"), range(0)])
def test_an_empty_prompt_is_refused_and_empty_output_is_nothing(ids):
    with refused("request r1: the prompt is empty: pass at least one token"):
        Request("r1", ids)
    request = Request("r1", [7])
    request.append_output_token_ids(ids)
    assert request.num_tokens == 1


def test_a_request_keeps_its_own_copy_of_the_prompt():
    ids = np.array([1, 2, 3], np.int32)
    request = Request("r1", ids)
    ids[0] = 9
    request.append_output_token_ids([4])
    assert request.all_token_ids.tolist() == [1, 2, 3, 4]
    assert ids.tolist() == [9, 2, 3]


def test_a_prompt_over_the_whole_of_bytes_is_not_copied_and_a_part_of_them_is():
    payload = np.array([1, 2, 3, 4], np.int32).tobytes()
    whole = Request("r1", np.frombuffer(payload, np.int32))
    assert whole.token_bytes(0, 4) is payload
    tail = Request("r1", np.frombuffer(payload, np.int32)[1:])
    assert tail.token_bytes(0, 3) == payload[4:]
    turned = Request("r1", np.frombuffer(payload, np.int32)[::-1])
    for request in (whole, tail, turned):
        request.append_output_token_ids([5])
    assert whole.all_token_ids.tolist() == [1, 2, 3, 4, 5]
    assert tail.all_token_ids.tolist() == [2, 3, 4, 5]
    assert turned.all_token_ids.tolist() == [4, 3, 2, 1, 5]
    assert payload == np.array([1, 2, 3, 4], np.int32).tobytes()


def test_the_view_of_all_tokens_cannot_be_written():
    request = Request("r1", [1, 2, 3])
    with pytest.raises(ValueError, match="read-only"):
        request.all_token_ids[0] = 9
    request.append_output_token_ids([4])
    assert request.all_token_ids.tolist() == [1, 2, 3, 4]


@pytest.mark.seeds(20)
def test_appending_and_truncating_behaves_like_a_list(seed):
    rng = random.Random(seed)
    model = [rng.randrange(TOO_LARGE) for _ in range(rng.randint(1, 40))]
    request = Request("r1", model)
    for _ in range(60):
        if rng.random() < 0.7:
            new = [
                rng.randrange(TOO_LARGE) for _ in range(rng.choice([0, 1, 1, 2, 15, 16, 17, 90]))
            ]
            request.append_output_token_ids(rng.choice([list, tuple, np.array])(new))
            model += new
        else:
            length = rng.randint(request.num_prompt_tokens, len(model))
            request.truncate_tokens(length)
            del model[length:]
        assert request.all_token_ids.tolist() == model
        assert request.num_tokens == len(model)


@pytest.mark.parametrize("number", [0, 1, 20])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda request: pickle.loads(pickle.dumps(request))]
)
def test_a_copy_goes_its_own_way(copied, number):
    hasher = get_request_block_hasher(4, get_hash_fn("sha256"))
    request = Request("r", list(range(9)), cache_salt="s", block_hasher=hasher)
    request.append_output_token_ids(list(range(100, 100 + number)))
    request.num_computed_tokens = 5
    hashes = list(request.block_hashes)
    other = copied(request)
    assert (other.request_id, other.num_computed_tokens, other.cache_salt) == ("r", 5, "s")
    assert list(other.block_hashes) == hashes
    request.append_output_token_ids([1, 2, 3, 4])
    other.append_output_token_ids([5, 6, 7, 8])
    output = list(range(100, 100 + number))
    assert request.all_token_ids.tolist() == [*range(9), *output, 1, 2, 3, 4]
    assert other.all_token_ids.tolist() == [*range(9), *output, 5, 6, 7, 8]
    assert len(request.block_hashes) == len(other.block_hashes) == (13 + number) // 4
    assert request.block_hashes[-1] != other.block_hashes[-1]


def test_a_pickle_holds_no_memory_beyond_the_tokens():
    request = Request("r", list(range(9)))
    request.append_output_token_ids(list(range(100)))
    request.truncate_tokens(9)
    assert len(pickle.dumps(request)) < 1000


def test_truncating_never_cuts_the_prompt_and_never_grows():
    request = Request("r1", [1, 2, 3])
    request.append_output_token_ids([4, 5])
    for wrong in (2, 6, -1):
        with refused(
            f"request r1: cannot truncate to {wrong} tokens: it has 5, 3 of them prompt: "
            "pass a number from 3 to 5"
        ):
            request.truncate_tokens(wrong)
    assert request.all_token_ids.tolist() == [1, 2, 3, 4, 5]


def test_truncating_lowers_the_number_of_computed_tokens():
    request = Request("r1", [1, 2, 3])
    request.append_output_token_ids([4, 5])
    request.num_computed_tokens = 5
    request.truncate_tokens(4)
    assert request.num_computed_tokens == 4
    request.num_computed_tokens = 2
    request.truncate_tokens(3)
    assert request.num_computed_tokens == 2


@pytest.mark.parametrize("wrong", [4, -1])
def test_no_more_tokens_are_computed_than_there_are(wrong):
    request = Request("r1", [1, 2, 3])
    request.num_computed_tokens = 3
    with refused(
        f"request r1: {wrong} computed tokens, but it has 3 tokens: pass a number from 0 to 3"
    ):
        request.num_computed_tokens = wrong
    assert request.num_computed_tokens == 3


def test_multimodal_items_are_kept_in_order_of_position():
    request = Request(
        "r1", range(20), mm_positions=[MultiModalPosition(9, 2), (0, 4)], mm_hashes=["b", "a"]
    )
    assert request.mm_positions == (MultiModalPosition(0, 4), MultiModalPosition(9, 2))
    assert request.mm_hashes == ("a", "b")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"mm_positions": [(0, 2)], "mm_hashes": ["a", "b"]},
            "request r1: 2 mm_hashes for 1 mm_positions: pass one hash per position",
        ),
        (
            {"mm_positions": [(2, 3)], "mm_hashes": ["a"]},
            "request r1: multimodal item a is at tokens [2, 5), but the prompt has 4 tokens: "
            "items lie inside the prompt",
        ),
        (
            {"mm_positions": [(-1, 3)], "mm_hashes": ["a"]},
            "offset of a multimodal position is -1: pass an integer of at least 0",
        ),
        (
            {"mm_positions": [(0, 0)], "mm_hashes": ["a"]},
            "length of a multimodal position is 0: pass an integer of at least 1",
        ),
        (
            {"mm_positions": [(0, 1.0)], "mm_hashes": ["a"]},
            "length of a multimodal position is 1.0: pass an integer of at least 1",
        ),
        (
            {"mm_positions": [3], "mm_hashes": ["a"]},
            "request r1: multimodal position 3: pass a MultiModalPosition or a pair "
            "(offset, length)",
        ),
        (
            {"mm_positions": [(0, 1)], "mm_hashes": [b"a"]},
            "request r1: multimodal hash is b'a': pass a non-empty str",
        ),
        ({"cache_salt": ""}, "request r1: cache salt is '': pass a non-empty str"),
        (
            {"cache_salt": "\ud800"},
            "request r1: cache salt is '\\ud800': pass text that UTF-8 can encode",
        ),
        ({"tenant": 3}, "request r1: tenant is 3: pass a non-empty str"),
        ({"lora": "sql"}, "request r1: lora is 'sql': pass a LoRARequest"),
        ({"model_epoch": -1}, "request r1: model epoch is -1: pass an integer of at least 0"),
        ({"model_epoch": True}, "request r1: model epoch is True: pass an integer of at least 0"),
        (
            {"mm_positions": [(0, 1), (1, 1)], "mm_hashes": "ab"},
            "request r1: mm_hashes is 'ab': pass a list or tuple",
        ),
        (
            {"mm_positions": None, "mm_hashes": []},
            "request r1: mm_positions is None: pass a list or tuple",
        ),
    ],
)
def test_what_sets_content_apart_is_checked(keywords, message):
    with refused(message):
        Request("r1", [1, 2, 3, 4], **keywords)


def test_a_request_and_an_adapter_need_a_name():
    with refused("request id is '': pass a non-empty str"):
        Request("", [1])
    with refused("LoRA name is '': pass a non-empty str"):
        LoRARequest("", "/adapters/sql")
    with refused("LoRA path is None: pass a str"):
        LoRARequest("sql", None)


def test_the_namespace_holds_epoch_adapter_salt_and_tenant():
    assert Request("r1", [1]).namespace == Namespace(0, None, None, None)
    request = Request(
        "r1", [1], lora=LoRARequest("sql", "/a/sql"), cache_salt="s", tenant="t", model_epoch=3
    )
    assert request.namespace == Namespace(3, '["sql", "/a/sql"]', "s", "t")
    assert request.namespace is request.namespace


def test_adapters_that_differ_in_name_or_path_have_different_namespaces():
    adapters = [("a", "b"), ("a", "c"), ("a,b", ""), ('a", "b', ""), ('a"', "b")]
    namespaces = {Request("r", [1], lora=LoRARequest(*names)).namespace for names in adapters}
    assert len(namespaces) == len(adapters)


def test_digests_need_a_block_hasher_and_one_can_be_attached_once():
    request = Request("r1", range(8))
    with refused(
        "request r1 has no block hasher: create it with "
        "block_hasher=get_request_block_hasher(block_size, hash_fn)"
    ):
        _ = request.block_hashes
    sha256 = get_hash_fn("sha256")
    request.attach_block_hasher(get_request_block_hasher(4, sha256))
    hashes = list(request.block_hashes)
    assert len(hashes) == 2
    request.attach_block_hasher(get_request_block_hasher(4, sha256))
    with pytest.raises(
        RequestError, match=r"use one algorithm, seed and block size for a request$"
    ):
        request.attach_block_hasher(get_request_block_hasher(8, sha256))
    assert list(request.block_hashes) == hashes


def test_a_request_says_what_it_is():
    request = Request("r1", [1, 2])
    request.append_output_token_ids([3])
    request.num_computed_tokens = 1
    assert repr(request) == "Request('r1', 3 tokens, 2 of them prompt, 1 computed)"


@pytest.mark.parametrize("wrong", [1.5, "1", None])
def test_a_number_of_tokens_is_an_integer(wrong):
    request = Request("r1", [1, 2])
    message = f"request r1: number of tokens is {wrong!r}: pass an integer"
    with refused(message):
        request.num_computed_tokens = wrong
    with refused(message):
        request.truncate_tokens(wrong)
    assert (request.num_tokens, request.num_computed_tokens) == (2, 0)


def test_a_number_too_long_to_write_out_is_refused_all_the_same():
    """Python itself refuses to turn an integer of more than 4300 digits into text."""
    request = Request("r1", [1, 2])
    huge = 10**5000
    with pytest.raises(RequestError, match="prompt token id at index 1 is "):
        Request("r2", [1, huge])
    with pytest.raises(RequestError, match="output token id at index 0 is "):
        request.append_output_token_ids([huge])
    with pytest.raises(RequestError, match="computed tokens, but it has 2 tokens"):
        request.num_computed_tokens = huge
    with pytest.raises(RequestError, match="number of tokens is an int too long to show: pass"):
        request.truncate_tokens(huge)
    with pytest.raises(RequestError, match="offset of a multimodal position is an int too long"):
        MultiModalPosition(-huge, 1)
    with pytest.raises(RequestError, match="length of a multimodal position is an int too long"):
        Request("r2", [1], mm_positions=[(0, huge)], mm_hashes=["a"])


def test_namespaces_are_read_back_from_their_names():
    namespace = Namespace(3, '["a", "b"]', None, "tenant")
    assert parse_namespace_name(namespace_name(namespace)) == namespace
    for name in (b"", b"\x01", b"\x84\x61a\xf6\xf6\xf6", b"\x82\x01\xf6"):
        with pytest.raises(MalformedMessageError):
            parse_namespace_name(name)
