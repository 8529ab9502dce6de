"""Replay walks from the command line.

    python -m tests.agreement "full, window" pressure 7
    python -m tests.agreement full all --seeds 50 --operations 300 --without FORKS EVICTIONS
    python -m tests.agreement dense all --seeds 20
    python -m tests.agreement latent room 3 --audit-one-in 1

The first walk that fails prints its log and ends the run. The seed alone determines the walk; an
audit finds what has happened since the one before.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from tests.agreement.configurations import (
    CONFIGURATIONS,
    DENSE,
    Family,
    Operation,
    configuration_named,
)
from tests.agreement.walk import NUM_OPERATIONS, replay
from tests.audits import ONE_IN


def main() -> None:
    """Parse the arguments and walk."""
    parser = argparse.ArgumentParser(prog="python -m tests.agreement")
    lists = {"all": CONFIGURATIONS, "dense": DENSE}
    every = [c.name for c in (*CONFIGURATIONS, *DENSE)]
    parser.add_argument("configuration", choices=[*lists, *every])
    parser.add_argument("family", choices=["all", *(f.value for f in Family)])
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from the first on")
    parser.add_argument("--operations", type=int, default=NUM_OPERATIONS)
    parser.add_argument("--audit-one-in", type=int, default=ONE_IN, help="operations on average")
    operations = [operation.name for operation in Operation]
    parser.add_argument("--without", nargs="*", choices=operations, default=())
    given = parser.parse_args()
    names = [c.name for c in lists.get(given.configuration, ())] or [given.configuration]
    for name in names:
        configuration = configuration_named(name)
        left_out = {Operation[operation] for operation in given.without}
        configuration = replace(configuration, operations=configuration.operations - left_out)
        for family in Family if given.family == "all" else [Family(given.family)]:
            for seed in range(given.seed, given.seed + given.seeds):
                replay(
                    configuration,
                    family,
                    seed,
                    given.operations,
                    audit_one_in=given.audit_one_in,
                )
            print(f"{name}, {family.value}: {given.seeds} agree")


if __name__ == "__main__":
    main()
