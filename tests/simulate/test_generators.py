"""Synthetic traffic: the same from a seed, in order, and the same as tokens and as block ids."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import TraceError
from kvcache.simulate.counting import CountingOptions, count_prefill_hits
from kvcache.simulate.generators import (
    GENERATORS,
    Agents,
    AgentShape,
    ChatShape,
    Length,
    SyntheticWorkload,
    generate,
)
from kvcache.simulate.mooncake import MooncakeTrace
from kvcache.simulate.opening import open_workload
from kvcache.simulate.passages import BlockNames, Passage, passage_tokens
from kvcache.simulate.trace_writing import trace_lines, write_trace

KINDS = sorted(GENERATORS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_requests_and_another_seed_others(kind: str) -> None:
    first, again, other = (
        list(generate(kind, seed=seed, num_requests=300).script()) for seed in (1, 1, 2)
    )
    assert first == again
    assert [r.passages for r in first] != [r.passages for r in other]


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_requests_are_the_first_of_more(kind: str) -> None:
    few = list(generate(kind, num_requests=50).script())
    many = generate(kind, num_requests=400).script()
    assert few == list(islice(many, 50))


@pytest.mark.parametrize("kind", KINDS)
def test_requests_arrive_in_order_under_ids_of_their_own_after_what_they_quote(kind: str) -> None:
    requests = list(generate(kind, num_requests=800))
    assert len(requests) == 800
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0.0
    known: set[str] = set()
    for request in requests:
        assert request.request_id not in known
        assert request.after is None or request.after in known
        known.add(request.request_id)
    assert sum(request.after is not None for request in requests) > 50


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_as_many_as_said_and_share_exactly_the_blocks_that_ids_share(kind: str) -> None:
    """A block's id is the same where its tokens and all before them are."""
    workload = generate(kind, seed=3, num_requests=12)
    size = 64
    ids_of_content: dict[bytes, int] = {}
    num_shared = 0
    for request, line in zip(workload, trace_lines(workload, size), strict=True):
        tokens = request.token_ids
        assert len(tokens) == request.num_prompt_tokens == line.input_length
        assert len(line.hash_ids) == -(-len(tokens) // size)
        for i, block_id in enumerate(line.hash_ids):
            content = tokens[: (i + 1) * size].tobytes()
            num_shared += content in ids_of_content
            assert ids_of_content.setdefault(content, block_id) == block_id
    assert len(set(ids_of_content.values())) == len(ids_of_content)
    assert num_shared > 0 or kind == "scans"


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_trace_counts_as_the_workload_itself(kind: str, tmp_path: Path) -> None:
    workload = generate(kind, num_requests=60)
    path = tmp_path / "trace.jsonl.gz"
    assert write_trace(path, trace_lines(workload)) == 60
    options = CountingOptions(400)
    ours, read = (
        count_prefill_hits(played, options, VirtualClock())
        for played in (workload, MooncakeTrace(path))
    )
    assert ours.num_hit_blocks == read.num_hit_blocks
    assert dataclasses.replace(ours, workload="") == dataclasses.replace(read, workload="")


def test_equal_requests_are_written_as_equal_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / "one.jsonl.gz", tmp_path / "two.jsonl.gz"]
    for path in paths:
        write_trace(path, trace_lines(generate("chat", num_requests=20)))
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_trace_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "trace.jsonl"
    with pytest.raises(TraceError) as caught:
        write_trace(path, [])
    assert str(caught.value) == (
        f"{path}: cannot be written (No such file or directory): name a file in a directory that "
        "exists"
    )


def test_names_tell_apart_what_stands_before_and_how_much_is_there() -> None:
    names = BlockNames(4)
    a, b = Passage(1, 6), Passage(2, 4)
    assert names.name((a, b)) == [0, 1, 2]
    assert names.name((a, b)) == [0, 1, 2]
    assert names.name((Passage(1, 4), Passage(2, 4))) == [0, 3]
    assert names.name((Passage(1, 3),)) == [4]
    assert names.name((b, a)) == [5, 6, 7]
    assert passage_tokens((a, b))[:4].tolist() == passage_tokens((Passage(1, 4), b))[:4].tolist()


def test_agents_read_long_contexts_again_and_again() -> None:
    """Helpers and tasks of a burst share their context: references far outnumber blocks."""
    lines = list(trace_lines(generate("agents", num_requests=1_000)))
    references = Counter(block for line in lines for block in line.hash_ids)
    assert references.total() > 10 * len(references)
    workload = generate("agents", num_requests=1_000)
    helpers = [r for r in workload.script() if "-helper-" in r.request_id]
    assert len(helpers) > 20
    parents = {r.request_id: r for r in workload.script()}
    for helper in helpers:
        assert helper.after is not None
        asked = parents[helper.after].passages
        assert helper.passages[: len(asked)] == asked


def test_scans_read_collections_in_the_same_order_again() -> None:
    requests = list(generate("scans", num_requests=4_000).script())
    documents = Counter(r.passages[1] for r in requests if "-document-" in r.request_id)
    assert max(documents.values()) > 1
    assert any("scans-chat" in request.request_id for request in requests)


def test_a_shape_of_ones_own_is_obeyed() -> None:
    shape = AgentShape(num_projects=1, project=Length(5_000, 0.0, 5_000, 5_000), helpers_share=0.0)
    requests = list(SyntheticWorkload(Agents(0, shape), 200).script())
    assert {request.passages[1].num_tokens for request in requests} == {5_000}
    assert not any("helper" in request.request_id for request in requests)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(TraceError) as no_generator:
        generate("poetry")
    assert str(no_generator.value) == (
        "no generator 'poetry': choose one of agents, chat, retrieval, scans"
    )
    with pytest.raises(TraceError, match="chat: 0 requests leave nothing to play"):
        generate("chat", num_requests=0)
    with pytest.raises(TraceError, match="give 1 <= least <= median <= most"):
        Length(10, 1.0, 20, 30)
    assert ChatShape().answer.most >= ChatShape().answer.median


def test_a_workload_is_opened_by_a_generators_name() -> None:
    workload = open_workload("retrieval", limit=7, seed=4)
    assert workload.name == "retrieval, 7 requests (seed 4)"
    assert workload.num_requests == len(list(workload)) == 7
    assert workload.total_input_tokens == sum(r.num_prompt_tokens for r in workload)
