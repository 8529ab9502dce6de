"""The size of a model, and how often each kind of action may happen in it.

A `Model` is rules and sizes. The budget bounds the state space; an action without budget is not
offered. Refuses unknown kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.model.rules import Rules
from tests.model.state import Client, Rank, State

BUDGET: dict[str, str] = {
    "step": "a client schedules a step",
    "finish": "a request ends",
    "fork": "a request goes on with its own copy of a block",
    "reset": "the weights change",
    "store": "a block is copied to host memory",
    "load": "a block is copied from host memory",
    "save": "a host slot is copied to a file",
    "fetch": "a file is copied to a host slot",
    "replace": "a host slot that holds something is given to something else",
    "timeout": "a copy's deadline passes",
    "fail": "a forward fails on one rank",
    "worker": "a worker process dies",
    "coordinator": "a coordinator dies",
    "second": "a coordinator begins while another lives",
    "rivalry": "a coordinator that is refused takes another epoch",
    "client": "a client dies",
    "node": "a worker process dies, and the host memory of its node with it",
    "silence": "a client that lives is given up",
    "amnesia": "what was saved is lost",
    "damage": "a file is damaged",
    "foreign": "a file is replaced by somebody else's",
    "stale": "an old message is delivered",
    "again": "a client's request is delivered again",
    "lost": "a report is lost",
    "doubled": "a report is delivered twice",
}
"""Kinds of actions that are counted."""

KINDS = tuple(BUDGET)

_PLACE = {kind: i for i, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class Sizes:
    """Numbers of things. `parents[x]` is the content that `x` continues, 0 for a first block.

    `window`: messages that some rank has not applied. `pipeline`: forwards that a client schedules
    ahead. Contents at the start: `cached` in blocks, `warm` in host slots, `filed` in files;
    `labels` are those of each rank, if they are not all of `cached`. `is_asking`: a client's
    request and its answer are separate messages, not one action. `is_verifying`: files are
    verified.
    """

    blocks: int = 1
    slots: int = 0
    contents: int = 1
    parents: Mapping[int, int] = field(default_factory=dict)
    clients: int = 1
    pipeline: int = 2
    window: int = 8
    cached: tuple[int, ...] = ()
    labels: tuple[tuple[int, ...], ...] = ()
    warm: tuple[int, ...] = ()
    filed: tuple[int, ...] = ()
    ranks: int = 2
    is_asking: bool = False
    is_verifying: bool = True
    budget: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.budget) - set(BUDGET)
        if unknown:
            raise ValueError(f"no actions {sorted(unknown)}: the kinds are {sorted(BUDGET)}")

    def path(self, content: int) -> tuple[int, ...]:
        """Return the contents that `content` continues, first block first, and itself."""
        parent = self.parents.get(content, 0)
        return (*(self.path(parent) if parent else ()), content)


class Model:
    """Rules and sizes. `keeps_history`: old messages may still do harm, because the rule that
    refuses them is off; otherwise they are dropped once every rank would refuse them."""

    def __init__(self, rules: Rules, sizes: Sizes, *, is_sorting: bool = True) -> None:
        """Combine both. `is_sorting`: ranks with equal states are not distinguished."""
        self.is_sorting = is_sorting
        self.rules = rules
        self.sizes = sizes
        refusing = (rules.exact, rules.present_epoch, rules.nonce, rules.grant_first)
        self.keeps_history = not (all(refusing) and rules.forward_epoch)
        self.paths = {x: sizes.path(x) for x in range(1, sizes.contents + 1)}
        self.children: dict[int, tuple[int, ...]] = {
            x: tuple(y for y, path in self.paths.items() if len(path) > 1 and path[-2] == x)
            for x in self.paths
        }

    def initial(self) -> State:
        """Return the state in which nothing has begun, after an earlier coordinator saved its
        epoch."""
        sizes = self.sizes
        cached = _padded(sizes.cached, sizes.blocks)
        warm, files = _padded(sizes.warm, sizes.slots), tuple((x, x) for x in sizes.filed)
        labels = sizes.labels or (cached,) * sizes.ranks
        ranks = [Rank(0, 0, 0, 0, 0, cached, own, warm, warm, files) for own in labels]
        return State(
            ranks=tuple(sorted(ranks)),
            coordinators=(),
            clients=tuple(Client(10 * (i + 1), 0, 0, 1, -1) for i in range(sizes.clients)),
            steps=(),
            streams=(),
            saved_epoch=1,
            saved_model_epoch=0,
            weights=0,
            last_nonce=0,
            left=tuple(sizes.budget.get(kind, 0) for kind in KINDS),
        )

    def has(self, state: State, kind: str) -> bool:
        """Return whether an action of `kind` may happen once more."""
        return state.left[_PLACE[kind]] > 0

    def spend(self, state: State, kind: str) -> State:
        """Return the state with one action of `kind` less to come."""
        i = _PLACE[kind]
        left = state.left
        return state._replace(left=(*left[:i], left[i] - 1, *left[i + 1 :]))


def _padded(contents: tuple[int, ...], length: int) -> tuple[int, ...]:
    return contents + (0,) * (length - len(contents))
