"""`Coordinator`: manager, command stream, jobs and clients of one cluster, as one state machine.

    coordinator.py   messages and ticks in, messages out    settings.py       what it is told
    membership.py    which processes obey, in which epoch   epoch_state.py    what one epoch knows
    clients.py       who is attached                        client_ledger.py  one client's steps
    serving.py       a step or call, answered               remote_calls.py   calls by name
    forward_plan.py  content-checked forwards               job_table.py      who has reported
    label_collection.py  what ranks hold, when asked        recovery.py       kept from before
    reattachment.py  clients of before                      auditor.py        labels against books
    phase.py         how far it is                          watchdog.py       what is overdue
    step_recorder.py what happens, as events, and who hears of it

Returns what must be sent and sends nothing itself.
"""

from kvcache.coordinator.coordinator import Coordinator
from kvcache.coordinator.phase import Phase

__all__ = ["Coordinator", "Phase"]
