"""Breadth-first search over all states: the first violation found has a shortest trace.

Then a backward search from the states at rest: a state that cannot reach one without another fault
would never end. Traces are made afterwards, by repeating the path. Stops, and says so, at a maximum
number of states.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tests.model.actions import begun, successors
from tests.model.checks import is_quiet, violation
from tests.model.sizes import KINDS, Model
from tests.model.state import State

STUCK = "from here nothing leads to rest"

PROGRESS_EVERY = 5000
"""States between two calls of `progress`."""


@dataclass(frozen=True)
class Found:
    """The result of an exploration. `problem` is empty if nothing is wrong; `is_complete` says
    whether every state was visited. `path` leads to the problem."""

    problem: str
    num_states: int
    num_actions: int
    num_quiet: int
    is_complete: bool
    unspent: tuple[str, ...] = ()
    path: tuple[State, ...] = ()


def explore(
    model: Model,
    max_states: int = 2_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Visit every state; stop at the first violation. `progress(states, left)`."""
    start = begun(model)
    index: dict[State, int] = {start: 0}
    states, parents = [start], array("i", [-1])
    before, after = array("i"), array("i")
    quiet: list[int] = []
    num_actions = at = 0
    problem, last, is_complete = violation(model, start), 0, False
    while at < len(states) and not problem and len(states) <= max_states:
        if progress is not None and at % PROGRESS_EVERY == 0:
            progress(len(states), len(states) - at)
        state = states[at]
        if is_quiet(model, state):
            quiet.append(at)
        for _, is_fault, following in successors(model, state):
            num_actions += 1
            known = index.get(following)
            if known is None:
                last = known = index[following] = len(states)
                states.append(following)
                parents.append(at)
                problem = violation(model, following)
                if problem:
                    break
            if not is_fault:
                before.append(at)
                after.append(known)
        at += 1
    if not problem and at == len(states):
        is_complete = True
        stuck = _first_stuck(len(states), before, after, quiet)
        if stuck is not None:
            problem, last = STUCK, stuck
    path = _path(states, parents, last) if problem else ()
    unspent = _unspent(states)
    return Found(problem, len(states), num_actions, len(quiet), is_complete, unspent, path)


def trace(model: Model, path: tuple[State, ...]) -> list[str]:
    """Return the actions along a path, line by line."""
    lines = []
    for state, following in pairwise(path):
        words = next(
            action.words for action in successors(model, state) if action.state == following
        )
        lines.append(" ".join(map(_text, words)))
    return lines


def _text(word: object) -> str:
    if isinstance(word, tuple) and hasattr(word, "_asdict"):
        said = [f"{name}={_text(value)}" for name, value in word._asdict().items() if value]
        return f"{type(word).__name__}({', '.join(said)})"
    if isinstance(word, tuple):
        return "[" + ", ".join(map(_text, word)) + "]"
    return str(word)


def _unspent(states: list[State]) -> tuple[str, ...]:
    """Return the kinds of actions whose budget no state has used up."""
    left = [min(column) for column in zip(*(state.left for state in states), strict=True)]
    return tuple(kind for kind, number in zip(KINDS, left, strict=True) if number)


def _path(states: list[State], parents: array[int], last: int) -> tuple[State, ...]:
    path = []
    while last >= 0:
        path.append(states[last])
        last = parents[last]
    return tuple(reversed(path))


def _first_stuck(
    num_states: int, before: array[int], after: array[int], quiet: list[int]
) -> int | None:
    """Return the first state that cannot reach one of `quiet` without a fault."""
    sources: list[list[int]] = [[] for _ in range(num_states)]
    for source, target in zip(before, after, strict=True):
        sources[target].append(source)
    leads = bytearray(num_states)
    pending = list(quiet)
    for state in quiet:
        leads[state] = 1
    while pending:
        for source in sources[pending.pop()]:
            if not leads[source]:
                leads[source] = 1
                pending.append(source)
    return next((i for i in range(num_states) if not leads[i]), None)
