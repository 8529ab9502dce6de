"""The reports of `tools/structure.py` are correct."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from tests.test_architecture import ORDER
from tools import structure
from tools.structure import Depth


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of a few modules: `lonely` and the package `pair` have one importer, `shared` two."""
    sources = {
        "kvcache/__init__.py": "",
        "kvcache/core.py": "import kvcache.lonely\nfrom kvcache import shared\n",
        "kvcache/lonely.py": "import os\n" * 70,
        "kvcache/shared.py": "x = 1\n",
        "kvcache/manager/__init__.py": "def f():\n    from kvcache.shared import x\n",
        "actors/__init__.py": "from actors.pair import a, b\n",
        "actors/pair/__init__.py": "a = b = 1\n",
        "tests/test_architecture.py": 'ORDER: object = (("shared",), ("core", "manager"))\n',
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return tmp_path


def test_a_module_has_one_importer_whatever_the_form_of_the_import(tree: Path) -> None:
    assert structure.modules_with_one_importer(tree) == ["actors.pair", "kvcache.lonely"]


def test_large_classes_and_wide_constructors_are_named(tree: Path) -> None:
    methods = "\n".join(f"    def m{i}(self): ..." for i in range(25))
    (tree / "kvcache" / "shared.py").write_text(
        f"class Small:\n{methods}\n    def _own(self): ...\n"
        f"class Large:\n{methods}\n    async def more(self): ...\n"
        f"class Overriding(Small):\n{methods}\n"
        "class Heir(Small[int]):\n    @property\n    def more(self): ...\n"
        "class Narrow:\n    def __init__(self, a, b, c, d, *, e, f): ...\n"
        "class Wide:\n    def __init__(self, a, /, b, c, d, *, e, f, g): ...\n",
        encoding="utf-8",
    )
    assert structure.large_classes(tree) == ["Large", "Heir"]
    assert structure.wide_constructors(tree) == ["Wide"]


def test_the_decision_path_holds_packages_and_modules(tree: Path) -> None:
    names = [path.relative_to(tree).as_posix() for path in structure.decision_path(tree)]
    assert names == ["kvcache/manager/__init__.py", "kvcache/core.py"]


def test_ranks_are_those_of_the_architecture_test(tree: Path) -> None:
    assert structure.num_import_ranks(tree) == 2
    assert structure.num_import_ranks(structure.ROOT) == len(ORDER)
    (tree / "tests" / "test_architecture.py").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="has no ORDER"):
        structure.num_import_ranks(tree)


def test_frames_and_files_are_those_of_the_product_alone() -> None:
    clock = VirtualClock()

    def call() -> float:
        clock.now()
        json.dumps([])
        return clock.now()

    assert structure.counted(call) == (0.0, Depth(files=1, frames=2))


@pytest.mark.launches  # measures all of them
def test_the_table_has_a_figure_in_every_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["structure", "--json", str(path)])
    structure.main()
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert facts.pop("python")
    assert facts.keys() == structure.LABELS.keys()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:78].rstrip() for line in lines] == list(structure.LABELS.values())
    for name, figure in facts.items():
        numbers = figure.values() if isinstance(figure, dict) else [figure]
        assert all(number > 0 for number in numbers), name
