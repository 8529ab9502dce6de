"""Loggers that cannot be flooded, and lines and errors that ids from outside cannot forge."""

from __future__ import annotations

import logging

import pytest

from kvcache.base.errors import ConfigurationError, RequestError, WrongBytesError, legible
from kvcache.base.logs import LineLimit, get_logger, log_to_stderr


def record(created: float, line: int = 1, text: str = "rank %d") -> logging.LogRecord:
    made = logging.LogRecord("x", logging.WARNING, "a.py", line, text, (3,), None)
    made.created = created
    return made


def test_a_place_writes_a_bounded_number_of_lines_in_a_period() -> None:
    limit = LineLimit(max_lines=2, period_s=10)
    assert [limit.filter(record(at)) for at in (0, 1, 2, 9.9)] == [True, True, False, False]


def test_other_places_are_not_silenced() -> None:
    limit = LineLimit(max_lines=1, period_s=10)
    assert limit.filter(record(0)) and not limit.filter(record(0))
    assert limit.filter(record(0, line=2))


def test_the_next_period_says_how_many_lines_were_left_out() -> None:
    limit = LineLimit(max_lines=1, period_s=10)
    for _ in range(4):
        limit.filter(record(0))
    after, later = record(10), record(20)
    assert limit.filter(after) and limit.filter(later)
    assert after.getMessage() == "rank 3 (3 more lines were left out)"
    assert later.getMessage() == "rank 3"


def test_a_logger_gets_one_limit_however_often_it_is_asked_for() -> None:
    logger = get_logger("kvcache.tests.logs")
    assert get_logger("kvcache.tests.logs") is logger
    assert sum(isinstance(known, LineLimit) for known in logger.filters) == 1


def test_lines_of_our_own_processes_say_when_and_where_and_cannot_be_forged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "kvcache-of-a-test"
    log_to_stderr((name,))
    log_to_stderr((name,))
    logging.getLogger(f"{name}.below").info("client %s", "a\n2026-01-01 ERROR forged")
    logging.getLogger(name).handlers.clear()
    (line, forged) = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO kvcache-of-a-test.below: client a")
    assert forged == "    2026-01-01 ERROR forged"


def test_ids_in_errors_are_escaped_and_shortened() -> None:
    forged = "a\nkvcache: all is well\0\x1b[2J\u202e"
    assert str(RequestError(f"request {forged}: unknown")) == (
        r"request a\nkvcache: all is well\x00\x1b[2J\u202e: unknown"
    )
    long = str(RequestError(f"request {'r' * 100_000} has 3 tokens: pass 4"))
    assert long == f"request {'r' * 100} [99,800 characters] {'r' * 100} has 3 tokens: pass 4"
    spaced = str(RequestError(f"request {'r ' * 50_000} has 3 tokens: pass 4"))
    assert len(spaced) < 10_000 and spaced.endswith("has 3 tokens: pass 4")


def test_legible_text_stays_as_it_is() -> None:
    for text in (
        "request \u00e4 \u8a71 \U0001f600",
        "/very/long" * 30,
        "several:\n  one\n  another",
    ):
        assert legible(text) is text or legible(text) == text
        assert str(ConfigurationError(text)) == text
    once = legible("\0" * 500 + "x" * 30_000 + "\n")
    assert legible(once) == once
    assert WrongBytesError().args == ("",)


def test_ids_in_log_lines_are_escaped_and_shortened(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("kvcache.tests.logs").warning("client %s has gone", "a\rb\n" + "c" * 1000)
    assert caplog.messages == [rf"client a\rb\n{'c' * 100} [800 characters] {'c' * 100} has gone"]
