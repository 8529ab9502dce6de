"""The programs of the guide run, and print what its page says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "examples" / "engine" / "guide"

PRINTED = {
    "01_toy_loop": ["188 tokens computed for 20 of a prompt and 8 new ones"],
    "02_blocks": [
        "first: 0 of 19 tokens are cached",
        "  19 tokens in blocks [1, 2, 3, 4, 5]",
        "  21 tokens in blocks [1, 2, 3, 4, 5, 6]",
        "second: 16 of 20 tokens are cached",
        "  20 tokens in blocks [1, 2, 3, 4, 7]",
        "  21 tokens in blocks [1, 2, 3, 4, 7, 8]",
    ],
    "03_worker": [
        "forked: parent [1, 2, 3, 4], child [1, 2, 3, 4]",
        "  before child writes: copy block [4] to [5]",
    ],
    "04_steps": ["no room, r5 gives its blocks up"],
}


def test_every_program_of_the_guide_is_run_here() -> None:
    assert {path.stem for path in GUIDE.glob("0*.py")} == set(PRINTED)


@pytest.mark.parametrize("step", PRINTED)
def test_a_step_of_the_guide_runs_and_prints_what_the_page_says(
    step: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(GUIDE))
    runpy.run_path(str(GUIDE / f"{step}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for line in PRINTED[step]:
        assert line in printed
