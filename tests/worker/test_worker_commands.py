"""The effect of each command, its time, and messages that are refused as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.base.errors import ClusterError, StaleEpochError
from kvcache.protocol.commands import Command, Copy, Fence, Label, Load, Reset, Store, Unlabel, Zero
from kvcache.protocol.labels import LabelTable
from kvcache.protocol.messages import Ack, Finished, Rejected
from kvcache.worker import CpuCopyEngine, PendingCopy
from kvcache.worker.execution import CommandExecutor
from kvcache.worker.validation import CommandValidator
from tests.worker.told_engine import ToldEngine
from tests.worker.worker_support import (
    Harness,
    Row,
    block_bytes,
    fill_block,
    full_groups,
    ids,
    label,
    make_config,
    patch,
    write_expected,
)


def test_patches_zeroes_and_copies_wait_for_the_forward_and_labels_do_not() -> None:
    harness = Harness.make()
    worker = harness.worker
    fill_block(worker, 3, 1.0)
    fill_block(worker, 4, 2.0)
    three, four = block_bytes(worker, 3), block_bytes(worker, 4)
    replies = harness.send(
        patch(1, [3, 4]), Copy(ids(3), ids(5)), Zero(ids(4)), label(9), Unlabel(ids(2))
    )
    assert replies == [Ack("coordinator-1", "process-a", 0, 1, 1)]
    assert worker.labels.digest(9) == b"abcd"
    assert worker.block_tables[0][1].tolist() == [0] * 8
    assert (block_bytes(worker, 4), any(block_bytes(worker, 5))) == (four, False)
    worker.begin_forward(1, 1, timeout_s=0.0)
    assert worker.block_tables[0][1].tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    assert not any(block_bytes(worker, 4))
    assert block_bytes(worker, 5) == three
    worker.end_forward(1, 1)
    worker.check()


def test_a_forward_executes_everything_up_to_its_step_and_nothing_behind_it() -> None:
    harness = Harness.make()
    for block in (3, 4, 5):
        harness.send(patch(0, [block]))
    harness.worker.begin_forward(1, 2, timeout_s=0.0)
    assert harness.worker.block_tables[0][0, 0] == 4
    assert harness.worker.statistics().num_deferred == 1
    harness.worker.end_forward(1, 2)
    harness.forward()
    assert harness.worker.block_tables[0][0, 0] == 5


def test_unlabel_and_reset_forget_labels_and_collect_returns_the_rest() -> None:
    harness = Harness.make()
    harness.send(label(3), label(4, b"efgh"), label(5))
    harness.send(Unlabel(ids(3)))
    collected = harness.worker.collect_labels()
    assert [(x.block_id, x.digest) for x in collected] == [(4, b"efgh"), (5, b"abcd")]
    assert (collected.epoch, collected.applied_seq) == (1, 2)
    assert collected.layout_fingerprint == "layout"
    harness.send(Reset(7))
    statistics = harness.worker.statistics()
    assert (statistics.num_labels, statistics.model_epoch) == (0, 7)


TWICE = Label(
    ids(3, 3), ids(0, 0), ids(0, 0), b"abcdabce", b"nonenone", ids(0, 0), ids(), ids(0, 0), (b"",)
)

INVALID: list[tuple[tuple[Command, ...], str]] = [
    ((Zero(ids(16)),), "zero of blocks 16..16, this rank has 1..15"),
    ((Zero(ids(0)),), "zero of blocks 0..0, this rank has 1..15"),
    ((Copy(ids(1), ids(2, 3)),), "copy has 1 sources and 2 destinations"),
    ((Copy(ids(1, 2), ids(3, 3)),), "copy writes a destination twice"),
    ((Copy(ids(-1), ids(3)),), "copy of blocks -1..-1, this rank has 1..15"),
    ((patch(9, [1]),), "block table patch has slot 9..9, this rank has 0..3"),
    ((label(99),), "label command for blocks 99..99, this rank has 1..15"),
    ((replace(label(3), groups=ids(1)),), "label for group 1..1, this rank has 1 groups"),
    (
        (replace(label(3), extra_keys={1: b"x"}),),
        "label of 1 blocks has extra keys for other ones",
    ),
    (
        (replace(label(3), namespaces=ids(1)),),
        "label names a namespace it does not bring",
    ),
    ((label(0),), "label command for blocks 0..0, this rank has 1..15"),
    ((TWICE,), "label names a block twice"),
    ((replace(patch(0, [1]), first_indices=ids(2**31 - 1)),), "block table patch writes columns"),
    ((replace(patch(0, [1]), slots=ids(-1)),), "block table patch has slot -1..-1"),
    ((Unlabel(ids(77)),), "unlabel of blocks 77..77, this rank has 1..15"),
    ((Store(1, "host", ids(16), ids(0)),), "store of blocks 16..16, this rank has 1..15"),
    ((Load(1, "host", ids(0, 1), ids(4, 4)),), "load writes a destination twice"),
    ((Reset(-1),), "reset to model epoch -1"),
    ((Fence(""),), "fence names no client"),
    (("nonsense",), "command of type str is not known here"),
    (
        (write_expected(1, [Row(0, [1], 0, 1), Row(0, [1], 0, 1)]),),
        "write_expected names a slot twice",
    ),
    (
        (write_expected(1, [Row(0, [1, 2], 0, 3)]),),
        "write_expected does not bring the tokens of every position it writes",
    ),
    (
        (write_expected(1, [Row(0, [1] * 33, 0, 33)]),),
        "write_expected reaches position 33, this rank is made for 32",
    ),
    ((write_expected(1), write_expected(2)), "a message brings 2 forwards: send at most one"),
    (
        (write_expected(1, [Row(0, [1], 0, 1, encoder=1)]),),
        "write_expected has 1 encoder tokens in a row, this rank keeps 0",
    ),
    (
        (write_expected(1, [Row(0, [1, 2], 0, 2, drafts=-1)]),),
        "write_expected has a negative position or count",
    ),
    (
        (write_expected(1, [Row(0, [1, 2], 0, 2, drafts=2**31 - 1, external=2**31 - 1)]),),
        "write_expected has 4294967294 external and draft tokens among 2",
    ),
    (
        (write_expected(1, [Row(0, [1, 2], 0, 2, is_new=False, external=1)]),),
        "write_expected has external tokens in a row that is not new",
    ),
    *(
        (
            (replace(write_expected(1, [Row(0, [1], 0, 1)]), **{name: sizes}),),
            "write_expected of 1 rows has arrays of other sizes",
        )
        for name, sizes in {
            "draft_counts": ids(0, 0),
            "external_counts": ids(0, 0),
            "encoder_counts": ids(0, 0),
            "content_keys": (),
        }.items()
    ),
    (
        (replace(write_expected(1, [Row(0, [1], 0, 1)]), token_ids=ids()),),
        "write_expected announces 1 tokens and brings 0",
    ),
]


@pytest.mark.parametrize(("commands", "reason"), INVALID)
def test_an_invalid_message_is_refused_as_a_whole_and_leaves_its_number_free(
    commands: tuple[Command, ...], reason: str
) -> None:
    harness = Harness.make(is_content_checking=True)
    (rejected,) = harness.send(label(3), patch(0, [1]), *commands)
    assert isinstance(rejected, Rejected)
    assert replace(rejected, reason="") == Rejected("coordinator-1", "process-a", 0, 1, 1, "")
    assert rejected.reason.startswith(reason)
    statistics = harness.worker.statistics()
    assert (statistics.num_invalid_messages, statistics.applied_seq) == (1, 0)
    assert statistics.last_invalid_reason.startswith(f"message 1:1: {reason}")
    assert (statistics.num_labels, statistics.num_deferred) == (0, 0)
    harness.seq = 0
    assert harness.send(label(3)) == [Ack("coordinator-1", "process-a", 0, 1, 1)]


def test_content_checked_forwards_are_refused_where_checking_is_off() -> None:
    harness = Harness.make()
    harness.send(write_expected(1))
    assert harness.worker.statistics().last_invalid_reason == (
        "message 1:1: write_expected was sent to a worker without content checking: switch it on "
        "for workers too"
    )


# --- transfers


def with_host(**changes: Any) -> Harness:
    harness = Harness.make(make_config(full_groups(), host_blocks=4), **changes)
    rng = np.random.default_rng(0)
    for tensor in harness.worker.kv_caches.values():
        tensor.copy_(torch.from_numpy(rng.standard_normal(tensor.shape)))
    return harness


@pytest.mark.parametrize("layout", ["block_first", "layer_first"])
def test_a_stored_block_comes_back_with_the_same_checksum(layout: str) -> None:
    config = make_config(
        full_groups(3),
        layout="block_first" if layout == "block_first" else "layer_first",
        host_blocks=4,
    )
    harness = Harness.make(config)
    fill_block(harness.worker, 3, 1.0)
    fill_block(harness.worker, 4, 2.0)
    before = [block_bytes(harness.worker, b) for b in (3, 4)]
    applied, finished = harness.send(Store(7, "host", ids(3, 4), ids(2, 0)))
    assert isinstance(applied, Ack)
    assert isinstance(finished, Finished)
    harness.send(Load(8, "host", ids(2, 0), ids(9, 8)))
    assert [block_bytes(harness.worker, b) for b in (9, 8)] == before
    store, load = harness.reports[7], harness.reports[8]
    assert store.ok
    assert store.num_bytes == load.num_bytes == sum(len(b) for b in before)
    assert store.checksum == load.checksum
    assert 0 < store.checksum < 1 << 63


def test_a_flipped_host_byte_fails_the_load_and_no_wrong_byte_stays() -> None:
    harness = with_host()
    harness.send(Store(7, "host", ids(3, 4), ids(2, 0)))
    host = harness.worker.host_pool
    host.tensors[0][0, 5] ^= 1
    harness.send(Load(8, "host", ids(2, 0), ids(9, 8)))
    report = harness.reports[8]
    assert not report.ok
    assert report.detail.startswith("checksum of host slot 0 is 0x")
    assert report.detail.endswith(
        "was stored: its bytes changed in host memory (1 of 2 slots are wrong)"
    )
    wrong = block_bytes(harness.worker, 8)
    assert wrong == bytes(len(wrong))
    assert block_bytes(harness.worker, 9) == block_bytes(harness.worker, 3)
    assert harness.worker.statistics().num_failed_jobs == 1


@pytest.mark.parametrize(
    ("command", "detail"),
    [
        (Load(8, "host", ids(1), ids(9)), "host slot 1 holds nothing that this rank stored"),
        (Load(8, "disk", ids(1), ids(9)), "medium 'disk' is not served here: only 'host' is"),
        (Store(8, "host", ids(1), ids(4)), "host slots 4..4 are asked for, this rank has 0..3"),
    ],
)
def test_jobs_that_cannot_be_done_are_reported(command: Store | Load, detail: str) -> None:
    harness = with_host()
    harness.send(command)
    assert harness.reports[8].detail == detail
    assert not harness.reports[8].ok


def test_without_a_host_pool_every_job_fails_with_the_remedy() -> None:
    harness = Harness.make()
    harness.send(Store(8, "host", ids(1), ids(0)))
    assert harness.reports[8].detail == ("this rank has no host pool: plan host_blocks above 0")


def test_a_load_is_not_destroyed_by_commands_of_a_step_that_never_ran() -> None:
    harness = with_host()
    content = block_bytes(harness.worker, 3)
    harness.send(Store(1, "host", ids(3), ids(0)))
    harness.send(Zero(ids(9)), Copy(ids(4), ids(10)), patch(0, [9]))
    harness.send(Load(2, "host", ids(0, 0), ids(9, 10)))
    harness.send()
    harness.forward()
    assert block_bytes(harness.worker, 9) == content
    assert block_bytes(harness.worker, 10) == content
    assert harness.worker.block_tables[0][0, 0] == 9


def test_a_load_runs_ahead_of_nothing_but_the_work_on_its_own_blocks() -> None:
    harness = with_host()
    worker = harness.worker
    harness.send(Store(1, "host", ids(3), ids(0)))
    fill_block(worker, 8, 5.0)
    content = block_bytes(worker, 8)
    harness.send(Zero(ids(8, 9)), Copy(ids(4, 5), ids(10, 11)))
    harness.send(Load(2, "host", ids(0), ids(9)))
    assert block_bytes(worker, 8) == content
    statistics = worker.statistics()
    assert (statistics.num_blocks_zeroed, statistics.num_blocks_copied) == (1, 0)
    harness.forward()
    assert not any(block_bytes(worker, 8))
    statistics = worker.statistics()
    assert (statistics.num_blocks_zeroed, statistics.num_blocks_copied) == (2, 2)


def test_names_of_namespaces_that_no_block_has_are_forgotten() -> None:
    table = LabelTable(num_blocks=4, digest_bytes=4, max_block_tokens=4)
    table.apply(replace(label(1), namespace_names=(b"kept",)))
    for number in range(5000):
        table.apply(replace(label(2), namespace_names=(b"salt %d" % number,)))
    labels = table.collect(0, 1, 1, "layout")
    assert [one.namespace for one in labels] == [b"kept", b"salt 4999"]
    assert len(labels.labels.namespace_names) < 2000


def test_a_grant_waits_for_copies_of_the_old_epoch() -> None:
    engine = ToldEngine()
    harness = with_host(copy_engine=engine)
    harness.send(Store(1, "host", ids(3), ids(0)))
    harness.nonce, harness.epoch = "coordinator-2", 2
    assert harness.grant() == []
    with pytest.raises(StaleEpochError, match="forward of epoch 1 on rank 0, which is in epoch 2"):
        harness.worker.begin_forward(1, 1, timeout_s=0.0)
    engine.copies[0].finish()
    assert [type(m).__name__ for m in harness.worker.on_tick()] == ["Granted"]
    assert harness.worker.epoch == 2


class FailingEngine(CpuCopyEngine):
    """An engine whose transfers fail while `is_broken`."""

    copies_at_once = False

    is_broken = False

    def copy_blocks(self, *rows_and_ids: Any) -> PendingCopy:
        if self.is_broken:
            raise RuntimeError("the bus is on fire")
        return super().copy_blocks(*rows_and_ids)


def test_a_failing_engine_fails_the_job_and_the_slot_is_empty_from_then_on() -> None:
    engine = FailingEngine()
    harness = with_host(copy_engine=engine)
    harness.send(Store(1, "host", ids(3), ids(0)))
    engine.is_broken = True
    assert len(harness.send(Store(2, "host", ids(4), ids(0)))) == 2
    assert harness.reports[2].detail == "the copy engine failed: the bus is on fire"
    engine.is_broken = False
    harness.send(Load(3, "host", ids(0), ids(5)))
    assert harness.reports[3].detail == "host slot 0 holds nothing that this rank stored"


def test_a_store_reads_what_a_waiting_copy_would_have_written() -> None:
    harness = with_host()
    content = block_bytes(harness.worker, 3)
    harness.send(Copy(ids(3), ids(9)))
    harness.send(Store(1, "host", ids(9), ids(0)))
    harness.send(Load(2, "host", ids(0), ids(10)))
    assert block_bytes(harness.worker, 10) == content


@pytest.mark.parametrize(
    ("obeying", "method"), [(CommandValidator, "validate"), (CommandExecutor, "apply")]
)
def test_after_an_error_while_it_obeys_a_worker_neither_obeys_nor_lets_forwards_begin(
    monkeypatch: pytest.MonkeyPatch, obeying: type, method: str
) -> None:
    harness = Harness.make()
    worker = harness.worker
    harness.send(patch(0, [3]))

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as context:
        context.setattr(obeying, method, broken)
        with pytest.raises(MemoryError):
            harness.send(patch(0, [4]))
    calls: tuple[Callable[[], object], ...] = (
        lambda: harness.send(patch(0, [5])),
        worker.on_tick,
        worker.run_due_forwards,
        lambda: worker.on_plain_steps((b"payload",)),
        lambda: worker.begin_forward(1, 1, timeout_s=0.0),
    )
    for call in calls:
        with pytest.raises(ClusterError) as caught:
            call()
        assert str(caught.value) == (
            "rank 0 obeys no more since an error (MemoryError: no room): its tables may be half "
            "changed; end this process and let another one take its place"
        )
    worker.close()
