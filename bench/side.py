"""One side of a comparison, in a process and an environment of its own.

    python side.py NAME

NAME is a core of this package, or `peer`. Reads a `Setup` as JSON, says when it is ready, then
reads one function name and its arguments per line and answers in JSON what the function returned:
mostly the seconds of one repetition. A line `null`, answered by `ended`, makes room for the next
setup. Each setup lives in a process of its own, forked from one that has imported everything, which
takes the peer 15 seconds.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent))

from churn import Churn
from flat import Flat
from hostile import Hostile
from short_prompts import ShortPrompts
from side_setup import Setup
from workloads import Decoding, Prompts, StoredEvents

SUITES = {
    "prompts": Prompts,
    "short": ShortPrompts,
    "decoding": Decoding,
    "events": StoredEvents,
    "churn": Churn,
    "hostile": Hostile,
    "flat": Flat,
}


def manager_maker(name: str) -> Any:
    """Return what makes a manager of that side from a `Setup`."""
    if name == "peer":
        from peer_manager import PeerManager

        return PeerManager
    from our_manager import OurManager

    return OurManager


def serve(make_manager: Any, setup: Setup, answers: TextIO) -> None:
    """Answer calls to the suite of `setup` until there are no more."""
    suite = SUITES[setup.suite](make_manager, setup)
    print("ready", file=answers, flush=True)
    while (call := json.loads(sys.stdin.readline() or "null")) is not None:
        function, arguments = call
        print(json.dumps(getattr(suite, function)(*arguments)), file=answers, flush=True)
    print("ended", file=answers, flush=True)


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr
    make_manager = manager_maker(sys.argv[1])
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            try:
                serve(make_manager, Setup(**json.loads(line)), answers)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":
    main()
