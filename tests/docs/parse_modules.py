"""Parses command lines of our own modules (`python -m tests.chaos ...`) with their real parsers.

Run as a script, for each line of standard input: the module's `main` runs until it has parsed its
arguments, and no further. Prints the lines that are refused. A process of its own, because
benchmarks set the environment at import.
"""

from __future__ import annotations

import argparse
import runpy
import shlex
import sys
from typing import Any

_PARSE = argparse.ArgumentParser.parse_args


class Parsed(BaseException):
    """The arguments are valid; stop here."""


def _parse_and_stop(parser: argparse.ArgumentParser, *given: Any) -> argparse.Namespace:
    _PARSE(parser, *given)
    raise Parsed


def _is_understood(words: list[str]) -> bool:
    sys.argv = [words[0], *words[1:]]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except Parsed:
        return True
    except SystemExit:
        pass
    return False


if __name__ == "__main__":
    argparse.ArgumentParser.parse_args = _parse_and_stop  # type: ignore[assignment,method-assign]
    for line in sys.stdin.read().splitlines():
        if not _is_understood(shlex.split(line)):
            print(line)
