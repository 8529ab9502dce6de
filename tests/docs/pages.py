"""The pages, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    """Return a page's path from the root."""
    return str(page.relative_to(ROOT))


def fences(page: Path) -> list[tuple[str, str]]:
    """Return language and text of every block of a page, in order."""
    return [(match[1], match[2]) for match in FENCE.finditer(page.read_text("utf-8"))]
