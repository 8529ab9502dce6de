"""Mooncake's trace format, whole and broken."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvcache.base.errors import TraceError
from kvcache.simulate import mooncake
from kvcache.simulate.mooncake import MooncakeTrace

GOOD = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [3, 4, 9]}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    (request,) = MooncakeTrace(write(tmp_path / "trace.jsonl", GOOD))
    assert request.request_id == "line-1"
    assert request.num_prompt_tokens == len(request.token_ids) == 1100
    assert request.num_output_tokens == 7
    assert request.arrival_s == 1.5
    assert int(request.token_ids.min()) >= 0


def test_equal_hash_ids_give_equal_tokens_and_others_do_not(tmp_path: Path) -> None:
    other = {**GOOD, "hash_ids": [3, 5, 9]}
    first, second = MooncakeTrace(write(tmp_path / "trace.jsonl", GOOD, other))
    one, two = first.token_ids, second.token_ids
    assert one[:512].tolist() == two[:512].tolist()
    assert one[512:1024].tolist() != two[512:1024].tolist()
    assert one[1024:].tolist() == two[1024:].tolist()


def test_a_partial_block_is_the_start_of_the_whole_one(tmp_path: Path) -> None:
    shorter = {**GOOD, "input_length": 1030}
    first, second = MooncakeTrace(write(tmp_path / "trace.jsonl", GOOD, shorter))
    assert first.token_ids[:1030].tolist() == second.token_ids.tolist()


def test_gzip_and_plain_read_the_same(tmp_path: Path) -> None:
    plain = write(tmp_path / "trace.jsonl", GOOD, GOOD)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    tokens = [[r.token_ids.tolist() for r in MooncakeTrace(path)] for path in (plain, packed)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 2


def test_empty_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    (request,) = MooncakeTrace(write(tmp_path / "trace.jsonl", "", "  ", GOOD))
    assert request.request_id == "line-3"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{not json", "is not JSON (Expecting property name enclosed in double quotes: line 1"),
        ("[1, 2]", "holds [1, 2], not an object"),
        ({"output_length": 1, "hash_ids": [1]}, "has no input_length"),
        ({"input_length": 5, "hash_ids": [1]}, "has no output_length"),
        ({"input_length": 5, "output_length": 1}, "has no hash_ids"),
        ({**GOOD, "input_length": -1}, "has input_length -1, below 1"),
        ({**GOOD, "input_length": 0}, "has input_length 0, below 1"),
        ({**GOOD, "input_length": 2**31}, "has input_length 2147483648, above 2147483647"),
        ({**GOOD, "output_length": 10**30}, f"has output_length 1{'0' * 30}, above 2147483647"),
        ({**GOOD, "block_size": 2**31}, "has block_size 2147483648, above 2147483647"),
        ({**GOOD, "output_length": -3}, "has output_length -3, below 0"),
        ({**GOOD, "input_length": 1100.0}, "has input_length 1100.0, not a whole number"),
        ({**GOOD, "input_length": True}, "has input_length true, not a whole number"),
        ({**GOOD, "output_length": "7"}, 'has output_length "7", not a whole number'),
        ({**GOOD, "hash_ids": 7}, "has hash_ids 7, not a list"),
        ({**GOOD, "hints": 7}, "has hints that are not valid (the line: hints is 7: pass "),
        (
            {**GOOD, "hints": [{"is_over": True}, {"over": 1}]},
            "has hints that are not valid (the line: hints[1] has 'over': it may have start, ",
        ),
        (
            {**GOOD, "hints": [{"returns_in_s": -3}]},
            "has hints that are not valid (the line: hints[0]: returns_in_s of a hint ",
        ),
        ({**GOOD, "hash_ids": [3, 4.5, 9]}, "has hash id 4.5, not a whole number"),
        (
            {**GOOD, "hash_ids": [3, -4, 9]},
            "has hash id -4, not in 0 to 9223372036854775807",
        ),
        (
            {**GOOD, "hash_ids": [3, 4]},
            "has 2 hash_ids, but 1100 input tokens take 3 blocks of 512",
        ),
        (
            {**GOOD, "hash_ids": [3, 4, 9, 10]},
            "has 4 hash_ids, but 1100 input tokens take 3 blocks of 512",
        ),
        ({**GOOD, "timestamp": "now"}, 'has timestamp "now", not a number'),
        ({**GOOD, "timestamp": -1}, f"has timestamp -1, not a number in 0 to {2**53}"),
        ({**GOOD, "timestamp": 10**400}, f"has timestamp 1{'0' * 36}..., not a number in 0 to"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: dict[str, Any] | str, what: str) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, line, GOOD)
    requests = iter(MooncakeTrace(path))
    assert next(requests).request_id == "line-1"
    with pytest.raises(TraceError) as caught:
        next(requests)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 2: {what}")
    assert message.endswith(": repair or remove the line")


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 1: is not JSON"):
        list(MooncakeTrace(path))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_line_without_end_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    good = write(tmp_path / "good.jsonl", GOOD).read_bytes()
    monkeypatch.setattr(mooncake, "_LONGEST_LINE", len(good))
    data = good + b" " * len(good) + b"\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    requests = iter(MooncakeTrace(tmp_path / name))
    assert next(requests).request_id == "line-1"
    with pytest.raises(TraceError, match=f"line 2: has more than {len(good)} bytes: repair or"):
        next(requests)


def test_a_damaged_gzip_says_that_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1\n'))
    with pytest.raises(TraceError) as caught:
        list(MooncakeTrace(path))
    assert str(caught.value) == (
        f"{path}, line 1: is not JSON (Expecting ',' delimiter: line 2 column 1 (char 8)), or the "
        "compressed file is damaged: repair or remove the line"
    )


def test_line_ends_and_empty_lines_are_all_the_same(tmp_path: Path) -> None:
    line, path = json.dumps(GOOD), tmp_path / "trace.jsonl"
    for text in (line, f"{line}\n", f"{line}\r\n", f"\r\n\n {line}  \r\n\n"):
        path.write_text(text, encoding="utf-8", newline="")
        (request,) = MooncakeTrace(path)
        assert request.num_prompt_tokens == GOOD["input_length"]
    path.write_bytes(gzip.compress(line.encode()))
    assert len(list(MooncakeTrace(path))) == 1


def test_a_truncated_gzip_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 200)[:60])
    with pytest.raises(TraceError) as caught:
        list(MooncakeTrace(path))
    assert str(caught.value) == (
        f"{path}, line 1: the compressed file breaks off or is damaged (Compressed file ended "
        "before the end-of-stream marker was reached): fetch it again"
    )


def test_a_missing_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "gone.jsonl"
    with pytest.raises(TraceError) as caught:
        MooncakeTrace(path)
    assert str(caught.value) == (
        f"{path}: cannot be read (No such file or directory): name a Mooncake trace"
    )
