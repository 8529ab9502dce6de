"""One side of a comparison, in a process and an environment of its own.

    python side.py ours|peer NUM_BLOCKS PROMPT_TOKENS

Reads one workload name and argument per line, answers the seconds of one repetition.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from workloads import Workloads


def main() -> None:
    name, num_blocks, prompt_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = sys.stdout
    sys.stdout = sys.stderr
    if name == "peer":
        from peer_manager import PeerManager as Manager
    else:
        from our_manager import OurManager as Manager
    workloads = Workloads(Manager(num_blocks), prompt_tokens)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        workload, arguments = json.loads(line)
        print(getattr(workloads, workload)(*arguments), file=answers, flush=True)


if __name__ == "__main__":
    main()
