"""The example of stock models runs and keeps its promises."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="NO TRANSFORMERS: STOCK MODELS ARE NOT TESTED")


def test_the_example_prints_hits_and_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "10_transformers.py"
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert "question 1: 40 of 50 prompt tokens found, blocks [1, 2, 3, 4, 5, " in printed
    assert "second turn: 56 of 68 prompt tokens found" in printed
    assert "0 of 64 blocks in use" in printed
