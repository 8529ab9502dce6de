"""Confirmation before a cache is cleared, and the answers that count as yes."""

from __future__ import annotations

import io

import pytest

from actors.cli.admin import confirm
from kvcache.base.errors import ConfigurationError
from tests.metrics.test_log_line import statistics

MANAGER = statistics(1, asked=1, hit=0, evicted=0).manager
assert MANAGER is not None


class Terminal(io.StringIO):
    """A terminal whose user types one answer."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", ["y\n", "yes\n", " Y \n"])
def test_yes_is_yes(
    answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    confirm("chat", MANAGER, begins_epoch=True)
    asked = capsys.readouterr().err
    assert "drops 500 cached blocks of chat, ends all pins, and advances the model epoch" in asked
    assert asked.endswith("continue? [y/N] ")


@pytest.mark.parametrize("answer", ["\n", "n\n", "", "yess\n"])
def test_anything_else_is_no(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    with pytest.raises(ConfigurationError, match="is unchanged"):
        confirm("chat", MANAGER, begins_epoch=False)


def test_without_a_terminal_the_answer_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigurationError, match="no terminal to ask on: pass --yes"):
        confirm("chat", MANAGER, begins_epoch=False)
