"""Finds the environment with the routers: one of its own, or this one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN_VENV = ROOT / ".venv-interop" / "bin" / "python"


def find_python() -> Path | None:
    """Return an interpreter that has the routers, None if there is none."""
    if OWN_VENV.exists():
        return OWN_VENV
    if all(importlib.util.find_spec(name) for name in ("dynamo", "msgspec")):
        return Path(sys.executable)
    return None
