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
    assert "two nodes agree" in play("two_nodes.py", timeout_s=120)


@pytest.mark.multinode
def test_a_stage_whose_node_is_gone_is_replaced_on_another_one() -> None:
    assert "the stage has moved" in play("node_loss.py", timeout_s=300)


def play(script: str, timeout_s: float) -> str:
    """Run a script of this directory with a directory of its own; return its output."""
    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray's test cluster writes its address there
    with tempfile.TemporaryDirectory(prefix="kvm-", dir="/tmp") as scratch:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(script)), scratch],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
