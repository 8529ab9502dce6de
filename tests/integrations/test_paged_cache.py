"""A paged cache against the model's own: random operations, and refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("transformers", reason="NO TRANSFORMERS: STOCK MODELS ARE NOT TESTED")

import torch
from transformers import DynamicCache

from kvcache.base.errors import (
    ConfigurationError,
    NotEnoughMemoryError,
    OutOfBlocksError,
    RequestError,
)
from kvcache.integrations.transformers import MemorySizes, PagedCacheStore
from tests.integrations.stock_models import BLOCK_SIZE, VOCABULARY, make_model, padded, prompt


def make_store(model: Any, **options: Any) -> PagedCacheStore:
    sizes = MemorySizes(**{"num_blocks": 200, **options})
    return PagedCacheStore(model, sizes, block_size=BLOCK_SIZE)


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    logits: torch.Tensor = model(ids, past_key_values=cache).logits
    return logits


class Walk:
    """The same random operations on a paged cache and on one of `transformers`."""

    def __init__(self, model: Any, store: PagedCacheStore, seed: int, records: bool) -> None:
        self.model = model
        self.random = random.Random(seed)
        # All have a common prefix, and continue with few different tokens, so that they often
        # coincide.
        self.tokens = prompt(11, seed, shared=9, batch=self.random.choice((1, 2, 3)))
        self.paged = store.open(self.tokens)
        self.own = DynamicCache(config=model.config)
        self.records = records
        if records:
            self.paged.activate_past_recording()
            self.own.activate_past_recording()
        self.forward(self.tokens)

    def forward(self, tokens: torch.Tensor) -> None:
        """Compute tokens in both; the paged cache need not compute its hits."""
        past, whole = self.paged.get_seq_length(), self.own.get_seq_length()
        paged = logits_of(self.model, tokens[:, past - whole :], self.paged)
        own = logits_of(self.model, tokens, self.own)
        torch.testing.assert_close(paged, own[:, past - whole :])

    def step(self) -> None:
        length, num_rows = self.own.get_seq_length(), self.tokens.shape[0]
        assert self.paged.get_seq_length() == length
        choice = self.random.random()
        if choice < 0.5:
            size = (num_rows, self.random.choice((1, 1, 2, 5)))
            new = torch.tensor([[self.random.choice((1, 2)) for _ in range(size[1])]] * size[0])
            self.forward(new)
            if self.records:
                self.crop(self.random.randrange(size[1] + 1))
        elif choice < 0.65:
            rows = torch.tensor([self.random.randrange(num_rows) for _ in range(num_rows)])
            self.paged.reorder_cache(rows)
            self.own.reorder_cache(rows)
        elif choice < 0.75 and num_rows < 4:
            self.paged.batch_repeat_interleave(2)
            self.own.batch_repeat_interleave(2)
            self.tokens = self.tokens.repeat_interleave(2, 0)
        elif choice < 0.85 and num_rows > 1:
            kept = torch.tensor(sorted(self.random.sample(range(num_rows), num_rows - 1)))
            self.paged.batch_select_indices(kept)
            self.own.batch_select_indices(kept)
            self.tokens = self.tokens[kept]
        elif not any(self.own.is_sliding):
            self.crop(self.random.randrange(length))

    def crop(self, num_tokens: int) -> None:
        self.paged.crop(-num_tokens)
        self.own.crop(-num_tokens)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.seeds(2)
def test_random_operations_give_what_the_own_cache_gives(
    model: Any, seed: int, records: bool
) -> None:
    with make_store(model, num_blocks=120) as store:
        for part in range(3):
            walk = Walk(model, store, seed * 10 + part, records)
            for _ in range(12):
                walk.step()
                store.check()
            walk.paged.close()
            assert store.statistics().num_blocks_in_use == 0
        assert store.statistics().num_hit_tokens > 0


def test_a_crop_into_found_blocks_leaves_them_as_they_are(llama: Any) -> None:
    ids = prompt(24, 1)
    with make_store(llama) as store:
        with store.open(ids) as cache:
            logits_of(llama, ids, cache)
            cache.crop(-10)
            changed = prompt(10, 2)
            logits_of(llama, changed, cache)
            assert store.statistics().num_copied_blocks == 1
        with store.open(ids) as cache:
            assert cache.length == 20
            found = logits_of(llama, ids[:, 20:], cache)
        torch.testing.assert_close(found, logits_of(llama, ids, None)[:, 20:])
        both = torch.cat([ids[:, :14], changed], dim=1)
        with store.open(both) as cache:
            assert cache.length == 20
            found = logits_of(llama, both[:, 20:], cache)
        torch.testing.assert_close(found, logits_of(llama, both, None)[:, 20:])


def test_drafts_are_never_hit(llama: Any) -> None:
    ids = prompt(24, 1)
    with make_store(llama) as store, store.open(ids) as cache:
        cache.activate_past_recording()
        assert cache.is_recording_past(0)
        logits_of(llama, ids, cache)
        with store.open(ids) as other:
            assert other.length == 0
        cache.crop(-3)
        with store.open(ids) as other:
            assert other.length == 20


def test_beams_share_blocks_until_they_write(llama: Any) -> None:
    ids = prompt(22, 1)
    with make_store(llama) as store, store.open(ids) as cache:
        logits_of(llama, ids.repeat(4, 1), cache)
        tables = [row[0] for row in cache.block_ids()]
        assert tables == [tables[0]] * 4
        assert store.statistics().num_blocks_in_use == 6
        assert store.statistics().num_computed_tokens == 22
        logits_of(llama, torch.tensor([[1], [2], [3], [4]]), cache)
        tables = [row[0] for row in cache.block_ids()]
        assert [table[:5] for table in tables] == [tables[0][:5]] * 4
        assert len({table[5] for table in tables}) == 4
        assert store.statistics().num_blocks_in_use == 5 + 4
        cache.reorder_cache(torch.tensor([2, 2, 2, 2]))
        assert [row[0] for row in cache.block_ids()] == [tables[2]] * 4
        assert store.statistics().num_blocks_in_use == 6


def test_a_forward_that_fails_leaves_the_cache_as_it_was(llama: Any) -> None:
    ids = prompt(20, 1)
    layer = llama.model.layers[1]

    def fail(*args: object) -> None:
        raise ZeroDivisionError

    with make_store(llama) as store, store.open() as cache:
        for _ in range(2):  # first without rows, then with tokens of its own
            before = cache.length
            hook = layer.register_forward_pre_hook(fail)
            with pytest.raises(ZeroDivisionError):
                logits_of(llama, prompt(20, 8), cache)
            hook.remove()
            assert cache.get_seq_length() == before
            if not before:
                cache.reset()
            logits_of(llama, ids, cache)
            store.check()
        with pytest.raises(RequestError, match=r"^keys and values come without an announced forw"):
            logits_of(llama.model, ids, cache)
        whole = logits_of(llama, torch.cat([ids, ids, ids], dim=1), None)
        torch.testing.assert_close(logits_of(llama, ids, cache), whole[:, 40:])


def test_a_reset_cache_starts_empty(llama: Any) -> None:
    with make_store(llama) as store, store.open(prompt(20, 1)) as cache:
        logits_of(llama, prompt(20, 1), cache)
        cache.reset()
        assert (cache.length, cache.batch_size, repr(cache)) == (
            0,
            -1,
            "PagedCache(0 rows, 0 long)",
        )
        ids = prompt(9, 2, batch=2)
        torch.testing.assert_close(logits_of(llama, ids, cache), logits_of(llama, ids, None))
        assert cache.batch_size == 2


def test_new_weights_need_a_reset_of_the_store(llama: Any) -> None:
    with make_store(llama) as store:
        with store.open(prompt(20, 1)) as cache:
            logits_of(llama, prompt(20, 1), cache)
            with pytest.raises(
                RequestError, match=r"^1 caches are open and hold blocks: close them first$"
            ):
                store.reset()
        store.reset()
        assert store.open(prompt(20, 1)).length == 0


def test_what_cannot_be_meant_is_refused_and_changes_nothing(llama: Any) -> None:
    ids, mask = padded(prompt(12, 1, batch=2), [0, 3])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    good = {"attention_mask": mask, "position_ids": positions}
    holes = mask.clone()
    holes[0, 4] = 0
    with make_store(llama) as store, store.open(ids, mask) as cache:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"input_ids": ids[:1], **good}, r"called with 1 rows, the cache has 2"),
            ({"input_ids": ids[:, 1:], **good}, r"the attention mask is \(2, 12\): pass \(2, 11\)"),
            ({"input_ids": ids, "position_ids": positions}, r"there is no attention mask"),
            ({"input_ids": ids, "attention_mask": mask}, r"there are no position_ids"),
            ({"input_ids": ids, **good, "attention_mask": holes}, r"row 0 of the attention mask"),
            ({"input_ids": ids, **good, "attention_mask": mask.flip(0)}, r"has \[3, 0\] pads"),
            ({"input_ids": ids, **good, "position_ids": positions + 1}, r"count tokens from 0"),
            ({"input_ids": ids + 1, **good}, r"row 0: token 0 is \d+, the cache was opened with"),
            ({"inputs_embeds": torch.ones(2, 12, 32)}, r"called with inputs_embeds, and blocks"),
            ({"input_ids": ids, **good, "attention_mask": mask[:, None, None]}, r"two dimensions"),
        ]
        for arguments, message in wrong:
            with pytest.raises(RequestError, match=message), torch.no_grad():
                llama(past_key_values=cache, **arguments)
            assert cache.length == 0
            store.check()
        with pytest.raises(RequestError, match=r"require a gradient.*torch\.no_grad"):
            llama(ids, past_key_values=cache, **good)
        with torch.no_grad():
            llama(ids, mask, positions, cache)  # by position, too
        assert cache.length == 12
        for call, message in (
            (lambda: cache.crop(3), r"^crop\(3\): pass the number of tokens to remove as"),
            (lambda: cache.crop(-13), r"^13 columns are to be taken back, the cache has 12"),
            (lambda: cache.reorder_cache(torch.tensor([0, 2])), r"^row 2 is chosen, the cache has"),
        ):
            with pytest.raises(RequestError, match=message):
                call()
        assert cache.length == 12


def test_a_batch_that_cannot_be_meant_is_not_opened(llama: Any) -> None:
    ids = prompt(12, 1, batch=2)
    right = torch.ones_like(ids)
    right[1, 9:] = 0
    empty = torch.ones_like(ids)
    empty[1] = 0
    with make_store(llama, max_rows=3) as store:
        for given, mask, message in (
            (ids[0], None, r"^input_ids are of shape \(12,\): pass a tensor \(batch, tokens\)"),
            (ids, right, r"^row 1 of the attention mask .* pad on the left only"),
            (ids, empty, r"^row 1 has pads only: open the cache with a token"),
            (ids, right[:, 1:], r"^the attention mask is \(2, 11\): pass \(2, 12\)"),
        ):
            with pytest.raises(RequestError, match=message):
                store.open(given, mask)
        with pytest.raises(
            RequestError, match=r"^open\(\) was given pixel_values: blocks are found"
        ):
            store.open(ids, pixel_values=torch.ones(1))
        assert store.statistics().num_open_caches == 0
        with store.open(ids, token_type_ids=torch.zeros_like(ids)) as cache:
            with pytest.raises(OutOfBlocksError, match=r"^4 more rows are wanted, 3 are free"):
                logits_of(llama, ids.repeat_interleave(3, 0), cache)
            assert cache.length == 0
            logits_of(llama, ids, cache)
            with pytest.raises(OutOfBlocksError, match=r"^2 more rows are wanted, 1 are free"):
                cache.batch_repeat_interleave(2)
            assert cache.num_rows == 2


def test_closed_and_foreign_caches_are_refused(llama: Any, mistral: Any) -> None:
    ids = prompt(12, 1)
    with make_store(llama) as store, make_store(mistral) as other:
        cache = store.open(ids)
        with pytest.raises(RequestError, match=r"^the cache is of another store: open one from"):
            logits_of(mistral, ids, cache)
        cache.close()
        cache.close()
        for call in (
            lambda: logits_of(llama, ids, cache),
            lambda: logits_of(mistral, ids, cache),
            lambda: cache.crop(0),
            lambda: cache.reorder_cache(torch.tensor([0])),
            cache.reset,
            cache.activate_past_recording,
        ):
            with pytest.raises(RequestError, match=r"^the cache is closed: open another one from"):
                call()
        left = other.open(ids)
        other.close()
        assert left.is_closed
        with pytest.raises(RequestError, match=r"^the store is closed: make another one$"):
            other.open(ids)
    other.close()


def test_another_models_keys_are_refused(llama: Any) -> None:
    ids = prompt(12, 1)
    with make_store(llama) as store, store.open(ids) as cache:
        llama.float()
        try:
            with pytest.raises(
                RequestError,
                match=r"^layers\.0 brings keys or values of shape \(1, 2, 12, 8\), torch\.float32; "
                r"the store was made for \(1, 2, 12, 8\), torch\.float64: use the model",
            ):
                logits_of(llama, ids, cache)
        finally:
            llama.double()
        assert cache.length == 0


def test_windows_that_have_moved_on_cannot_be_taken_back(mistral: Any) -> None:
    ids = prompt(20, 1)
    with make_store(mistral) as store, store.open(ids) as cache:
        logits_of(mistral, ids, cache)
        with pytest.raises(
            RequestError, match=r"^columns 19 to 19 are to be taken back, .* of a window of 9 was"
        ):
            cache.crop(-1)
        assert cache.length == 20


def test_models_that_keep_other_things_are_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM, T5Config, T5Model

    small = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1}
    with pytest.raises(ConfigurationError, match=r"^layer 0 of MambaForCausalLM keeps a "):
        make_store(MambaForCausalLM(MambaConfig(**small)))
    with pytest.raises(ConfigurationError, match=r"^T5Model has an encoder: use a model that only"):
        make_store(T5Model(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1)))


def test_sizes_that_do_not_fit_are_refused(llama: Any) -> None:
    with pytest.raises(NotEnoughMemoryError):
        make_store(llama, num_blocks=None, memory_bytes=100)
    with pytest.raises(NotEnoughMemoryError):
        make_store(llama, num_blocks=8, max_model_len=100)
    with make_store(llama, num_blocks=8) as store:
        assert store.max_model_len == 32
        with (
            store.open(prompt(40, 1)) as cache,
            pytest.raises(RequestError, match=r"40 tokens, the model takes 32"),
        ):
            logits_of(llama, prompt(40, 1), cache)


def test_the_model_is_as_before_once_the_store_is_closed() -> None:
    model = make_model("llama", seed=2)
    with make_store(model):
        assert model._forward_pre_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
