"""Content checking finds every kind of wrong byte, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.base.arrays import Int32Array
from kvcache.protocol.commands import Copy, Load, Store, Zero
from kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, Layout
from kvcache.worker import CpuCopyEngine
from tests.worker.worker_support import (
    FULL,
    Harness,
    Row,
    block_bytes,
    full_groups,
    hybrid_groups,
    ids,
    make_config,
    patch,
    write_expected,
)

TOKENS = list(range(100, 132))


def make(config: KVCacheConfig | None = None, **changes: Any) -> Harness:
    return Harness.make(config, is_content_checking=True, **changes)


def prefilled(**changes: Any) -> Harness:
    """Slot 0 holds 10 tokens in the blocks 5, 3, 7."""
    harness = make(**changes)
    report = harness.run(patch(0, [5, 3, 7]), write_expected(1, [Row(0, TOKENS[:10], 0, 10)]))
    assert report.ok
    return harness


def verify(harness: Harness, length: int = 10) -> str:
    return harness.run(write_expected(99, verify=[(0, length)])).detail


def test_untouched_blocks_verify_and_every_byte_is_counted() -> None:
    harness = prefilled()
    report = harness.run(write_expected(2, verify=[(0, 10)]))
    assert report.ok
    assert report.num_bytes == 10 * 2 * FULL.real_page_size_bytes // FULL.block_size
    assert harness.worker.statistics().num_bytes_compared == report.num_bytes


def test_a_flipped_byte_is_found_and_named() -> None:
    harness = prefilled()
    page = harness.worker.kv_caches["layer.1"].view(torch.uint8)
    found = int(page[3, 1, 2, 0, 5])
    page[3, 1, 2, 0, 5] = found ^ 1
    detail = verify(harness)
    assert detail.startswith(
        "wrong bytes on rank 0: layer layer.1, block 3, slot 0, position 6: expected "
    )
    assert "history of block 3, newest first: seq 1 written by slot 0; seq 1 entered" in detail


def test_a_swapped_table_entry_is_found() -> None:
    harness = prefilled()
    harness.run(patch(0, [3, 5], first=0), write_expected(2))
    assert "layer layer.0, block 3, slot 0, position 0: expected" in verify(harness)


def test_a_write_one_token_off_is_found() -> None:
    harness = prefilled()
    for tensor in harness.worker.kv_caches.values():
        tensor[3, :, 1:] = tensor[3, :, :-1].clone()
    assert "block 3, slot 0, position 5: expected" in verify(harness)


class ForgetfulEngine(CpuCopyEngine):
    """An engine that never copies to block 9."""

    def copy_within(
        self, rows: torch.Tensor, source_ids: Int32Array, destination_ids: Int32Array
    ) -> None:
        keep = destination_ids != 9
        super().copy_within(rows, source_ids[keep], destination_ids[keep])


@pytest.mark.parametrize(("engine", "ok"), [(CpuCopyEngine(), True), (ForgetfulEngine(), False)])
def test_a_skipped_copy_is_found(engine: CpuCopyEngine, ok: bool) -> None:
    harness = prefilled(copy_engine=engine)
    report = harness.run(
        Copy(ids(5, 3), ids(9, 10)),
        patch(1, [9, 10, 11]),
        write_expected(2, [Row(1, TOKENS[:9], 8, 1)]),
    )
    assert report.ok is ok
    assert ("block 9, slot 1, position 0: expected" in report.detail) is not ok


def test_a_forgotten_zero_and_a_wrong_zero_are_seen() -> None:
    harness = prefilled()
    harness.run(Zero(ids(7)), write_expected(2))
    detail = verify(harness)
    assert "block 7, slot 0, position 8: expected" in detail
    assert "newest first: seq 2 zeroed; seq 1 written by slot 0" in detail


def test_another_rank_writes_other_bytes() -> None:
    one, other = prefilled(), prefilled(rank=1)
    for name, tensor in one.worker.kv_caches.items():
        tensor.copy_(other.worker.kv_caches[name])
    assert "wrong bytes on rank 0: layer layer.0, block 5" in verify(one)


def test_layers_do_not_hold_each_others_bytes() -> None:
    harness = prefilled()
    tensors = harness.worker.kv_caches
    tensors["layer.0"].copy_(tensors["layer.1"])
    assert "layer layer.0, block 5, slot 0, position 0" in verify(harness)


@pytest.mark.parametrize("changed", [0, 3, 8])
def test_a_hit_on_other_tokens_is_wrong_at_the_first_that_differs(changed: int) -> None:
    harness = prefilled()
    tokens = TOKENS[:9]
    tokens[changed] += 1
    report = harness.run(patch(1, [5, 3, 9]), write_expected(2, [Row(1, tokens, 8, 1)]))
    assert report.ok is (changed == 8)
    assert (f"slot 1, position {changed}: expected" in report.detail) is (changed != 8)


def test_a_hit_of_another_content_key_is_wrong() -> None:
    harness = prefilled()
    row = Row(1, TOKENS[:9], 8, 1, key=b"adapter")
    report = harness.run(patch(1, [5, 3, 9]), write_expected(2, [row]))
    assert "block 5, slot 1, position 0: expected" in report.detail


def test_two_tokens_exchanged_change_everything_behind_them() -> None:
    tokens = [TOKENS[1], TOKENS[0], *TOKENS[2:10]]
    one, other = prefilled(), make()
    assert other.run(patch(0, [5, 3, 7]), write_expected(1, [Row(0, tokens, 0, 10)])).ok
    for name, tensor in one.worker.kv_caches.items():
        theirs = other.worker.kv_caches[name]
        for block_id in (5, 3):
            assert not bool((tensor[block_id] == theirs[block_id]).flatten(2).all(2).any())


def test_a_row_may_hit_what_another_row_of_the_same_step_writes() -> None:
    harness = make()
    rows = [Row(1, TOKENS[:9], 8, 1), Row(0, TOKENS[:10], 0, 10)]
    report = harness.run(patch(0, [5, 3, 7]), patch(1, [5, 3, 9]), write_expected(1, rows))
    assert report.ok
    assert report.num_bytes > 0


def test_decoded_tokens_continue_and_rejected_drafts_are_overwritten() -> None:
    harness = prefilled()
    draft = Row(0, [7, 8, 9], 10, 3, is_new=False, token_start=10)
    assert harness.run(patch(0, [8], first=3), write_expected(2, [draft])).ok
    accepted = Row(0, [7, 5], 11, 1, is_new=False, token_start=10)
    assert harness.run(write_expected(3, [accepted])).ok
    assert harness.run(write_expected(4, verify=[(0, 12)])).ok
    again = Row(1, [*TOKENS[:10], 7, 5, 6], 12, 1)
    assert harness.run(patch(1, [5, 3, 7, 2]), write_expected(5, [again])).ok


def test_finished_requests_are_verified_by_the_tables_before_the_step() -> None:
    harness = prefilled()
    report = harness.run(
        patch(0, [1, 2, 4]),
        Zero(ids(5, 3, 7)),
        write_expected(2, [Row(0, TOKENS[20:30], 0, 10)], verify=[(0, 10)]),
    )
    assert report.ok
    assert verify(harness) == ""


def test_a_null_block_where_content_is_needed_is_an_error() -> None:
    harness = make()
    report = harness.run(patch(0, [5, 0]), write_expected(1, [Row(0, TOKENS[:6], 0, 6)]))
    assert report.detail == (
        "wrong block on rank 0: group 0, slot 0, column 1 is the null block, but its content is "
        "needed"
    )


def test_tokens_that_this_rank_has_not_seen_are_an_error() -> None:
    harness = prefilled()
    row = Row(0, [1], 12, 1, is_new=False, token_start=12)
    assert harness.run(write_expected(2, [row])).detail == (
        "slot 0 continues at position 12, but only 10 of its tokens are known here"
    )
    assert harness.run(write_expected(3, verify=[(0, 11)])).detail == (
        "rank 0 is to verify 11 tokens of slot 0, but knows 10"
    )


def test_blocks_wholly_before_the_window_are_not_read() -> None:
    harness = make(make_config(hybrid_groups()))
    window_blocks = [10, 11, 12, 13, 14]
    patches = patch(0, [5, 3, 7]), patch(0, window_blocks, group=1)
    assert harness.run(*patches, write_expected(1, [Row(0, TOKENS[:10], 0, 10)])).ok
    # The window of 6 tokens before position 10 starts at 5: block 2 of 2 tokens is the first live.
    harness.run(patch(0, [0, 0], group=1), write_expected(2))
    report = harness.run(write_expected(3, verify=[(0, 10)]))
    assert report.ok
    per_token = 2 * FULL.real_page_size_bytes // FULL.block_size
    assert report.num_bytes == (10 + 6 * 2) * per_token
    harness.worker.kv_caches["window.0"][11] += 1
    assert verify(harness) == ""
    harness.worker.kv_caches["window.0"][12] += 1
    assert "layer window.0, block 12, slot 0, position 4: expected" in verify(harness)


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        replace(FULL, dtype="int8", num_kv_heads=1, head_size=3),
        replace(FULL, dtype="float32", num_kv_heads=1, head_size=1),
        replace(FULL, dtype="bfloat16", num_kv_heads=3, head_size=1),
        replace(FULL, page_size_padded=FULL.page_size_bytes + 32),
        FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, use_mla=True),
    ],
)
def test_every_byte_of_every_shape_is_written_and_compared(spec: FullAttentionSpec) -> None:
    groups = (KVCacheGroupSpec(("layer.0", "layer.1", "layer.2"), spec),)
    for name in ("layer.0", "layer.2"):
        harness = prefilled(config=make_config(groups))
        tensor = harness.worker.kv_caches[name]
        flat = tensor[7].view(torch.uint8).reshape(-1)
        tokens = (
            tensor[7]
            .view(torch.uint8)
            .reshape(
                -1, 4, spec.num_kv_heads, flat.numel() // (tensor[7].numel() // spec.head_size)
            )
        )
        last = tokens[-1, 1, -1]  # position 9, the last one known
        last[-1] ^= 1
        assert f"layer {name}, block 7, slot 0, position 9" in verify(harness)
        last[-1] ^= 1
        tokens[-1, 2, -1][-1] ^= 1  # position 10 belongs to no token
        assert verify(harness) == ""


def test_long_requests_with_wide_tokens_are_compared_to_their_end() -> None:
    spec = replace(FULL, block_size=8, num_kv_heads=8, head_size=32)
    config = make_config((KVCacheGroupSpec(("layer.0", "layer.1"), spec),), num_blocks=200)
    harness = make(config, max_model_len=1600)
    blocks = np.random.default_rng(3).permutation(np.arange(1, 200)).tolist()
    row = Row(0, list(range(1590)), 0, 1590)
    assert harness.run(patch(0, blocks), write_expected(1, [row])).ok
    assert harness.run(write_expected(2, verify=[(0, 1590)])).num_bytes == 1590 * 2 * 2 * 8 * 64
    harness.worker.kv_caches["layer.1"][blocks[198], 1, 5, 7, 31] += 1
    detail = harness.run(write_expected(3, verify=[(0, 1590)])).detail
    assert f"layer layer.1, block {blocks[198]}, slot 0, position 1589: expected" in detail


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO CUDA DEVICE: the worker on CUDA is NOT TESTED"
)
@pytest.mark.parametrize("layout", ["block_first", "layer_first"])
def test_on_cuda_the_same_bytes_are_written_moved_and_compared(layout: Layout) -> None:
    config = make_config(full_groups(3), layout=layout, host_blocks=4)
    here, there = prefilled(config=config), prefilled(config=config, device="cuda")
    for name, tensor in there.worker.kv_caches.items():
        assert torch.equal(tensor.cpu(), here.worker.kv_caches[name])
    assert torch.equal(there.worker.block_tables.tensor(0).cpu()[0, :3], torch.tensor([5, 3, 7]))
    there.send(Store(50, "host", ids(5, 3), ids(2, 0)))
    there.send(Load(51, "host", ids(2, 0), ids(9, 10)))
    while 51 not in there.reports:
        there.note(there.worker.on_tick())
    if not there.reports[51].ok:  # the store had not ended when the load was sent
        there.send(Load(52, "host", ids(2, 0), ids(9, 10)))
        while 52 not in there.reports:
            there.note(there.worker.on_tick())
    hit = Row(1, TOKENS[:9], 8, 1)
    report = there.run(patch(1, [9, 10, 11]), write_expected(2, [hit]))
    assert report.ok, report.detail
    there.worker.kv_caches["layer.1"][3, 1, 2, 0, 1] += 1
    assert "layer layer.1, block 3, slot 0, position 6: expected" in verify(there)
    there.worker.close()


def test_both_layouts_hold_the_same_contents() -> None:
    first = prefilled(config=make_config(full_groups(3)))
    second = prefilled(config=make_config(full_groups(3), layout="layer_first"))
    for block_id in (3, 5, 7):
        content = block_bytes(first.worker, block_id)
        assert content == block_bytes(second.worker, block_id)
        assert any(content)


def test_stored_and_loaded_blocks_verify() -> None:
    harness = prefilled(config=make_config(full_groups(), host_blocks=4))
    harness.send(Store(50, "host", ids(5, 3), ids(2, 0)))
    harness.send(Load(51, "host", ids(2, 0), ids(9, 10)))
    assert harness.reports[51].ok
    hit = Row(1, TOKENS[:9], 8, 1)
    assert harness.run(patch(1, [9, 10, 11]), write_expected(2, [hit])).ok


def test_random_steps_of_many_rows_equal_a_row_at_a_time() -> None:
    config = make_config(hybrid_groups(), num_blocks=64)
    rng = np.random.default_rng(7)
    together, alone = make(config), make(config)
    lengths = [0, 0, 0, 0]
    tokens = rng.integers(0, 1000, (4, 32)).tolist()
    free = list(range(1, 64))
    tables: list[list[list[int]]] = [[[] for _ in range(4)] for _ in range(2)]
    for job in range(1, 8):
        rows, patches = [], []
        for slot in range(4):
            count = int(rng.integers(0, 6))
            start, end = lengths[slot], min(lengths[slot] + count, 32)
            for group, size in enumerate((4, 2)):
                table = tables[group][slot]
                new = [free.pop() for _ in range(-(-end // size) - len(table))]
                patches.append(patch(slot, new, group=group, first=len(table)))
                table.extend(new)
            rows.append(Row(slot, tokens[slot][start:end], start, end - start, job == 1, start))
            lengths[slot] = end
        verified = list(enumerate(lengths))
        assert together.run(*patches, write_expected(job, rows)).ok
        assert together.run(write_expected(1000 + job, verify=verified)).ok
        for row, pair in zip(rows, zip(patches[::2], patches[1::2], strict=True), strict=True):
            assert alone.run(*pair, write_expected(100 * job + row.slot, [row])).ok
    for block_id in range(1, 64):
        assert block_bytes(together.worker, block_id) == block_bytes(alone.worker, block_id)
