"""A test process that dies says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("death", "signal"),
    [("os.abort()", 6), ("ctypes.string_at(0)", 11)],
    ids=["abort", "segmentation-fault"],
)
def test_a_worker_that_dies_says_why_and_where(tmp_path: Path, death: str, signal: int) -> None:
    dying = tmp_path / "test_dying.py"
    dying.write_text(
        "import ctypes, os\n"
        "def test_dies():\n"
        "    os.write(2, b'Assertion failed: no such socket')\n"
        f"    {death}\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "1", dying.name]
    session = subprocess.run(
        [*command, "--max-worker-restart=0", "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    said = session.stdout
    assert f"worker gw0 ended with status -{signal}" in said
    assert 'test_dying.py", line 4 in test_dies' in said
    assert "its stderr:\nAssertion failed: no such socket" in said
