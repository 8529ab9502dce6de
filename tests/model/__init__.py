"""The protocol as a small explicit-state model, explored exhaustively.

    rules.py        every guard of the protocol, one sentence each; any can be switched off
    state.py        what the parties know, as immutable records
    network.py      the streams of commands, and what may still be delivered
    worker.py       grants, commands, forwards and copies of a rank     disk.py   its files
    book.py         the coordinator's blocks, requests and steps
    coordinator.py  epochs, recovery, clients given up                  jobs.py   copies by job
    client.py       steps, failures, attaching again
    actions.py      everything that may happen next             faults.py     what befalls them
    checks.py       what must never be, and when all is at rest
    explorer.py     breadth first over all of it
    scenarios.py    sizes, budgets, and which rule each scenario removes

Imports nothing of the package: a model that shared its code would share its errors.
`python -m tests.model` explores all scenarios.
"""
