"""The copying thread has a lower priority than the worker's own, as configured."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from kvcache.protocol.commands import Store
from kvcache.worker.copies.copy_pool import (
    LEAST_NICENESS,
    LOW_NICENESS,
    CopyPriority,
    take_priority,
)
from tests.worker.test_copy_thread import make
from tests.worker.worker_support import ids

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="THREADS HAVE NO PRIORITY HERE: copy_priority IS NOT TESTED"
)

LOW = min(LEAST_NICENESS, os.getpriority(os.PRIO_PROCESS, 0) + LOW_NICENESS)


def standing(thread_id: int) -> tuple[int, int]:
    """Return how nice a thread is, and its class."""
    return os.getpriority(os.PRIO_PROCESS, thread_id), os.sched_getscheduler(thread_id)


OWN = standing(threading.get_native_id())
EXPECTED: dict[CopyPriority, tuple[int, int]] = {
    "normal": OWN,
    "low": (LOW, OWN[1]),
    "idle": (OWN[0], os.SCHED_IDLE),
}


@pytest.mark.parametrize("priority", EXPECTED)
def test_the_thread_that_copies_has_the_priority_that_is_asked_for(priority: CopyPriority) -> None:
    bench = make(copy_priority=priority)
    bench.send(Store(1, "host", ids(3), ids(0)))
    assert bench.settle(1).ok
    (copies,) = [each for each in threading.enumerate() if each.name == "kvcache-copies"]
    assert copies.native_id is not None
    assert standing(copies.native_id) == EXPECTED[priority]
    assert standing(threading.get_native_id()) == OWN
    bench.worker.close()
    copies.join()


def test_copies_go_behind_unless_they_are_told_otherwise() -> None:
    bench = make()
    assert bench.worker.settings.copy_priority == "low"
    bench.worker.close()


@pytest.mark.parametrize(
    ("priority", "call"), [("low", "setpriority"), ("idle", "sched_setscheduler")]
)
def test_where_it_cannot_be_lowered_copies_are_made_all_the_same(
    priority: CopyPriority,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, call, refuse)
    bench = make(copy_priority=priority)
    bench.send(Store(1, "host", ids(3), ids(0)))
    assert bench.settle(1).ok
    bench.worker.close()
    assert "copies keep the priority of their worker: Operation not permitted" in caplog.text


def test_normal_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("setpriority", "sched_setscheduler"):
        monkeypatch.delattr(os, call)
    take_priority("normal")
