"""The README's code runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


def test_the_library_snippet_gives_a_request_its_blocks() -> None:
    names: dict[str, Any] = {"prompt_token_ids": list(range(40))}
    exec(compile(python_blocks()[0], "README.md", "exec"), names)
    assert names["num_hit"] == 0
    assert names["blocks"].get_block_ids() == ([1, 2, 3],)
    assert names["manager"].usage == 0.0


def test_the_cluster_snippet_is_python_and_imports_what_exists() -> None:
    tree = compile(python_blocks()[1], "README.md", "exec")
    assert "KVCacheCluster" in tree.co_names
    exec("\n".join(re.findall(r"^from .*$", python_blocks()[1], re.MULTILINE)), {})


def test_the_readme_is_read_at_one_sitting() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 7 * 1024, "the docs take everything else"
