"""vLLM's API server in a forked process; runs in vLLM's environment. Writes its output to standard
error."""

from __future__ import annotations

import os
import sys


def main(*arguments: str) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.argv = ["api_server", *arguments]
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()
