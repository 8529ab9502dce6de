"""A clock that skips the pauses of its process."""

from __future__ import annotations

import threading

from kvcache.base.clock import StallAwareClock, VirtualClock


def test_short_pauses_count_and_of_a_long_one_only_the_usual_part() -> None:
    machine = VirtualClock(100.0)
    clock = StallAwareClock(machine, 1.0)
    started_s = clock.now()
    machine.advance(0.75)
    assert clock.now() - started_s == 0.75
    machine.advance(600.0)
    assert clock.now() - started_s == 1.75
    machine.advance(1.0)
    assert clock.now() - started_s == 2.75


def test_a_pause_is_skipped_once_whichever_caller_asks_first() -> None:
    machine = VirtualClock(100.0)
    clock = StallAwareClock(machine, 1.0)
    started_s = clock.now()
    machine.advance(50.0)
    seen: list[float] = []
    threads = [threading.Thread(target=lambda: seen.append(clock.now())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [now_s - started_s for now_s in seen] == [1.0] * 8
