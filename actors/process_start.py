"""When a process of this machine started: with its id, that tells it from all others.

Reads /proc only. Needs neither Ray nor torch.
"""

from __future__ import annotations

_STARTED_FIELD = 19
"""Of /proc/PID/stat, counted behind the name: when the process started, in ticks since boot."""


def started_ticks(process_id: int) -> int:
    """Return when a process of this machine started, 0 if there is none, or nothing is left of it
    but its entry."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[_STARTED_FIELD])
