"""A cache as cells and boxes: as many as can be drawn, and all of them correct."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.cli.contents import PrefixNode
from actors.dashboard import observer
from actors.dashboard.picture import MAX_BOXES, MAX_CELLS, pool_picture, tree_picture
from kvcache.base.errors import DeadlineError
from kvcache.metrics.inspection import CacheInspection
from kvcache.requests.request import Namespace

PLAIN = Namespace(0, None, None, None)


def inspection(references: list[int], idle_s: list[float]) -> CacheInspection:
    """Of blocks from id 1 on; block 0 is no block."""
    return CacheInspection(
        0,
        False,
        (),
        np.array([0, *references], dtype=np.int32),
        np.array([-1, *idle_s], dtype=np.float32),
    )


def node(tokens: int, *children: PrefixNode, references: int = 0) -> PrefixNode:
    ends = sum(child.num_ends for child in children) or 1
    digest = tokens.to_bytes(4, "big")
    return PrefixNode(digest, PLAIN, tokens, tokens, 1, references, 5.0, ends, list(children))


def test_a_cell_says_what_its_block_is() -> None:
    picture = pool_picture(inspection([0, 0, 0, 1, 3], [-1, 100, 2, -1, -1]))
    assert list(base64.b64decode(picture["states"])) == [0, 1, 2, 3, 4]
    assert picture["counts"] == {"free": 1, "cached": 1, "recent": 1, "in use": 1, "shared": 1}
    assert (picture["num_blocks"], picture["blocks_per_cell"]) == (5, 1)


def test_a_large_pool_has_few_cells_and_the_busiest_block_of_each_is_shown() -> None:
    references = [0] * 100_000
    references[99_999] = 2
    picture = pool_picture(inspection(references, [-1] * 100_000))
    cells = base64.b64decode(picture["states"])
    assert len(cells) <= MAX_CELLS
    assert len(cells) * picture["blocks_per_cell"] >= 100_000
    assert (cells[-1], set(cells[:-1])) == (4, {0})
    assert picture["counts"]["shared"] == 1


def test_boxes_stand_where_their_prefixes_are() -> None:
    tree = tree_picture([node(32, node(48, node(64)), node(40)), node(16, references=2)])
    boxes = {box["digest"]: box for box in tree["boxes"]}
    place = {int(k, 16): (b["x"], b["width"], b["from"], b["to"]) for k, b in boxes.items()}
    third = pytest.approx(1 / 3, abs=1e-5)
    assert place[32] == (0.0, pytest.approx(2 / 3, abs=1e-5), 0, 32)
    assert place[48] == (0.0, third, 32, 48)
    assert place[64] == (0.0, third, 48, 64)
    assert place[40] == (third, third, 32, 40)
    assert place[16] == (pytest.approx(2 / 3, abs=1e-5), third, 0, 16)
    assert (tree["num_prefixes"], tree["num_nodes"]) == (3, 5)


def test_of_a_huge_tree_the_widest_boxes_are_drawn_each_below_its_own() -> None:
    wide = node(16, *(node(32 + i) for i in range(2 * MAX_BOXES)))
    tree = tree_picture([wide, node(8)])
    assert len(tree["boxes"]) == MAX_BOXES
    assert tree["num_nodes"] == 2 * MAX_BOXES + 2
    assert {box["to"] for box in tree["boxes"][:2]} == {16, 8}


def test_an_empty_cache_has_a_picture() -> None:
    assert tree_picture([])["boxes"] == []
    assert pool_picture(inspection([], []))["num_blocks"] == 0


def test_an_observer_survives_errors_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [TypeError("an odd answer"), DeadlineError("no answer")]

    def status() -> None:
        raise errors[0] if len(errors) == 1 else errors.pop(0)

    cluster: Any = SimpleNamespace(name="away", status=status)
    monkeypatch.setattr(observer, "INTERVAL_S", 0.01)
    monkeypatch.setattr(observer, "POLL_S", 0.01)
    with observer.Observer(cluster) as watching:
        number, problems = 0, []
        while len(problems) < 2:
            newer, text = watching.wait_newer(number, 30.0)
            assert newer > number
            number = newer
            problems.append(json.loads(text)["problem"])
    assert problems[0] == "a look at the cluster: TypeError: an odd answer"
    assert problems[1] == "no answer"
