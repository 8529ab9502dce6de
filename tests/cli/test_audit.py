"""`make audit`: its report of pip-audit's findings, exceptions and failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLEAN: dict[str, Any] = {"name": "numpy", "version": "2.4.6", "vulns": []}
WEAK: dict[str, Any] = {"name": "ray", "version": "2.0", "vulns": [{"id": "X-1"}, {"id": "X-2"}]}
UNKNOWN: dict[str, Any] = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([CLEAN], 0, "audit: 1 packages were looked at, 0 have known weaknesses"),
        ([CLEAN, WEAK], 1, "ray 2.0: X-1, X-2\naudit: 2 packages were looked at, 1 have known"),
        ([CLEAN, UNKNOWN], 2, "not looked at: torch\naudit: 1 packages were looked at"),
        ([UNKNOWN], 2, "audit: nothing was audited: the index knows none of 1 packages"),
    ],
)
def test_what_was_not_looked_at_is_no_clean_bill(
    tmp_path: Path, found: list[dict[str, Any]], code: int, said: str
) -> None:
    assert audit(tmp_path, json.dumps({"dependencies": found})).startswith(f"{code}\n{said}")


def test_without_a_service_nothing_was_audited(tmp_path: Path) -> None:
    said = audit(tmp_path, "", error="Traceback\nConnectionError: no route")
    assert said == (
        "2\naudit: nothing was audited, no service can be asked: ConnectionError: no route\n"
    )
    (tmp_path / "pip-audit").unlink()
    assert run(tmp_path).startswith("2\naudit: nothing was audited: pip-audit cannot be started")


def audit(directory: Path, output: str, error: str = "") -> str:
    """Return exit code and text for an output of pip-audit."""
    fake = directory / "pip-audit"
    printing = f"import sys; print({output!r}); print({error!r}, file=sys.stderr)"
    fake.write_text(f"#!{sys.executable}\n{printing}\n", encoding="utf-8")
    fake.chmod(0o755)
    return run(directory)


def run(directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "audit"), str(directory / "pip-audit")],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{done.returncode}\n{done.stdout}{done.stderr}"
