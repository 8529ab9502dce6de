"""`Coordinator`: manager, command stream, jobs and clients of one cluster, as one state machine.

    coordinator.py   messages and ticks in, messages out    settings.py       its settings
    membership.py    which processes obey, in which epoch   epoch_state.py    the state of one epoch
    clients.py       who is attached, one client's steps    remote_calls.py   calls by name
    serving.py       a step or call, answered               job_table.py      jobs by rank
    forward_plan.py  content-checked forwards               auditor.py        labels against state
    label_collection.py  labels of all ranks                phase.py          its phase
    recovery.py      the rebuilt manager, clients' return   watchdog.py       overdue waits
    step_recorder.py events for a recorder

Returns the messages to send, and sends nothing itself.
"""

from kvcache.coordinator.coordinator import Coordinator
from kvcache.coordinator.phase import Phase

__all__ = ["Coordinator", "Phase"]
