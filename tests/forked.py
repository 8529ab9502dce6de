"""Calls in a fork of this process, which starts at once and has everything imported."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 60.0


def in_a_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns in a process of its own, or the error that it raises."""
    fork = get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_call, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_S), "the fork does not answer"
        return ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()


def _call(answer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer.send(function(*arguments))
    except Exception as error:
        answer.send(error)
