"""`python -m tests.fuzz --minutes 5`: all decoders in turn, for this time in total."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys

from tests.fuzz.fuzzing import Finding, fuzz
from tests.fuzz.targets import make_targets


def main() -> int:
    """Fuzz; return 1 if something was found."""
    targets = make_targets()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TARGET", help=f"of {', '.join(targets)}")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed where not given")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(targets)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}: choose of {', '.join(targets)}")
    logging.disable(logging.CRITICAL)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    chosen = [targets[name] for name in arguments.names or targets]
    print(f"seed {seed}")
    num_findings = 0
    for target in chosen:
        try:
            number = fuzz(target, seed, seconds=60 * arguments.minutes / len(chosen))
            print(f"{target.name}: {number:,} inputs, nothing found", flush=True)
        except Finding as found:
            num_findings += 1
            print(f"FOUND {found}", flush=True)
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
