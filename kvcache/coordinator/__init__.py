"""`Coordinator`: manager, command stream, jobs and clients of one cluster, as one state machine.

    coordinator.py   messages and ticks in, messages out    epoch_state.py    the state of one epoch
    parts.py         the services that it uses              settings.py       phases, settings
    membership.py    which processes obey, in which epoch   remote_calls.py   calls by name
    clients.py       who is attached, one client's steps    job_table.py      jobs by rank
    serving.py       a step or call, answered               auditor.py        labels against state
    forward_plan.py  content-checked forwards               watchdog.py       overdue waits
    label_collection.py  labels of all ranks                step_recorder.py  events for a recorder
    recovery.py      the rebuilt manager, clients' return

Returns the messages to send, and sends nothing itself.
"""

from kvcache.coordinator.coordinator import Coordinator
from kvcache.coordinator.settings import Phase

__all__ = ["Coordinator", "Phase"]
