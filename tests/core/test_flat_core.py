"""The flat core alone: digests, refusals, many steps, bounded nodes, its modes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from kvcache.base.errors import ConfigurationError, RequestError
from kvcache.core import NewestState, Reservation, digesting
from kvcache.core.columns import NUM_STEPS
from kvcache.core.digesting import BY_PYTHON
from kvcache.protocol.commands import Label
from kvcache.requests.hashing import get_hash_fn, get_request_block_hasher
from kvcache.requests.request import LoRARequest, Request
from kvcache.specs import CrossAttentionSpec
from tests.core.builders import full, make_flat_core, make_request, mamba, run, run_request, window

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = ("sha256", "sha256_cbor", "xxh3_128")


def request_with(name: str, algorithm: str) -> Request:
    """Return a request whose blocks have extra keys of every kind."""
    hasher = get_request_block_hasher(4, get_hash_fn(algorithm))
    return Request(
        name,
        list(range(30)),
        lora=LoRARequest("adapter", "path"),
        cache_salt="salt",
        mm_positions=[(5, 9), (16, 2)],
        mm_hashes=["one", "two"],
        block_hasher=hasher,
    )


def labelled_digests(algorithm: str) -> tuple[int, bytes, list[bytes]]:
    """Return a core's digest function, its labelled digests, and those of the request."""
    hash_fn = get_hash_fn(algorithm)
    none_hash = get_request_block_hasher(4, hash_fn).none_hash
    core = make_flat_core(20, hash_fn=hash_fn, none_hash=none_hash)
    request = request_with("r", algorithm)
    hit = core.cache.look_up(request)
    core.reserve(request, Reservation(0, 30, 30), hit)
    (label,) = core.take_commands()
    assert isinstance(label, Label)
    return int(core.store.columns.word[0]), label.digests, list(request.block_hashes)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_late_digests_are_those_of_requests(algorithm: str) -> None:
    _, labelled, expected = labelled_digests(algorithm)
    assert labelled == b"".join(expected)


def test_without_a_library_python_makes_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_missing(self: object) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(digesting.Sha256, "__init__", is_missing)
    way, labelled, expected = labelled_digests("sha256")
    assert way == BY_PYTHON
    assert labelled == b"".join(expected)


def test_a_library_that_makes_other_digests_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digesting.Digester, "_is_right", lambda self: False)
    way, labelled, expected = labelled_digests("xxh3_128")
    assert way == BY_PYTHON
    assert labelled == b"".join(expected)


class OwnSpec(CrossAttentionSpec):
    """An external kind."""

    kind: ClassVar[str] = "own"

    @property
    def keeps_encoder_tokens(self) -> bool:
        return False


def test_kinds_without_rules_are_refused() -> None:
    own = OwnSpec(4, num_kv_heads=1, head_size=8, max_encoder_tokens=4)
    with pytest.raises(ConfigurationError, match="has no rules for KV cache groups of kind 'own'"):
        make_flat_core(20, full(), own)


def test_a_parent_that_published_more_than_its_fork_shares_copies_before_it_writes() -> None:
    core = make_flat_core(20)
    parent, child = make_request("parent", range(8)), make_request("child", range(8))
    core.open_step("engine", 1)
    assert core.reserve(parent, Reservation(0, 8, 8)) is not None
    core.fork(parent, child, 6, NewestState(6, 0))
    core.check()
    assert core.reserve(parent, Reservation(6, 8, 8)) is not None
    core.check()
    assert core.block_ids("parent") == ([1, 3],)
    assert core.block_ids("child") == ([1, 2],)


def test_steps_go_on_while_another_client_never_completes_one() -> None:
    core = make_flat_core(60, has_workers=False)
    core.open_step("waiting", 1)
    first = make_request("first", [1] * 8)
    run_request(core, first)
    for step in range(NUM_STEPS + 50):
        core.open_step("busy", step)
        request = make_request("r", [step % 7] * 4 + [9] * (step % 5))
        run_request(core, request)
        core.free(request)
        core.complete_steps("busy", step)
    core.close_step()
    core.check()
    other = make_request("other", [1] * 9)
    assert core.cache.look_up(other).num_tokens == 0
    core.complete_steps("waiting", 1)
    assert core.cache.look_up(other).num_tokens == 8


def test_nodes_that_outlive_their_blocks_are_bounded() -> None:
    core = make_flat_core(12, window(5), has_workers=False)
    core.store.max_nodes = 300
    for number in range(60):
        request = make_request(f"r{number}", [number] * 200)
        for end in range(8, 201, 8):
            assert core.reserve(request, Reservation(end - 8, end, end)) is not None
        assert len(core.store.columns.node) <= 300
        core.free(request)
        core.check()
        again = make_request("again", [number] * 201)
        assert core.cache.look_up(again).num_tokens == 200


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_what_only_a_waiting_copy_holds_is_not_older_than_what_continues_it(policy: str) -> None:
    core = make_flat_core(8, eviction_policy=policy)
    parent, child = make_request("parent", [1] * 6), make_request("child", [1] * 6)
    core.reserve(parent, Reservation(0, 6, 6))
    core.fork(parent, child, 6, NewestState(6, 0))
    child.append_output_token_ids([1, 1])
    core.reserve(child, Reservation(6, 8, 8))  # into a copy, which is cached then
    core.free(child)
    core.free(parent)
    core.take_commands()  # the copy is unreferenced now
    core.check()
    for number in range(2, 9):
        core.reserve(make_request(f"r{number}", [number] * 4), Reservation(0, 4, 0))
        core.check()
    assert core.cache.num_free_blocks() == 0


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_nodes_are_not_made_at_the_cost_of_the_hit_that_is_adopted(policy: str) -> None:
    for length in range(280, 305, 4):
        core = make_flat_core(12, window(5), has_workers=False, eviction_policy=policy)
        core.store.max_nodes = 76  # as many as there are from the start
        first = make_request("first", [1] * length)
        for end in range(8, length + 8, 8):
            assert core.reserve(first, Reservation(end - 8, end, min(end, length))) is not None
        core.free(first)
        second = make_request("second", [*[1] * length, *[2] * 40])
        hit = core.cache.look_up(second)
        before = [ids.tolist() for ids in hit.block_ids]
        end = hit.num_tokens + 16
        changes = core.reserve(second, Reservation(hit.num_tokens, end, end), hit)
        assert changes is not None
        core.check()
        count = len(before[0])
        assert core.block_ids("second")[0][:count] == before[0]


def test_states_alone_keep_the_nodes_before_them_within_bounds() -> None:
    core = make_flat_core(12, mamba(), has_workers=False)
    core.store.max_nodes = 300
    for number in range(60):
        request = make_request(f"r{number}", [number] * 200)
        for start in range(0, 200, 40):
            newest = NewestState(start, 0) if start else None
            end = start + 40
            assert core.reserve(request, Reservation(start, end, end, 0, end, newest)) is not None
        assert len(core.store.columns.node) <= 300
        core.free(request)
        core.check()
        again = make_request("again", [number] * 201)
        assert core.cache.look_up(again).num_tokens == 200


def test_a_state_of_a_forward_that_failed_is_not_taken_for_that_of_another() -> None:
    core = make_flat_core(20, mamba())
    request = make_request("r", range(30))
    core.open_step("engine", 1)
    core.reserve(request, Reservation(0, 16, 0, 0, 16))  # caching is delayed
    core.fail_steps("engine", 1)
    core.open_step("engine", 2)
    core.reserve(request, Reservation(0, 14, 0, 0, 14))
    core.reserve(request, Reservation(14, 17, 0, 0, 17, NewestState(14, 0)))
    core.commit(request, 16)
    core.close_step()
    core.complete_steps("engine", 2)
    core.check()
    assert core.cache.look_up(make_request("other", range(30))).num_tokens == 0


def test_states_of_one_step_are_no_hit_even_if_others_complete_during_it() -> None:
    core = make_flat_core(40, mamba())
    core.open_step("engine", 1)
    run_request(core, make_request("a", [1] * 8))
    core.complete_steps("other", 1)
    run_request(core, make_request("b", [2] * 8))
    for tokens in ([1] * 9, [2] * 9):
        assert core.cache.look_up(make_request("same", tokens)).num_tokens == 0
    core.open_step("engine", 2)
    for tokens in ([1] * 9, [2] * 9):
        assert core.cache.look_up(make_request("next", tokens)).num_tokens == 8


def test_a_chunk_that_passes_many_columns_is_told_whole() -> None:
    core = make_flat_core(12, mamba(), has_workers=False)
    requests = [make_request(name, range(i, i + 9)) for i, name in enumerate("abcde")]
    for request in requests:
        core.reserve(request, Reservation(0, 8, 8, 0, 8))
        request.append_output_token_ids(list(range(900)))
    wanted = Reservation(8, 900, 900, newest_state=NewestState(8, 0))
    is_reserved, patch = run(core, range(5), requests, [wanted] * 5)
    assert is_reserved.tolist() == [1] * 5
    assert patch.counts.tolist() == [223] * 5
    ids = patch.block_ids.reshape(5, 223)
    assert not ids[:, :-1].any()
    assert ids[:, -1].tolist() == [core.block_ids(name)[0][-1] for name in "abcde"]
    core.check()


def test_what_a_fork_holds_is_forgotten_where_what_comes_before_it_is_taken() -> None:
    core = make_flat_core(16)
    parent, child = make_request("parent", range(16)), make_request("child", range(16))
    core.reserve(parent, Reservation(0, 16, 0))
    core.fork(parent, child, 16, NewestState(16, 0))
    other = make_request("other", [*range(8), 99])
    run_request(core, other)
    core.commit(parent, 16)  # the first two blocks are the other's, the child shares those behind
    core.free(parent)
    core.free(other)
    assert core.cache.look_up(make_request("same", range(17))).num_tokens == 16
    taker = make_request("taker", range(100, 100 + 4 * core.cache.num_free_blocks()))
    run_request(core, taker)
    core.check()
    assert core.cache.look_up(make_request("same", range(17))).num_tokens == 0


def test_what_waits_for_a_step_twice_is_told_once() -> None:
    core = make_flat_core(20)
    core.open_step("engine", 1)
    run_request(core, make_request("first", range(4)))
    core.close_step()
    for name in ("second", "third"):  # behind a block that is not sealed, outside any step
        request = make_request(name, range(8))
        core.reserve(request, Reservation(0, 8, 8))
        last = core.block_ids(name)[0][1]
        core.free(request)
        if name == "second":
            core.cache.evict([last])
    core.complete_steps("engine", 1)
    (label,) = core.take_commands()
    assert isinstance(label, Label)
    assert label.block_ids.tolist() == [1, last]
    assert core.cache.look_up(make_request("same", range(9))).num_tokens == 8


def test_a_token_that_is_not_known_yet_is_never_cached() -> None:
    core = make_flat_core(100, full(4), full(6))
    request = make_request("r", range(100, 113))
    core.reserve(request, Reservation(0, 24, 12))
    core.commit(request, 14)  # fills no block that the 13 known tokens do not fill
    request.append_output_token_ids(list(range(113, 124)))
    core.commit(request, 24)
    core.check()
    assert core.cache.look_up(make_request("same", range(100, 125))).num_tokens == 24
    assert (
        core.cache.look_up(make_request("zero", [*range(100, 113), 0, *range(25)])).num_tokens == 12
    )


def test_any_number_of_prompts_may_differ_from_their_first_token_on() -> None:
    core = make_flat_core(6000)
    for number in range(3000):
        request = make_request(f"r{number}", [number] * 5)
        run_request(core, request)
        core.free(request)
        if number == 600:
            core.check()
    core.check()
    for number in range(3000):
        assert core.cache.look_up(make_request("again", [number] * 5)).num_tokens == 4


def test_a_stale_hit_is_refused_and_nothing_changes() -> None:
    core = make_flat_core(20)
    request = make_request("r", list(range(12)))
    run_request(core, request)
    other = make_request("other", list(range(12)))
    hit = core.cache.look_up(other)
    core.free(request)
    core.cache.evict([1])
    before = core.dump_state()
    with pytest.raises(RequestError, match="call get_computed_blocks again"):
        core.reserve(other, Reservation(hit.num_tokens, 12, 12), hit)
    assert core.dump_state() == before


def walk_in(environment: dict[str, str], walk: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.agreement", *walk],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


@pytest.mark.parametrize("model", ["full, window", "full, window, states", "full, encoder"])
def test_a_walk_without_compiled_code_agrees(model: str) -> None:
    walk_in({"NUMBA_DISABLE_JIT": "1"}, [model, "pressure"])


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    ["full, window", "two full", "chunked", "EAGLE: full, window", "full, window, states"],
)
def test_walks_with_checked_indices_agree(model: str) -> None:
    walk_in({"NUMBA_BOUNDSCHECK": "1"}, [model, "all", "--seeds", "2"])


def test_what_continues_contents_without_digests_is_told_of_with_the_right_parent() -> None:
    """A row with known digests publishes after nodes whose digests were never needed."""
    core = make_flat_core(20)
    core.open_step("engine", 1)
    first = Request("a", list(range(9)))
    assert core.reserve(first, Reservation(0, 9, 9)) is not None
    second = request_with_digests("b", list(range(13)))
    hit = core.cache.look_up(second)
    assert hit.num_tokens == 8
    assert core.reserve(second, Reservation(8, 13, 13), hit) is not None
    core.check()
    core.close_step()
    core.complete_steps("engine", 1)
    (label,) = [one for one in core.take_commands() if isinstance(one, Label)]
    digests = [second.block_hashes[i] for i in range(3)]
    assert label.digests == b"".join(digests)
    assert label.parent_digests[64:] == digests[1]
    core.check()


def request_with_digests(name: str, tokens: list[int]) -> Request:
    request = make_request(name, tokens)
    assert len(request.block_hashes) == len(tokens) // 4
    return request
