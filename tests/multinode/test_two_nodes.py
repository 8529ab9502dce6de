"""Clusters over several nodes: Ray's test cluster on this machine, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multinode
def test_pipeline_stages_on_two_nodes_agree() -> None:
    with tempfile.TemporaryDirectory(prefix="kvm-", dir="/tmp") as scratch:
        script = Path(__file__).with_name("two_nodes.py")
        done = subprocess.run(
            [sys.executable, str(script), scratch],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two nodes agree" in done.stdout
