"""Schedules of faults from the command line.

    python -m tests.chaos processes --seeds 0:200      real processes, sockets and signals
    python -m tests.chaos ray --seeds 0:20             clusters on Ray
    python -m tests.chaos simulated --seeds 0:10000    one process, a virtual clock, two at a time

Names the failed seeds at the end, with the commands to repeat them. Exit code 1 then.
"""

from __future__ import annotations

from tests.chaos.runner import main

if __name__ == "__main__":
    raise SystemExit(main())
