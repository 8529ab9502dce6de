"""Wait until something is so, with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    holds: Callable[[], object],
    otherwise: object = "",
    *,
    meanwhile: Callable[[], object] = lambda: None,
    limit_s: float = 60.0,
    pause_s: float = 0.002,
) -> None:
    """Return when `holds()` is true; call `meanwhile` and pause before each other try.

    After `limit_s`, raises AssertionError with `otherwise`, or with what that returns.
    """
    give_up_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > give_up_s:
            raise AssertionError(otherwise() if callable(otherwise) else otherwise)
        meanwhile()
        time.sleep(pause_s)
