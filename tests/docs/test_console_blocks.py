"""Output in pages equals that of the commands: its lines, or its shape if it is measured."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.cli import app
from kvcache.metrics import log_line
from tests.docs.pages import PAGES, ROOT, fences, name_of
from tests.metrics.test_log_line import statistics
from tests.planner import public_models

SHOWN = {
    ("README.md", "wrong bytes"),
    ("docs/command-line.md", "largest possible"),
    ("docs/simulate.md", "advised"),
    ("docs/operations.md", "evictions/s"),
    ("docs/operations.md", "is ready after"),
}
"""Marks of blocks that are output; all other blocks without a language are drawings."""
DRAWN = ("──", "│", "[", "▶", "block table", "free list", "get_computed_blocks")


def shown(page: str, mark: str) -> list[str]:
    """Return the lines of a block of output."""
    (text,) = [text for _, text in fences(ROOT / page) if mark in text]
    return str(text).splitlines()


def printed(*arguments: str | Path, columns: int = 80) -> str:
    runner = CliRunner(env={"COLUMNS": str(columns)})
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def cells(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return [cell.strip() for cell in re.split(r"[│┃]|  +", line) if cell.strip()]


def shape(cell: str) -> str:
    """Return a cell without its numbers and the sizes they are in."""
    return re.sub(r"[KMGT]iB|\bB\b", "B", re.sub(r"\d[\d,.]*", "0", cell))


def test_every_block_of_output_is_known() -> None:
    for page in PAGES:
        if name_of(page).startswith(("ARCHITECTURE", "BENCHMARKS")):
            continue
        for language, text in fences(page):
            is_shown = any(name == name_of(page) and mark in text for name, mark in SHOWN)
            if language in ("", "text") and not is_shown:
                assert any(mark in text for mark in DRAWN), f"{name_of(page)}:\n{text}"
    assert all(shown(page, mark) for page, mark in SHOWN)


def test_the_lines_that_a_search_looks_for_are_logged() -> None:
    page = (ROOT / "docs/operations.md").read_text("utf-8")
    table = page[page.index("| search for |") : page.index("## Recordings")]
    phrases = [phrase for row in table.splitlines()[2:] for phrase in re.findall("`([^`]+)`", row)]
    assert len(phrases) > 30
    texts = {
        node.value
        for top in ("kvcache", "actors")
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for phrase in phrases:
        for part in re.split(r"\b[NC]\b|%[ds]", phrase):
            if "kvcache " not in part:  # a command
                assert any(part.strip() in text for text in texts), phrase


def test_the_demo_ends_with_the_table_that_is_shown() -> None:
    replay = ("replay", "conversations", "--config", "cpu_tp2", "--local", "--limit", "3")
    ended = printed(*replay, "--no-progress").splitlines()
    rows = [cells(line) for line in ended if line.startswith("│")]
    expected = [cells(line) for line in shown("README.md", "wrong bytes") if line.startswith("│")]
    assert [row[0] for row in expected] == [row[0] for row in rows]
    assert [shape(row[1]) for row in expected] == [shape(row[1]) for row in rows]


def test_the_plan_of_a_published_model_is_the_one_that_is_shown(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(public_models.GEMMA_3_27B), encoding="utf-8")
    plan = printed("plan", "--hf-config", config, "--tp", "2", "--memory", "40GiB")
    lines = shown("docs/command-line.md", "largest possible")
    assert [line for line in lines if line not in plan.splitlines()] == []


def test_the_line_for_people_is_the_one_that_is_shown() -> None:
    (line,) = shown("docs/operations.md", "evictions/s")
    before, now = (
        statistics(0, asked=0, hit=0, evicted=0),
        statistics(513, asked=4, hit=3, evicted=20),
    )
    assert log_line("chat", before, now, 10.0) == line


@pytest.mark.long
def test_the_advice_is_the_one_that_is_shown() -> None:
    load = ("chat", "--requests", "2500", "-p", "lru", "-p", "arc", "--token-size", "128KiB")
    prices = (
        "--device-price",
        "20",
        "--host-price",
        "3",
        "--disk-price",
        "0.1",
        "--budget",
        "3000",
    )
    advice = printed("advise", *load, *prices, "--no-progress", columns=120)
    rows = [cells(line) for line in advice.splitlines()]
    for line in shown("docs/simulate.md", "advised"):
        assert cells(line) in rows, line
