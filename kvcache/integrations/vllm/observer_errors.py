"""Errors of the parts that only observe an engine. None of them may stop its scheduler."""

from __future__ import annotations

from kvcache.base.logs import get_logger

logger = get_logger(__name__)


class ObserverErrors:
    """Logs the first error of each part."""

    def __init__(self) -> None:
        self._parts: set[str] = set()

    def note(self, part: str, error: Exception) -> None:
        """Log an error with its traceback, unless the part had one before."""
        if part not in self._parts:
            self._parts.add(part)
            logger.error(
                "%s failed; the engine goes on, later errors are not logged", part, exc_info=error
            )
