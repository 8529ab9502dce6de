"""Digests: byte-equal to the published vectors, chained, and the same however they are reached."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import cbor2
import numpy as np
import pytest
import xxhash

from kvcache.base.errors import ConfigurationError, InvalidInputError, RequestError
from kvcache.requests.hashing import (
    DEFAULT_HASH_SEED,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_hash_fn,
    get_hash_value,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
    need_extra_keys,
)
from kvcache.requests.request import LoRARequest, Request

REPOSITORY = Path(__file__).resolve().parents[1]
VECTORS = Path(__file__).parent / "vectors" / "block_hashes_sha256_cbor.json"
ALGORITHMS = ("sha256", "sha256_cbor", "xxh3_128")
WIDTHS = (24, 2**8, 2**16, 2**31)


@pytest.fixture(params=ALGORITHMS)
def hash_fn(request):
    return get_hash_fn(request.param)


@pytest.fixture(scope="module")
def vectors():
    return json.loads(VECTORS.read_text())


def random_tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(rng.choice(WIDTHS)) for _ in range(num_tokens)]


def random_request(rng: random.Random, tokens: list[int], **keywords) -> Request:
    """A request with some of adapter, salt and (possibly overlapping) multimodal items."""
    num_items = rng.choice([0, 0, 1, 3])
    offsets = [rng.randrange(len(tokens)) for _ in range(num_items)]
    return Request(
        "r1",
        tokens,
        lora=rng.choice([None, LoRARequest("sql", "/adapters/sql")]),
        cache_salt=rng.choice([None, "tenant-a"]),
        mm_positions=[(offset, rng.randint(1, len(tokens) - offset)) for offset in offsets],
        mm_hashes=[f"img-{index}" for index in range(num_items)],
        **keywords,
    )


def obvious_extra_keys(request: Request, start: int, end: int):
    """The rule, item by item, for one block."""
    keys = []
    if request.lora is not None:
        keys.append(("lora", request.lora.name, request.lora.path))
    for position, mm_hash in zip(request.mm_positions, request.mm_hashes, strict=True):
        if set(range(position.offset, position.end)) & set(range(start, end)):
            keys.append(("mm", mm_hash, position.offset - start))
    if start == 0 and request.cache_salt is not None:
        keys.append(("cache_salt", request.cache_salt))
    return tuple(keys) or None


def obvious_digest(name: str, parent: bytes, tokens: list[int], keys) -> bytes:
    """The rule, written out, for one block."""
    if name == "sha256_cbor":
        return hashlib.sha256(cbor2.dumps((parent, tuple(tokens), keys), canonical=True)).digest()
    data = parent + b"".join(token.to_bytes(4, "little") for token in tokens)
    if keys is not None:
        data += cbor2.dumps(keys, canonical=True)
    return hashlib.sha256(data).digest() if name == "sha256" else xxhash.xxh3_128(data).digest()


def test_the_seed_of_the_vectors_is_the_default(vectors):
    assert vectors["seed"] == DEFAULT_HASH_SEED
    assert init_none_hash(get_hash_fn("sha256_cbor")).hex() == vectors["none_hash"]


def test_the_vectors_cover_every_kind_of_extra_key_and_a_partial_block(vectors):
    cases = vectors["cases"]
    keys = [key for case in cases for block in case["extra_keys"] or [] for key in block or []]
    assert {key[0] for key in keys} == {"lora", "mm", "cache_salt"}
    assert any(key[0] == "mm" and key[2] < 0 for key in keys)
    assert any(len(case["tokens"]) % case["block_size"] for case in cases)
    for case in cases:
        assert len(case["hashes"]) == len(case["tokens"]) // case["block_size"] >= 2


def test_every_published_vector_holds(vectors):
    hash_fn = get_hash_fn("sha256_cbor")
    for case in vectors["cases"]:
        size, tokens = case["block_size"], case["tokens"]
        parent = init_none_hash(hash_fn, vectors["seed"])
        hashes = []
        for start in range(0, len(tokens) - size + 1, size):
            listed = (case["extra_keys"] or {}) and case["extra_keys"][start // size]
            keys = tuple(tuple(key) for key in listed) if listed else None
            parent = hash_block_tokens(hash_fn, parent, tokens[start : start + size], keys)
            hashes.append(parent.hex())
        assert hashes == case["hashes"], case["name"]


def test_every_published_vector_holds_for_a_request(vectors):
    for case in vectors["cases"]:
        keys = [tuple(key) for block in case["extra_keys"] or [] for key in block or []]
        texts = {key[0]: key[1:] for key in keys if key[0] != "mm"}
        items = [key[1:] for key in keys if key[0] == "mm" and key[2] >= 0]
        request = Request(
            "r1",
            case["tokens"],
            lora=LoRARequest(*texts["lora"]) if "lora" in texts else None,
            cache_salt=texts["cache_salt"][0] if "cache_salt" in texts else None,
            mm_hashes=[item[0] for item in items],
            mm_positions=[(item[1], case["block_size"]) for item in items],
            block_hasher=get_request_block_hasher(
                case["block_size"], get_hash_fn("sha256_cbor"), vectors["seed"]
            ),
        )
        assert [block_hash.hex() for block_hash in request.block_hashes] == case["hashes"]


@pytest.mark.seeds(25)
def test_every_block_is_hashed_by_the_rule(hash_fn, seed):
    rng = random.Random(seed)
    size = rng.choice([1, 3, 4, 16, 23, 24, 130, 300])
    tokens = random_tokens(rng, rng.randint(1, 40 * size))
    hasher = get_request_block_hasher(size, hash_fn)
    request = random_request(rng, tokens, block_hasher=hasher)
    parent, expected = hasher.none_hash, []
    for start in range(0, len(tokens) - size + 1, size):
        keys = obvious_extra_keys(request, start, start + size)
        assert generate_block_hash_extra_keys(request, start, start + size, 0)[0] == keys
        parent = obvious_digest(hash_fn.name, parent, tokens[start : start + size], keys)
        assert len(parent) == hash_fn.digest_bytes
        expected.append(parent)
    assert list(request.block_hashes) == expected


@pytest.mark.parametrize("block_size", [8, 16, 400])
def test_token_ids_at_the_borders_of_cbor_widths_are_hashed_by_the_rule(block_size):
    borders = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1]
    hasher = get_request_block_hasher(block_size, get_hash_fn("sha256_cbor"))
    tokens = borders * 100
    parent, expected = hasher.none_hash, []
    for start in range(0, len(tokens), block_size):
        block = tokens[start : start + block_size]
        parent = obvious_digest("sha256_cbor", parent, block, None)
        expected.append(parent)
    assert list(Request("r1", tokens, block_hasher=hasher).block_hashes) == expected


@pytest.mark.seeds(15)
def test_hashing_step_by_step_equals_hashing_all_at_once(hash_fn, seed):
    rng = random.Random(seed)
    hasher = get_request_block_hasher(rng.choice([1, 4, 16]), hash_fn)
    tokens = random_tokens(rng, rng.randint(1, 100))
    keys_seed = rng.random()
    request = random_request(random.Random(keys_seed), tokens, block_hasher=hasher)
    for _ in range(40):
        if rng.random() < 0.7:
            new = random_tokens(rng, rng.choice([1, 1, 2, 7, 16, 40]))
            request.append_output_token_ids(new)
        else:
            request.truncate_tokens(rng.randint(request.num_prompt_tokens, request.num_tokens))
        if rng.random() < 0.6:
            fresh = random_request(random.Random(keys_seed), tokens, block_hasher=hasher)
            fresh.append_output_token_ids(request.all_token_ids[len(tokens) :])
            assert list(request.block_hashes) == list(fresh.block_hashes)
            assert len(request.block_hashes) == request.num_tokens // hasher.block_size


def test_known_digests_are_not_computed_again(hash_fn):
    class CountingHasher:
        def __init__(self):
            self.inner = get_request_block_hasher(4, hash_fn)
            self.block_size, self.none_hash = 4, self.inner.none_hash
            self.num_computed = []

        def __call__(self, request, known):
            new = self.inner(request, known)
            self.num_computed.append(len(new))
            return new

    hasher = CountingHasher()
    request = Request("r1", range(10), block_hasher=hasher)
    assert hasher.num_computed == []
    for num_blocks, new in ((2, []), (2, [1]), (3, [1]), (3, []), (5, range(8))):
        request.append_output_token_ids(new)
        assert len(request.block_hashes) == num_blocks
    assert hasher.num_computed == [2, 1, 2]


def test_requests_that_must_not_share_have_no_digest_in_common(hash_fn):
    variants = [
        {},
        {"lora": LoRARequest("a", "b")},
        {"lora": LoRARequest("a", "c")},
        {"lora": LoRARequest("ab", "")},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"cache_salt": "a", "lora": LoRARequest("a", "b")},
        {"mm_positions": [(1, 2)], "mm_hashes": ["a"]},
        {"mm_positions": [(1, 2)], "mm_hashes": ["b"]},
        {"mm_positions": [(2, 2)], "mm_hashes": ["a"]},
        {"mm_positions": [(1, 2), (3, 1)], "mm_hashes": ["a", "a"]},
    ]
    hasher = get_request_block_hasher(4, hash_fn)
    hashes = [
        block_hash
        for keywords in variants
        for block_hash in Request("r1", range(12), block_hasher=hasher, **keywords).block_hashes
    ]
    assert len(set(hashes)) == len(hashes) == 3 * len(variants)


def test_model_epoch_and_tenant_are_not_in_a_digest(hash_fn):
    hasher = get_request_block_hasher(4, hash_fn)
    plain = Request("r1", range(8), block_hasher=hasher)
    other = Request("r1", range(8), block_hasher=hasher, model_epoch=5, tenant="t")
    assert list(plain.block_hashes) == list(other.block_hashes)


def test_extra_keys_come_in_order_and_items_relative_to_the_block():
    request = Request(
        "r1",
        range(16),
        lora=LoRARequest("sql", "/adapters/sql"),
        mm_positions=[(6, 3), (1, 4), (12, 2)],
        mm_hashes=["second", "first", "third"],
        cache_salt="tenant-a",
    )
    lora = ("lora", "sql", "/adapters/sql")
    blocks = []
    mm_idx = 0
    for start in range(0, 16, 4):
        keys, mm_idx = generate_block_hash_extra_keys(request, start, start + 4, mm_idx)
        blocks.append((keys, mm_idx))
    assert blocks == [
        ((lora, ("mm", "first", 1), ("cache_salt", "tenant-a")), 0),
        ((lora, ("mm", "first", -3), ("mm", "second", 2)), 1),
        ((lora, ("mm", "second", -2)), 2),
        ((lora, ("mm", "third", 0)), 3),
    ]
    assert need_extra_keys(request)


def test_a_request_without_anything_special_needs_no_extra_keys():
    request = Request("r1", range(16))
    assert not need_extra_keys(request)
    assert generate_block_hash_extra_keys(request, 0, 4, 0) == (None, 0)
    assert need_extra_keys(Request("r1", [1], cache_salt="s"))
    assert need_extra_keys(Request("r1", [1], lora=LoRARequest("a", "b")))
    assert need_extra_keys(Request("r1", [1], mm_positions=[(0, 1)], mm_hashes=["a"]))


def test_an_item_that_ends_with_the_block_is_done_with_it():
    request = Request("r1", range(20), mm_positions=[(0, 5), (10, 5)], mm_hashes=["a", "b"])
    assert generate_block_hash_extra_keys(request, 0, 5, 0) == ((("mm", "a", 0),), 1)
    assert generate_block_hash_extra_keys(request, 5, 10, 1) == (None, 1)
    assert generate_block_hash_extra_keys(request, 10, 15, 1) == ((("mm", "b", 0),), 2)
    assert generate_block_hash_extra_keys(request, 15, 20, 2) == (None, 2)


@pytest.mark.parametrize(
    ("start", "end", "mm_idx", "message"),
    [
        (4, 4, 0, "request r1: no block at tokens [4, 4): pass a start before the end"),
        (-4, 0, 0, "start_token is -4: pass an integer of at least 0"),
        (0, 4, -1, "start_mm_idx is -1: pass an integer of at least 0"),
    ],
)
def test_extra_keys_of_an_invalid_block_are_refused(start, end, mm_idx, message):
    with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
        generate_block_hash_extra_keys(Request("r1", range(8)), start, end, mm_idx)


def test_digests_are_the_ones_they_have_always_been():
    """Stores on disk and other processes hold these: a change here makes them useless."""
    hashes = {
        name: Request(
            "r1",
            range(100_000, 100_008),
            cache_salt="s",
            block_hasher=get_request_block_hasher(4, get_hash_fn(name)),
        )
        .block_hashes[-1]
        .hex()
        for name in ALGORITHMS
    }
    assert hashes == {
        "sha256": "c42fbcd42494c7035e3ea97ebb85e4d75383ffaec7a134c3ad42a4435b574c64",
        "sha256_cbor": "f1b74246fc0862184b6875ecf8cf431ca5d98c75e3b37d04516f2f485fe0d80e",
        "xxh3_128": "dcf7267b0ee3e19967f862dc63928526",
    }


def test_two_processes_agree_on_every_digest():
    program = (
        "from kvcache.requests.hashing import get_hash_fn, get_request_block_hasher\n"
        "from kvcache.requests.request import Request\n"
        f"for name in {ALGORITHMS}:\n"
        "    hasher = get_request_block_hasher(4, get_hash_fn(name))\n"
        "    print(Request('r', range(8), cache_salt='s', block_hasher=hasher).block_hashes)\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_the_seed_changes_the_none_hash_and_every_digest(hash_fn):
    assert init_none_hash(hash_fn) == init_none_hash(hash_fn, DEFAULT_HASH_SEED)
    assert len(init_none_hash(hash_fn)) == hash_fn.digest_bytes
    one = get_request_block_hasher(4, hash_fn)
    two = get_request_block_hasher(4, hash_fn, seed="another")
    assert one.none_hash != two.none_hash
    hashes = [Request("r1", range(8), block_hasher=hasher).block_hashes for hasher in (one, two)]
    assert not set(hashes[0]) & set(hashes[1])


@pytest.mark.parametrize(
    ("seed", "remedy"),
    [
        (5, "a str"),
        (None, "a str"),
        (b"seed", "a str"),
        ("\ud800", "text that UTF-8 can encode"),
    ],
)
def test_a_seed_is_text(hash_fn, seed, remedy):
    with pytest.raises(
        ConfigurationError, match=f"^{re.escape(f'hash seed is {seed!r}: pass {remedy}')}$"
    ):
        init_none_hash(hash_fn, seed)


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigurationError,
        match=r"^unknown hash algorithm 'md5': choose one of sha256, sha256_cbor, xxh3_128$",
    ):
        get_hash_fn("md5")


def test_equal_names_give_equal_algorithms():
    assert get_hash_fn("sha256") == get_hash_fn("sha256") != get_hash_fn("sha256_cbor")
    sizes = [(get_hash_fn(name).name, get_hash_fn(name).digest_bytes) for name in ALGORITHMS]
    assert sizes == [("sha256", 32), ("sha256_cbor", 32), ("xxh3_128", 16)]


@pytest.mark.parametrize("block_size", [0, -1, 2.0, True, None])
def test_a_block_size_is_a_positive_integer(hash_fn, block_size):
    with pytest.raises(
        ConfigurationError,
        match=f"^{re.escape(f'block_size is {block_size}: pass an integer of at least 1')}$",
    ):
        get_request_block_hasher(block_size, hash_fn)


def test_a_block_is_hashed_alike_from_a_list_and_an_array(hash_fn):
    none_hash = init_none_hash(hash_fn)
    block_hash = hash_block_tokens(hash_fn, none_hash, [1, 2, 3])
    assert block_hash == hash_block_tokens(hash_fn, none_hash, np.array([1, 2, 3]), ())
    assert block_hash == hash_fn.hash_block(none_hash, np.array([1, 2, 3], "<i4").tobytes())


def test_a_block_needs_a_parent_digest_and_tokens(hash_fn):
    none_hash = init_none_hash(hash_fn)
    for parent in (b"short", None):
        with pytest.raises(
            RequestError,
            match=re.escape(
                f"parent {parent!r} is no {hash_fn.name} digest of {hash_fn.digest_bytes} bytes: "
                "pass the digest of the block before, or init_none_hash(hash_fn) for a first block"
            ),
        ):
            hash_block_tokens(hash_fn, parent, [1, 2, 3])
    with pytest.raises(
        RequestError,
        match=r"^a block without tokens has no digest: pass all tokens of a full block$",
    ):
        hash_block_tokens(hash_fn, none_hash, [])
    with pytest.raises(RequestError, match=r"^token id at index 1 is -2: token ids are integers"):
        hash_block_tokens(hash_fn, none_hash, [1, -2])


def test_a_key_is_the_digest_and_the_group_id_big_endian():
    block_hash = init_none_hash(get_hash_fn("sha256"))
    key = make_block_hash_with_group_id(block_hash, 0x01020304)
    assert key == block_hash + b"\x01\x02\x03\x04"
    assert get_block_hash(key) == get_hash_value(key) == block_hash
    assert get_group_id(key) == 0x01020304


@pytest.mark.parametrize("group_id", [-1, 2**32])
def test_a_group_id_fits_four_bytes(group_id):
    with pytest.raises(
        InvalidInputError,
        match=f"^group_id is {group_id}: pass an integer from 0 to 4294967295$",
    ):
        make_block_hash_with_group_id(init_none_hash(get_hash_fn("xxh3_128")), group_id)


def test_names_and_group_ids_of_the_wrong_type_are_refused():
    with pytest.raises(ConfigurationError, match=r"^unknown hash algorithm \['sha256'\]: "):
        get_hash_fn(["sha256"])
    with pytest.raises(InvalidInputError, match=r"^group_id is 1\.5: pass an integer from 0"):
        make_block_hash_with_group_id(b"x" * 32, 1.5)


def test_nothing_is_left_to_hash_when_all_digests_are_known(hash_fn):
    hasher = get_request_block_hasher(4, hash_fn)
    request = Request("r1", range(8), block_hasher=hasher)
    assert hasher(request, request.block_hashes) == []


def test_equal_arguments_give_one_hasher():
    """A manager recognises the hasher of a request that its caller made."""

    def made(size=16, name="sha256", seed="s"):
        return get_request_block_hasher(size, get_hash_fn(name), seed)

    assert made() is made() is made(int(np.int64(16)))
    others = [made(8), made(name="xxh3_128"), made(name="sha256_cbor"), made(seed="t")]
    assert len({made(), *others}) == 5


def test_an_algorithm_that_cannot_be_a_key_has_a_hasher():
    class Unhashable(type(get_hash_fn("sha256"))):
        __hash__ = None

    own = Unhashable("own", 32)
    hasher = get_request_block_hasher(4, own)
    assert hasher == get_request_block_hasher(4, own)
    request = Request("r1", range(8), block_hasher=hasher)
    plain = get_request_block_hasher(4, get_hash_fn("sha256"))
    assert request.block_hashes == Request("r1", range(8), block_hasher=plain).block_hashes
