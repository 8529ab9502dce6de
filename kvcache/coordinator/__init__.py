"""`Coordinator`: manager, command stream, jobs and clients of one cluster, as one state machine.

    coordinator.py   messages and ticks in, messages out    settings.py       what it is told
    membership.py    which processes obey, in which epoch   reign.py          what one epoch knows
    clients.py       who is attached                        client_ledger.py  one client's steps
    serving.py       a step or call, answered               remote_calls.py   calls by name
    forward_plan.py  content-checked forwards               job_book.py       who has reported

Returns what must be sent and sends nothing itself.
"""

from kvcache.coordinator.coordinator import Coordinator, Phase

__all__ = ["Coordinator", "Phase"]
