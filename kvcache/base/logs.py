"""Loggers that cannot be flooded: each call in the code writes a bounded number of lines.

Use `get_logger(__name__)` for lines that a peer's messages or a repeated fault can cause. Lines
beyond the limit are counted; the next line that is written says how many were left out.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence

from kvcache.base.errors import legible

MAX_LINES = 20
"""Lines that one place in the code may write per period."""

PERIOD_S = 10.0


class LineLimit(logging.Filter):
    """Passes `max_lines` records per place (file and line) and period; counts the others.

    Records are made `legible`, because they contain ids that peers chose. Periods follow the
    records' own times. Thread-safe.
    """

    def __init__(self, max_lines: int = MAX_LINES, period_s: float = PERIOD_S) -> None:
        super().__init__()
        self._max_lines = max_lines
        self._period_s = period_s
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int], _Period] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write this record; append the number of records left out before it."""
        if not self._passes(record):
            return False
        told = record.getMessage()
        if (line := legible(told)) is not told:
            record.msg, record.args = line, None
        return True

    def _passes(self, record: logging.LogRecord) -> bool:
        place = (record.pathname, record.lineno)
        with self._lock:
            period = self._places.get(place)
            if period is None or record.created - period.start_s >= self._period_s:
                left_out = 0 if period is None else period.num_lines - self._max_lines
                self._places[place] = _Period(record.created)
                if left_out > 0:
                    record.msg = f"{record.getMessage()} ({left_out} more lines were left out)"
                    record.args = None
                return True
            period.num_lines += 1
            return period.num_lines <= self._max_lines


class _Period:
    """The lines of one place since `start_s`."""

    __slots__ = ("num_lines", "start_s")

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.num_lines = 1


def get_logger(name: str) -> logging.Logger:
    """Return the standard logger of this name, with one LineLimit."""
    logger = logging.getLogger(name)
    if not any(isinstance(known, LineLimit) for known in logger.filters):
        logger.addFilter(LineLimit())
    return logger


class CallbackErrors:
    """Logs errors of an object that a caller passed in. Counts all of them, but logs only the 1st,
    2nd, 4th, 8th and so on with its traceback, because the object may fail at every call."""

    def __init__(self, logger: logging.Logger, whose: str) -> None:
        """Start with no errors of `whose`, such as "the event sink"."""
        self._logger = logger
        self._whose = whose
        self.count = 0

    def note(self, consequence: str) -> None:
        """Record the exception being handled. `consequence` says what happens to the call."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            self._logger.exception(
                "%s raised, error %d of it: %s", self._whose, self.count, consequence
            )


class _LineFormatter(logging.Formatter):
    """Lines with time, level and place. Text after a line break is indented, so that text from a
    peer cannot look like a line of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(super().format(record).splitlines())


def log_to_stderr(names: Sequence[str]) -> None:
    """Write lines of these loggers, from level info on, to stderr. Only for our own processes: in
    an application's process, the application configures logging. Repeatable."""
    for name in names:
        log = logging.getLogger(name)
        if log.handlers:
            continue
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_LineFormatter())
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
