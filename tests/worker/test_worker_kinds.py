"""Content checking of every attention kind: right tables pass, wrong ones fail."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kvcache.specs import KVCacheGroupSpec, KVCacheSpec
from tests.worker.kinds_model import (
    ALIGN,
    CHUNK,
    CROSS,
    KINDS,
    MAX_ENCODER_TOKENS,
    NONE,
    Mistakes,
    play,
)
from tests.worker.worker_support import Harness, Row, ids, make_config, patch, write_expected

TOKENS = list(range(300, 348))


def harness_of(*specs: KVCacheSpec) -> Harness:
    groups = tuple(KVCacheGroupSpec((f"layer.{i}",), spec) for i, spec in enumerate(specs))
    return Harness.make(make_config(groups, 32), is_content_checking=True, max_model_len=48)


def flip(part: torch.Tensor) -> None:
    """Change one bit of the last element."""
    part.view(torch.uint8).flatten()[-1:] ^= 1


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO CUDA DEVICE: kinds on CUDA are NOT TESTED"
)
@pytest.mark.parametrize("kinds", KINDS)
def test_random_forwards_on_cuda_find_no_wrong_byte(kinds: str) -> None:
    assert play(1, KINDS[kinds], Mistakes(), 40, device="cuda") == ""


@pytest.mark.parametrize("kinds", KINDS)
def test_random_forwards_by_right_tables_find_no_wrong_byte(kinds: str) -> None:
    for seed in range(3):
        assert play(seed, KINDS[kinds], Mistakes(), 40) == "", f"seed {seed}"


def first_complaint(specs: Sequence[KVCacheSpec], mistakes: Mistakes) -> str:
    found = (play(seed, specs, mistakes, 60) for seed in range(6))
    return next((detail for detail in found if detail), "nothing was found")


@pytest.mark.parametrize("kinds", ["align", "none", "full, chunk, align", "full, cross, none"])
def test_a_state_in_the_wrong_column_is_found(kinds: str) -> None:
    detail = first_complaint(KINDS[kinds], Mistakes(state_column=1))
    assert "is the null block, but its content is needed" in detail


@pytest.mark.parametrize("kinds", ["chunk", "full, window, chunk", "full, chunk, align"])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_chunk_that_is_dropped_too_early_is_found(kinds: str, num_tokens: int) -> None:
    detail = first_complaint(KINDS[kinds], Mistakes(chunk_tokens=num_tokens))
    assert detail.startswith("wrong bytes on rank 0: layer ")


@pytest.mark.parametrize("kinds", ["cross", "full, cross, none"])
def test_an_encoder_block_that_is_left_out_is_found(kinds: str) -> None:
    detail = first_complaint(KINDS[kinds], Mistakes(encoder_tokens=1))
    assert "is the null block, but its content is needed" in detail


# --- states ---------------------------------------------------------------------------------------


def with_states() -> Harness:
    """Slot 0 has 9 tokens and 2 drafts: states in the columns 1, 2 and 3, blocks 5, 6 and 7."""
    harness = harness_of(ALIGN)
    row = Row(0, TOKENS[:9], 0, 9)
    assert harness.run(patch(0, [0, 5, 6, 7]), write_expected(1, [row])).ok
    drafts = Row(0, TOKENS[9:12], 9, 3, is_new=False, token_start=9, drafts=2)
    assert harness.run(write_expected(2, [drafts])).ok
    return harness


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_the_next_forward_reads_the_state_of_the_last_accepted_draft(num_accepted: int) -> None:
    for wrong_block in (5, 6, 7):
        harness = with_states()
        flip(harness.worker.state_caches["layer.0"][1][wrong_block, 1, 1])
        start = 10 + num_accepted
        row = Row(0, TOKENS[start:13], start, 13 - start, is_new=False, token_start=start)
        report = harness.run(write_expected(3, [row]))
        assert report.ok is (wrong_block != 5 + num_accepted)
        expected = (
            f"layer layer.0, block {wrong_block}, slot 0, state after token {start}: expected"
        )
        assert report.ok or expected in report.detail


def test_a_forward_cannot_continue_where_no_state_is() -> None:
    harness = with_states()
    row = Row(0, TOKENS[9:13], 9, 4, is_new=False, token_start=9)
    assert harness.run(write_expected(3, [row])).detail == (
        "slot 0 of rank 0 continues after 9 tokens, but group 0 has its states after 10 to 12"
    )


def test_accepted_drafts_that_are_other_tokens_are_found() -> None:
    harness = with_states()
    row = Row(0, [1, *TOKENS[11:13]], 11, 2, is_new=False, token_start=10)
    assert "block 6, slot 0, state after token 11" in harness.run(write_expected(3, [row])).detail


def test_a_hit_is_the_state_at_the_end_of_a_block() -> None:
    harness = harness_of(ALIGN)
    assert harness.run(patch(0, [5, 6, 7]), write_expected(1, [Row(0, TOKENS[:8], 0, 8)])).ok
    hit = Row(1, TOKENS[:11], 8, 3)
    report = harness.run(patch(1, [5, 8, 9, 10]), write_expected(2, [hit]))
    assert (report.ok, report.num_bytes) == (True, ALIGN.real_page_size_bytes)
    other = Row(2, [*TOKENS[:7], 0, 1], 8, 1)
    report = harness.run(patch(2, [5, 11, 12, 13]), write_expected(3, [other]))
    assert "block 5, slot 2, state after token 8: expected" in report.detail


def test_a_state_that_another_row_of_the_step_writes_is_no_hit() -> None:
    harness = harness_of(ALIGN)
    rows = [Row(0, TOKENS[:8], 0, 8), Row(1, TOKENS[:11], 8, 3)]
    report = harness.run(patch(0, [5, 6, 7]), patch(1, [5, 8, 9, 10]), write_expected(1, rows))
    assert "block 5, slot 1, state after token 8: expected" in report.detail


def test_columns_that_a_chunk_passes_hold_nothing() -> None:
    harness = harness_of(ALIGN)
    row = Row(0, TOKENS[:30], 0, 30)
    assert harness.run(patch(0, [0, 0, 0, 5, 6, 7]), write_expected(1, [row])).ok
    assert harness.run(write_expected(2, verify=[(0, 30)])).num_bytes == ALIGN.real_page_size_bytes


def test_the_state_behind_external_tokens_has_no_other_writer() -> None:
    harness = harness_of(ALIGN, CHUNK)
    row = Row(0, TOKENS[:30], 0, 30, external=14)
    blocks = [0, 5, 0, 6, 7, 8], [0, 0, 9, 10, 11, 12, 13, 14]
    patches = patch(0, blocks[0]), patch(0, blocks[1], group=1)
    assert harness.run(*patches, write_expected(1, [row])).ok
    tensors = harness.worker.state_caches["layer.0"]
    assert all(bool(tensors[0][block].any()) for block in (5, 6))
    assert not any(bool(tensors[0][block].any()) for block in (7, 8))


def test_every_byte_of_a_state_is_compared_and_no_padding() -> None:
    harness = with_states()
    page = harness.worker.state_caches["layer.0"][0].untyped_storage()
    for offset in range(ALIGN.page_size_bytes):
        page[7 * ALIGN.page_size_bytes + offset] ^= 1
        report = harness.run(write_expected(10 + offset, verify=[(0, 12)]))
        assert report.ok is (offset >= ALIGN.real_page_size_bytes), offset
        page[7 * ALIGN.page_size_bytes + offset] ^= 1


def test_a_slot_forgets_the_states_of_whom_it_held_before() -> None:
    harness = harness_of(NONE)
    assert harness.run(patch(0, [5, 6, 7]), write_expected(1, [Row(0, TOKENS[:9], 0, 9)])).ok
    assert harness.run(write_expected(2, [Row(0, TOKENS[20:25], 0, 5)])).ok
    late = Row(0, TOKENS[:10], 9, 1, is_new=False)
    assert harness.run(write_expected(3, [late])).detail == (
        "slot 0 of rank 0 continues after 9 tokens, but group 0 has its states after 5 to 5"
    )


def test_more_drafts_than_states_are_kept_for_are_refused() -> None:
    harness = harness_of(ALIGN)
    harness.send(write_expected(1, [Row(0, TOKENS[:4], 0, 4, drafts=3)]))
    assert harness.worker.statistics().last_invalid_reason == (
        "message 1:1: write_expected has 3 drafts in a row, this rank keeps states after 2"
    )


# --- encoder tokens -------------------------------------------------------------------------------


def test_encoder_tokens_are_written_once_and_compared_when_the_request_goes() -> None:
    harness = harness_of(CROSS)
    row = Row(0, TOKENS[:3], 0, 3, encoder=10, encoder_key=b"a sound")
    assert harness.run(patch(0, [5, 6, 7]), write_expected(1, [row])).ok
    report = harness.run(write_expected(2, verify=[(0, 3)]))
    assert (report.ok, report.num_bytes) == (True, 10 * CROSS.page_size_bytes // 4)
    tensor = harness.worker.kv_caches["layer.0"]
    flip(tensor[7, 1, 2])  # behind the last encoder token
    assert harness.run(write_expected(3, verify=[(0, 3)])).ok
    flip(tensor[7, 1, 1])
    detail = harness.run(write_expected(4, verify=[(0, 3)])).detail
    assert "layer layer.0, block 7, slot 0, encoder position 9: expected" in detail


def test_the_encoder_tokens_of_two_requests_differ() -> None:
    harness = harness_of(CROSS)
    rows = [
        Row(0, TOKENS[:3], 0, 3, encoder=4, encoder_key=b"a sound"),
        Row(1, TOKENS[:3], 0, 3, encoder=4, encoder_key=b"another"),
    ]
    assert harness.run(patch(0, [5]), patch(1, [6]), write_expected(1, rows)).ok
    assert harness.run(write_expected(2, verify=[(0, 3), (1, 3)])).ok
    harness.run(patch(0, [6]), write_expected(3))
    detail = harness.run(write_expected(4, verify=[(0, 3)])).detail
    assert "block 6, slot 0, encoder position 0" in detail


def test_encoder_tokens_beyond_the_model_or_without_a_new_row_are_refused() -> None:
    harness = harness_of(CROSS)
    harness.send(write_expected(1, [Row(0, [1], 0, 1, encoder=MAX_ENCODER_TOKENS + 1)]))
    assert harness.worker.statistics().last_invalid_reason == (
        "message 1:1: write_expected has 11 encoder tokens in a row, this rank keeps 10"
    )
    harness.seq = 0
    harness.send(write_expected(1, [Row(0, [1], 0, 1, is_new=False, encoder=1)]))
    assert harness.worker.statistics().last_invalid_reason == (
        "message 1:1: write_expected has encoder tokens in a row that is not new"
    )


def test_a_row_that_shares_all_it_has_writes_nothing_and_compares_all() -> None:
    harness = harness_of(CROSS, ALIGN)
    parent = Row(0, TOKENS[:9], 0, 9, encoder=6, encoder_key=b"a sound")
    tables = [(0, [5, 6]), (1, [0, 7, 8, 9])]
    patches = [patch(0, blocks, group=group) for group, blocks in tables]
    assert harness.run(*patches, write_expected(1, [parent])).ok
    child = replace(parent, slot=1, start=9, count=0)
    patches = [patch(1, blocks[:2], group=group) for group, blocks in tables]
    report = harness.run(*patches, write_expected(2, [child]))
    num_bytes = 6 * CROSS.page_size_bytes // 4 + ALIGN.real_page_size_bytes
    assert (report.ok, report.num_bytes) == (True, num_bytes)
    flip(harness.worker.kv_caches["layer.0"][6, 1, 1])
    detail = harness.run(write_expected(3, [child])).detail
    assert "block 6, slot 1, encoder position 5: expected" in detail


# --- windows and chunks ---------------------------------------------------------------------------


def test_a_block_is_compared_by_the_row_that_reads_it_last() -> None:
    harness = harness_of(CHUNK)
    assert harness.run(patch(0, [5, 6, 7]), write_expected(1, [Row(0, TOKENS[:7], 0, 7)])).ok
    flip(harness.worker.kv_caches["layer.0"][5, 0, 3, 1])
    row = Row(0, TOKENS[7:8], 7, 1, is_new=False, token_start=7)
    detail = harness.run(write_expected(2, [row])).detail
    assert "layer layer.0, block 5, slot 0, position 3: expected" in detail


def test_pools_may_be_shared_by_kinds_of_differing_dtypes() -> None:
    wide = replace(CHUNK, dtype="float32", num_kv_heads=1, block_size=4)
    harness = harness_of(ALIGN, wide)
    row = Row(0, TOKENS[:6], 0, 6)
    patches = patch(0, [5, 6, 7]), patch(0, [8, 9], group=1)
    assert harness.run(*patches, write_expected(1, [row])).ok
    assert harness.run(write_expected(2, verify=[(0, 6)])).ok
    harness.run(patch(0, ids(5).tolist(), group=1, first=1), write_expected(3))
    assert not harness.run(write_expected(4, verify=[(0, 6)])).ok


# --- nonsense -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["full, chunk, align", "full, cross, none"])
def test_forwards_of_any_numbers_are_refused_or_reported_and_never_raise(kinds: str) -> None:
    outcomes = []
    for seed in range(40):
        rng = random.Random(seed)
        harness = harness_of(*KINDS[kinds])
        for job in range(1, 8):
            rows = [random_row(rng, slot) for slot in range(4) if rng.random() < 0.7]
            verify = [(slot, rng.choice((0, 3, 9, 30))) for slot in range(4) if rng.random() < 0.2]
            tables = [
                patch(rng.randrange(4), [rng.randrange(32) for _ in range(3)], group=group)
                for group in range(3)
            ]
            harness.send(*tables, write_expected(job, rows, verify))
            harness.note(harness.worker.run_due_forwards())
            if job not in harness.reports:
                harness.seq -= 1
            harness.worker.check()
            outcomes.append(harness.reports[job].ok if job in harness.reports else None)
    assert min(outcomes.count(outcome) for outcome in (True, False, None)) > 0


def random_row(rng: random.Random, slot: int) -> Row:
    """A row that fits only by chance."""

    def small(most: int) -> int:
        return rng.choice((0, 0, 0, rng.randint(0, most), rng.choice((-1, most, 2**31 - 1))))

    start, count, is_new = rng.choice((0, 8, small(40))), rng.randint(0, 9), rng.random() < 0.6
    told = 0 if is_new else max(0, start - rng.randint(0, 2))
    num_tokens = max(0, min(60, start + count - told)) + rng.choice((0, 0, 0, -1, 1))
    return Row(
        slot,
        TOKENS[: max(0, num_tokens)],
        start,
        count,
        is_new=is_new,
        token_start=told,
        external=small(3) if rng.random() < 0.2 else 0,
        drafts=small(2) if rng.random() < 0.3 else 0,
        encoder=small(9) if rng.random() < 0.2 else 0,
        encoder_key=rng.choice((b"", b"key")),
    )
