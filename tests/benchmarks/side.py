"""One side of a comparison, in a process and an environment of its own.

    python side.py ours|peer SETUP

SETUP is a `Setup` as JSON. Reads one function name and its arguments per line, answers in JSON
what the function returned: mostly the seconds of one repetition.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from churn import Churn
from hostile import Hostile
from side_setup import Setup
from workloads import Decoding, Prompts, StoredEvents

SUITES = {
    "prompts": Prompts,
    "decoding": Decoding,
    "events": StoredEvents,
    "churn": Churn,
    "hostile": Hostile,
}


def main() -> None:
    name, setup = sys.argv[1], Setup(**json.loads(sys.argv[2]))
    answers = sys.stdout
    sys.stdout = sys.stderr
    if name == "peer":
        from peer_manager import PeerManager as Manager
    else:
        from our_manager import OurManager as Manager
    logging.disable(logging.WARNING)
    suite = SUITES[setup.suite](Manager, setup)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        function, arguments = json.loads(line)
        print(json.dumps(getattr(suite, function)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
