"""Text files and directories as workloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache.base.errors import TraceError
from kvcache.simulate.opening import open_workload
from kvcache.simulate.text import ReadingOptions, TextDocuments

OPTIONS = ReadingOptions(part_tokens=10, instruction="Read.", questions=("Who?", "When?"))


def text_of(tokens: list[int]) -> str:
    return bytes(token - 3 for token in tokens if token >= 3).decode()


def test_every_part_is_asked_every_question_behind_the_instruction(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time")
    requests = list(TextDocuments(path, OPTIONS))
    assert [request.request_id for request in requests] == [
        "story.txt#1.1",
        "story.txt#1.2",
        "story.txt#2.1",
        "story.txt#2.2",
    ]
    assert [text_of(request.token_ids.tolist()) for request in requests] == [
        "Read.Once upon Who?",
        "Read.Once upon When?",
        "Read.a timeWho?",
        "Read.a timeWhen?",
    ]


def test_tokens_are_shifted_bytes_between_marks(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\x00\xff")
    options = ReadingOptions(instruction="i", questions=("q",))
    (request,) = TextDocuments(path, options)
    assert request.token_ids.tolist() == [1, ord("i") + 3, 2, 3, 258, 2, ord("q") + 3]


def test_a_directory_is_read_in_order_without_hidden_empty_and_binary_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "sub" / "a.txt").write_text("a")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "empty").write_text("")
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    workload = TextDocuments(tmp_path, OPTIONS)
    assert [request.request_id for request in workload] == [
        "b.txt#1.1",
        "b.txt#1.2",
        "sub/a.txt#1.1",
        "sub/a.txt#1.2",
    ]
    assert workload.name == f"{tmp_path} (2 text files)"


def test_what_it_says_of_itself_is_what_it_yields(tmp_path: Path) -> None:
    for name, size in (("a", 25), ("b", 10), ("c", 1)):
        (tmp_path / name).write_text("x" * size)
    workload = TextDocuments(tmp_path, OPTIONS)
    requests = list(workload)
    assert workload.num_requests == len(requests) == 10
    assert workload.total_input_tokens == sum(r.num_prompt_tokens for r in requests)
    assert [len(r.token_ids) for r in requests] == [r.num_prompt_tokens for r in requests]


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one")
    workload = TextDocuments(path, OPTIONS)
    path.write_text("one more")
    with pytest.raises(TraceError) as caught:
        list(workload)
    assert str(caught.value) == (
        f"{path}: 8 bytes now, 3 when the workload was opened: leave files alone while they are "
        "played"
    )


def test_a_directory_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        TextDocuments(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: no text in there: name a text file or a directory of them"
    )


def test_a_workload_is_chosen_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert open_workload("conversations", seed=3).name.endswith("(seed 3)")
    assert open_workload(str(tmp_path / "a.txt")).num_requests == 2
    assert open_workload(str(tmp_path), limit=1).num_requests == 1


def test_an_unknown_workload_is_refused_with_what_there_is() -> None:
    with pytest.raises(TraceError) as caught:
        open_workload("conversation")
    assert str(caught.value) == (
        "no workload 'conversation': give 'conversations', a generator (agents, chat, retrieval, "
        "scans), a Mooncake trace (.jsonl, .jsonl.gz), a text file or a directory of text files"
    )
