"""The protocol as a small explicit-state model, explored exhaustively.

    rules.py        every guard of the protocol, one sentence each; any can be switched off
    state.py        the state of all parties, as immutable records
    network.py      the streams of commands
    worker.py       grants, commands, forwards and copies of a rank     disk.py   its files
    steps.py        the coordinator's blocks, requests and steps
    coordinator.py  epochs, recovery, clients given up                  jobs.py   copies by job
    client.py       steps, failures, attaching again
    actions.py      all possible actions                        faults.py     deaths and losses
    checks.py       invariants, and states at rest
    explorer.py     breadth-first search
    scenarios.py    sizes, budgets, and the rule that each scenario removes

Imports nothing of the package: a model with shared code would share its errors.
`python -m tests.model` explores all scenarios.
"""
