"""docs/core.md shows the columns of a real core at four moments."""

from __future__ import annotations

from pathlib import Path

from kvcache.core.columns import BLOCK, CHILD, NEXT, NODE, OWNER, PARENT, REF, ROWS
from kvcache.core.flat_core import FlatCore
from tests.core.builders import full, make_flat_core, make_request, run_request

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "core.md").read_text(encoding="utf-8")
OF_BLOCKS = {"REF": REF, "NODE": NODE}
OF_NODES = {
    "PARENT": PARENT,
    "CHILD": CHILD,
    "BLOCK": BLOCK,
    "OWNER": OWNER,
    "ROWS": ROWS,
}
UNITS = {"a": 10, "b": 11, "c": 12, "d": 13, "x": 20, "y": 21, "z": 22, "e": 30}


def pictures() -> list[dict[str, list[str]]]:
    """Return the page's pictures that show blocks: the cells of each line, by its name."""
    found = []
    for text in PAGE.split("```")[1::2]:
        lines = [line.split() for line in text.splitlines() if line.strip()]
        rows = {words[0]: words[1:] for words in lines}
        if "block" in rows:
            found.append(rows)
    return found


def require(core: FlatCore, picture: dict[str, list[str]]) -> None:
    """Compare every line that a picture has."""
    columns = core.store.columns
    for names, rows, numbers in (
        (OF_BLOCKS, columns.block, picture["block"]),
        (OF_NODES, columns.node, picture.get("node", [])),
    ):
        count = sum(word.isdigit() for word in numbers)
        for name, place in names.items():
            if name in picture and count:
                cells = [str(value or ".") for value in rows[:count, place].tolist()]
                assert picture[name][:count] == cells, name
    if "tokens" in picture:
        letters = {tokens: letter for letter, tokens in UNITS.items()}
        count = sum(word.isdigit() for word in picture["node"])
        firsts = [letters.get(tokens, ".") for tokens in columns.tokens[:count, 0].tolist()]
        assert picture["tokens"][:count] == firsts


def free_list(core: FlatCore) -> str:
    block, found = core.store.columns.block, []
    b = int(block[0, NEXT])
    while b:
        found.append(str(b))
        b = int(block[b, NEXT])
    return "free list: " + (" ".join(found) or "empty")


def prompt(units: str, num_more: int = 1) -> list[int]:
    return [UNITS[unit] for unit in units for _ in range(4)] + [9] * num_more


def test_the_pictures_of_the_page_are_those_of_a_core() -> None:
    computed, gone, admitted, evicted = pictures()
    core = make_flat_core(9, full(4))
    core.open_step("engine", 1)
    a = make_request("A", prompt("abc"))
    run_request(core, a)
    require(core, computed)
    assert free_list(core) in PAGE

    core.close_step()
    core.complete_steps("engine", 1)
    core.free(a)
    require(core, gone)
    assert free_list(core) in PAGE

    core.open_step("engine", 2)
    b = make_request("B", prompt("abd"))
    hit = core.cache.look_up(b)
    assert (hit.num_tokens, hit.block_ids[0].tolist()) == (8, [1, 2])
    run_request(core, b)
    require(core, admitted)
    assert free_list(core) in PAGE

    core.close_step()
    core.open_step("engine", 3)
    run_request(core, make_request("C", prompt("xyz", 0)))
    run_request(core, make_request("D", prompt("e", 0)))
    require(core, evicted)
    assert free_list(core) == "free list: empty"
