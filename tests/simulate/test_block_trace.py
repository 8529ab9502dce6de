"""Traces as arrays: parsing, and refusals."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import TraceError
from kvcache.simulate.block_trace import CompactTrace, TraceTokens, read_block_trace
from kvcache.simulate.conversations import Conversations, ConversationShape
from kvcache.simulate.counting import CountingOptions, count_prefill_hits
from kvcache.simulate.mooncake import MooncakeTrace
from kvcache.simulate.opening import open_block_trace
from kvcache.simulate.trace_writing import write_trace
from tests.simulate.traces import block_trace, trace_line, write_lines


def test_blocks_are_numbered_in_order_of_appearance(tmp_path: Path) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", [(7, [90, 3]), (9, [90, 4, 7]), (4, [5])])
    assert trace.blocks.tolist() == [0, 1, 0, 2, 3, 4]
    assert trace.starts.tolist() == [0, 2, 5, 6]
    assert trace.input_lengths.tolist() == [7, 9, 4]
    assert (trace.num_requests, trace.num_references, trace.num_distinct_blocks) == (3, 6, 5)
    assert (trace.most_blocks, trace.place_of(trace.longest)) == (3, "trace.jsonl, line 2")
    assert [trace.most_hits_of(i) for i in range(3)] == [1, 2, 0]


def test_a_written_trace_reads_as_the_same(tmp_path: Path) -> None:
    shape = ConversationShape(num_conversations=3, document_tokens=(100, 300))
    trace = read_block_trace(Conversations(shape))
    assert trace.block_size == 16
    path = tmp_path / "trace.jsonl.gz"
    write_trace(path, trace.to_lines())
    again = open_block_trace(str(path))
    assert again.block_size == 16
    assert again.blocks.tolist() == trace.blocks.tolist()
    assert again.input_lengths.tolist() == trace.input_lengths.tolist()
    assert again.output_lengths.tolist() == trace.output_lengths.tolist()


def test_prompts_of_tokens_share_the_blocks_that_their_tokens_share() -> None:
    workload = Conversations(ConversationShape(num_conversations=4, document_tokens=(100, 300)))
    trace = read_block_trace(workload)
    plain, compact, whole = (
        count_prefill_hits(played, CountingOptions(200), VirtualClock())
        for played in (workload, CompactTrace(trace), TraceTokens(trace))
    )
    assert plain.num_hit_blocks == compact.num_hit_blocks == whole.num_hit_blocks > 0
    assert plain.num_evictions == compact.num_evictions == whole.num_evictions > 0


@pytest.mark.parametrize("name", ["chat", "agents", "retrieval", "scans"])
def test_a_generators_trace_counts_as_its_requests_do(name: str) -> None:
    trace = open_block_trace(name, limit=80, seed=5)
    compact, whole = (
        count_prefill_hits(played, CountingOptions(500), VirtualClock())
        for played in (CompactTrace(trace), TraceTokens(trace))
    )
    assert compact.num_hit_blocks == whole.num_hit_blocks
    assert compact.num_block_references == whole.num_block_references == trace.num_references
    finer = open_block_trace(name, limit=80, seed=5, block_size=64)
    assert finer.num_references > 7 * trace.num_references
    assert finer.num_input_tokens == trace.num_input_tokens


def test_lines_say_how_large_their_blocks_are(tmp_path: Path) -> None:
    said = trace_line(20, [1, 2], block_size=16)
    path = write_lines(tmp_path / "trace.jsonl", said, trace_line(16, [1]))
    assert open_block_trace(str(path)).block_size == 16
    with pytest.raises(TraceError) as caught:
        open_block_trace(str(path), block_size=10)
    assert str(caught.value) == (
        f"{path}, line 1: has block_size 16, this trace is read with 10: repair or remove the line"
    )


def test_tenants_share_nothing(tmp_path: Path) -> None:
    lines = [trace_line(600, [1, 2], tenant=tenant) for tenant in ("a", "b", "a")]
    trace = open_block_trace(str(write_lines(tmp_path / "trace.jsonl", *lines)))
    assert trace.blocks.tolist() == [0, 1, 2, 3, 0, 1]


def test_a_limit_ends_before_a_later_broken_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", trace_line(600, [1, 2]), "{")
    assert open_block_trace(str(path), limit=1).num_requests == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [trace_line(1024, [1, 2]), trace_line(1024, [1, 3]), trace_line(1024, [3, 2])],
            "trace.jsonl, line 3: has block 3 behind another block than line 2, but an id fixes "
            "all before it: give blocks with different pasts different ids",
        ),
        (
            [trace_line(512, [1], timestamp=7), trace_line(512, [2], timestamp=6)],
            "trace.jsonl, line 2: has timestamp 6, the line before 7: sort the trace by time",
        ),
        ([""], "trace.jsonl holds no request: give a trace with at least one"),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, lines: list[dict[str, object] | str], message: str
) -> None:
    path = write_lines(tmp_path / "trace.jsonl", *lines)
    with pytest.raises(TraceError) as caught:
        open_block_trace(str(path))
    assert str(caught.value) == message


def test_a_torn_gzip_names_the_line(tmp_path: Path) -> None:
    whole = write_lines(tmp_path / "whole.jsonl", *[trace_line(512, [i]) for i in range(500)])
    path = tmp_path / "torn.jsonl.gz"
    path.write_bytes(gzip.compress(whole.read_bytes())[:-200])
    with pytest.raises(TraceError, match=r"torn\.jsonl\.gz, line \d+: the compressed file breaks"):
        read_block_trace(MooncakeTrace(path))
