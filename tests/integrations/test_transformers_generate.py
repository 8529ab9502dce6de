"""`generate` on paged blocks equals that on the model's own cache, and computes less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("transformers", reason="NO TRANSFORMERS: STOCK MODELS ARE NOT TESTED")

import torch

from kvcache.base.errors import OutOfBlocksError
from kvcache.integrations.transformers import MemorySizes, PagedCacheStore
from tests.integrations.stock_models import BLOCK_SIZE, make_model, padded, prompt

GREEDY: dict[str, Any] = {"do_sample": False}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {"do_sample": True, "top_k": 0},
    "sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 4},
    "beams and sequences": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 7},
}


def generate(model: Any, ids: torch.Tensor, num_new: int = 14, **options: Any) -> torch.Tensor:
    """Generate with the same random numbers each time."""
    torch.manual_seed(5)
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, **GREEDY, **options}
    output: torch.Tensor = model.generate(ids, max_new_tokens=num_new, **options)
    return output


def make_store(model: Any, **options: Any) -> PagedCacheStore:
    policy = options.pop("eviction_policy", "lru")
    sizes = MemorySizes(**{"num_blocks": 300, **options})
    return PagedCacheStore(model, sizes, block_size=BLOCK_SIZE, eviction_policy=policy)


@contextmanager
def counted_columns(model: Any) -> Iterator[list[int]]:
    """Yield the number of columns of each forward of the model inside the `with`."""
    columns: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: columns.append(output.shape[1])
    )
    yield columns
    hook.remove()


def require_nothing_held(store: PagedCacheStore) -> None:
    store.check()
    statistics = store.statistics()
    assert (statistics.num_blocks_in_use, statistics.num_rows, statistics.num_open_caches) == (
        0,
        0,
        0,
    )


@pytest.mark.parametrize("mode", MODES)
def test_output_is_that_of_the_own_cache_with_and_without_hits(model: Any, mode: str) -> None:
    options = MODES[mode]
    with make_store(model) as store:
        for seed, num_tokens in ((1, 30), (2, 41), (2, 41)):
            ids = prompt(num_tokens, seed, shared=21)
            expected = generate(model, ids, **options)
            with store.open(ids) as cache:
                assert torch.equal(generate(model, ids, past_key_values=cache, **options), expected)
            require_nothing_held(store)
        assert store.statistics().num_hit_tokens == 0 + 20 + 40


@pytest.mark.parametrize("mode", ["greedy", "beams", "sequences", "chunked prefill"])
def test_batches_padded_on_the_left_are_as_with_the_own_cache(model: Any, mode: str) -> None:
    options = MODES[mode]
    with make_store(model) as store:
        for seed, pads in ((1, [0, 5, 11]), (2, [3, 0, 8]), (2, [3, 0, 8]), (3, [0, 4, 8])):
            ids, mask = padded(prompt(32, seed, shared=18, batch=3), pads)
            expected = generate(model, ids, attention_mask=mask, **options)
            with store.open(ids, mask) as cache:
                output = generate(model, ids, attention_mask=mask, past_key_values=cache, **options)
            assert torch.equal(output, expected)
            require_nothing_held(store)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("is_drafted_by_model", [False, True])
def test_assisted_generation_takes_back_what_was_not_accepted(
    model: Any, is_drafted_by_model: bool, sampled: bool
) -> None:
    helper = make_model("llama", seed=3)
    options: dict[str, Any] = {"do_sample": sampled}
    if is_drafted_by_model:
        options["assistant_model"] = helper
    else:
        options["prompt_lookup_num_tokens"] = 4
    ids = torch.cat([prompt(9, 4), prompt(9, 4), prompt(12, 5)], dim=1)
    with make_store(model) as store:
        expected = generate(model, ids, 24, **options)
        for _ in range(2):
            with store.open(ids) as cache:
                output = generate(model, ids, 24, past_key_values=cache, **options)
                assert cache.length == output.shape[1] - 1
            assert torch.equal(output, expected)
            require_nothing_held(store)
        assert store.statistics().num_hit_tokens == 28


def test_a_hit_is_not_computed(model: Any) -> None:
    first, second = prompt(41, 1, shared=33), prompt(41, 2, shared=33)
    with make_store(model) as store:
        with store.open(first) as cache, counted_columns(model) as columns:
            generate(model, first, 3, past_key_values=cache)
        assert columns == [41, 1, 1]
        with store.open(second) as cache, counted_columns(model) as columns:
            assert cache.get_seq_length() == 32
            generate(model, second, 3, past_key_values=cache)
        assert columns == [9, 1, 1]


def test_rows_of_a_padded_batch_share_a_system_prompt(llama: Any) -> None:
    ids, mask = padded(prompt(40, 1, shared=24, batch=3), [0, 3, 7])
    expected = generate(llama, ids, attention_mask=mask)
    with make_store(llama) as store:
        with store.open(prompt(30, 9, shared=24)) as cache:
            generate(llama, prompt(30, 9, shared=24), past_key_values=cache)
        before = store.statistics().num_hit_tokens
        with store.open(ids, mask) as cache, counted_columns(llama) as columns:
            output = generate(llama, ids, attention_mask=mask, past_key_values=cache)
        assert torch.equal(output, expected)
        # All rows have 24 cached tokens; the first row is the first that must continue.
        assert columns[0] == 40 - 24
        assert store.statistics().num_hit_tokens - before == 24 + 21 + 17


def test_what_a_row_has_found_is_not_written_again(llama: Any) -> None:
    ids, mask = padded(prompt(40, 1, shared=24, batch=2), [0, 7])
    first = prompt(30, 9, shared=24)
    with make_store(llama) as store:
        with store.open(first) as cache:
            generate(llama, first, past_key_values=cache)
        with store.open(ids, mask) as cache:
            # The batch continues after column 24; the second row has its tokens 17 to 23 already,
            # and computes them with the other one's.
            assert cache.length == 24
            pages = store.memory.worker.kv_caches["layers.0"]
            block = cache.block_ids()[1][0][5]
            pages[block] = 17.0
            generate(llama, ids, 2, attention_mask=mask, past_key_values=cache)
            assert bool((pages[block] == 17.0).all())


def test_layers_that_attend_in_chunks_keep_as_much_as_a_window() -> None:
    model = make_model("llama4")
    with make_store(model) as store:
        assert store.layers.windows == (8, None, 8)
        for seed, num_hit in ((1, 0), (2, 20), (2, 28)):
            ids = prompt(30, seed, shared=21)
            with store.open(ids) as cache:
                assert cache.length == num_hit
                output = generate(model, ids, past_key_values=cache, num_beams=2)
            assert torch.equal(output, generate(model, ids, num_beams=2))
        require_nothing_held(store)


def test_turns_on_one_cache_compute_only_new_tokens(model: Any) -> None:
    with make_store(model) as store, store.open() as cache:
        ids = prompt(17, 1)
        for turn in range(3):
            expected = generate(model, ids)
            with counted_columns(model) as columns:
                output = generate(model, ids, past_key_values=cache)
            assert torch.equal(output, expected)
            assert columns[0] == (17 if turn == 0 else 12)
            ids = torch.cat([output, prompt(11, 20 + turn)], dim=1)


def test_a_later_turn_finds_what_an_earlier_one_computed(model: Any) -> None:
    ids = prompt(17, 1)
    with make_store(model) as store:
        for turn in range(3):
            expected = generate(model, ids)
            with store.open(ids) as cache:
                assert cache.get_seq_length() == (ids.shape[1] - 11 - 1) // 4 * 4 * (turn > 0)
                output = generate(model, ids, past_key_values=cache)
            assert torch.equal(output, expected)
            ids = torch.cat([output, prompt(11, 20 + turn)], dim=1)
        require_nothing_held(store)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_output_is_the_same_after_evictions(model: Any, policy: str) -> None:
    with make_store(model, num_blocks=40, eviction_policy=policy) as store:
        for seed in (1, 2, 3, 4, 1):
            ids = prompt(33, seed, shared=9)
            with store.open(ids) as cache:
                output = generate(model, ids, past_key_values=cache, num_beams=2)
            assert torch.equal(output, generate(model, ids, num_beams=2))
            require_nothing_held(store)
        assert store.statistics().num_evictions > 0


def test_two_caches_may_be_open_and_take_turns(model: Any) -> None:
    first, second = prompt(20, 1, shared=12), prompt(20, 2, shared=12)
    with make_store(model) as store, store.open(first) as one, store.open(second) as other:
        for ids, cache in ((first, one), (second, other)) * 2:
            past = cache.length
            tokens = torch.cat([ids, prompt(4, 3)], dim=1)[:, past : past + 12]
            with torch.no_grad():
                logits = model(tokens, past_key_values=cache).logits
                whole = model(torch.cat([ids, prompt(4, 3)], dim=1)[:, : past + 12]).logits
            torch.testing.assert_close(logits, whole[:, past:])


def test_without_room_the_error_says_what_to_do_and_the_cache_goes_on(llama: Any) -> None:
    ids = prompt(30, 1)
    with make_store(llama, num_blocks=16) as store:
        holder = store.open(prompt(30, 2))
        generate(llama, prompt(30, 2), 2, past_key_values=holder)
        with store.open(ids) as cache:
            with pytest.raises(
                OutOfBlocksError,
                match=r"^no room for 1 more tokens of a row with 32: 0 of 16 blocks of 4 tokens "
                r"are free, 2 rows hold the others: close caches, use a smaller batch or fewer "
                r"beams, or give the store more memory$",
            ):
                generate(llama, ids, past_key_values=cache)
            assert cache.length == 32
            store.check()
            holder.close()
            cache.crop(29 - cache.length)
            output = generate(llama, ids, past_key_values=cache)
            assert torch.equal(output, generate(llama, ids))
        require_nothing_held(store)


def test_other_salts_adapters_and_private_caches_share_nothing(llama: Any) -> None:
    from kvcache import LoRARequest

    ids = prompt(30, 1)
    with make_store(llama) as store:
        scopes: list[dict[str, Any]] = [
            {},
            {"cache_salt": "a"},
            {"lora": LoRARequest("x", "/x")},
            {"is_shared": False},
            {"cache_salt": "b", "is_shared": False},
            {"cache_salt": "b"},
        ]
        for scope in scopes:
            with store.open(ids, **scope) as cache:
                assert cache.length == 0
                generate(llama, ids, past_key_values=cache)
        for scope, length in zip(scopes, (28, 28, 28, 0, 0, 28), strict=True):
            with store.open(ids, **scope) as cache:
                assert cache.length == length


def test_bfloat16_is_kept_as_it_is(models: dict[str, Any]) -> None:
    model = make_model("gemma3").bfloat16()
    ids = prompt(30, 1)
    expected = generate(model, ids, num_beams=2)
    with make_store(model) as store:
        for _ in range(2):
            with store.open(ids) as cache:
                output = generate(model, ids, past_key_values=cache, num_beams=2)
            assert output.shape == expected.shape
        assert store.memory.worker.kv_caches["layers.0"].dtype == torch.bfloat16
        require_nothing_held(store)
