"""The scenarios: sizes and budgets with all rules, and for each rule the smallest that needs it.

`SAFE` must have no violation. `UNSAFE` removes rules, and must have one. If another rule covers for
a removed one, `BACKED` names it, and both are removed. Long scenarios take more than a few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.model.rules import Rules
from tests.model.sizes import Model, Sizes


@dataclass(frozen=True)
class Scenario:
    """A model to explore: sizes, and the rules that are removed."""

    name: str
    sizes: Sizes
    removed: tuple[str, ...] = field(default=())
    is_long: bool = False

    def model(self, *, is_sorting: bool = True) -> Model:
        """Return the model; without sorting, a rank keeps its name along a trace."""
        rules = Rules(**dict.fromkeys(self.removed, False))
        return Model(rules, self.sizes, is_sorting=is_sorting)


CHAIN = {2: 1}
"""Content 2 continues content 1."""

SAFE: tuple[Scenario, ...] = (
    Scenario(
        "pipelined steps, one fails",
        Sizes(contents=2, budget={"step": 3, "finish": 1, "fail": 1}),
    ),
    Scenario(
        "the coordinator dies, requests attach again",
        Sizes(contents=2, budget={"step": 2, "finish": 1, "coordinator": 1}),
    ),
    Scenario(
        "the coordinator dies twice",
        Sizes(budget={"step": 2, "coordinator": 2}),
    ),
    Scenario(
        "a worker and the coordinator die",
        Sizes(budget={"step": 2, "worker": 1, "coordinator": 1}),
    ),
    Scenario(
        "a second coordinator begins, the first one still sends",
        Sizes(budget={"step": 2, "second": 1}),
    ),
    Scenario(
        "two coordinators, and what was saved is lost",
        Sizes(budget={"step": 1, "second": 1, "amnesia": 1, "rivalry": 1, "worker": 1}),
    ),
    Scenario(
        "two clients share a block",
        Sizes(clients=2, contents=2, budget={"step": 3, "finish": 2}),
    ),
    Scenario(
        "two clients, one is given up, the window holds one message",
        Sizes(clients=2, window=1, budget={"step": 2, "silence": 1}),
    ),
    Scenario(
        "a client dies, another begins",
        Sizes(budget={"step": 2, "client": 1}),
    ),
    Scenario(
        "requests and answers of two clients are lost or late",
        Sizes(clients=2, is_asking=True, budget={"step": 2, "coordinator": 1}),
    ),
    Scenario(
        "a chain of two blocks is evicted and recovered",
        Sizes(
            blocks=2, contents=3, parents=CHAIN, budget={"step": 2, "finish": 1, "coordinator": 1}
        ),
    ),
    Scenario(
        "labels that do not agree, of a chain and of equal blocks",
        Sizes(
            blocks=3,
            contents=2,
            parents=CHAIN,
            cached=(1, 2, 1),
            labels=((1, 2, 0), (0, 2, 1)),
            budget={"step": 1, "coordinator": 1},
        ),
    ),
    Scenario(
        "copies to and from host memory, one is late",
        Sizes(slots=1, contents=2, budget={"step": 2, "finish": 1, "store": 1, "timeout": 1}),
    ),
    Scenario(
        "a load, late, while the coordinator dies",
        Sizes(slots=1, warm=(1,), budget={"step": 2, "load": 1, "timeout": 1, "coordinator": 1}),
    ),
    Scenario(
        "a load, while a client is given up and a forward fails",
        Sizes(slots=1, warm=(1,), budget={"step": 2, "load": 1, "silence": 1, "fail": 1}),
    ),
    Scenario(
        "the window holds one message, a load is late, a client dies",
        Sizes(
            slots=1, warm=(1,), window=1, budget={"step": 1, "load": 1, "timeout": 1, "client": 1}
        ),
    ),
    Scenario(
        "a request copies a shared block, another is loaded",
        Sizes(blocks=2, contents=2, slots=1, warm=(2,), budget={"step": 2, "fork": 1, "load": 1}),
    ),
    Scenario(
        "files: saved, damaged, foreign, adopted after a node's loss",
        Sizes(
            slots=1,
            warm=(1,),
            budget={"save": 1, "fetch": 1, "node": 1, "damage": 1, "foreign": 1},
        ),
    ),
    Scenario(
        "a file is fetched, late, and loaded",
        Sizes(slots=1, filed=(1,), budget={"step": 1, "fetch": 1, "load": 1, "timeout": 1}),
    ),
    Scenario(
        "the weights change, the coordinator dies",
        Sizes(cached=(1,), budget={"step": 2, "finish": 1, "reset": 1, "coordinator": 1}),
    ),
    Scenario(
        "a grant of a coordinator that died comes late",
        Sizes(budget={"step": 1, "coordinator": 2, "stale": 1}),
    ),
    Scenario(
        "the weights change, files stay, what was saved is lost",
        Sizes(
            slots=1,
            filed=(1,),
            budget={"step": 1, "reset": 1, "fetch": 1, "load": 1, "amnesia": 1, "coordinator": 1},
        ),
    ),
    Scenario(
        "pipelined steps, two fail",
        Sizes(contents=2, budget={"step": 4, "finish": 2, "fail": 2}),
        is_long=True,
    ),
    Scenario(
        "the coordinator dies twice, with two contents",
        Sizes(contents=2, budget={"step": 3, "finish": 1, "coordinator": 2}),
        is_long=True,
    ),
    Scenario(
        "two clients, one is given up, one forward fails",
        Sizes(clients=2, budget={"step": 2, "silence": 1, "fail": 1}),
        is_long=True,
    ),
    Scenario(
        "two coordinators, two clients, a copy",
        Sizes(
            clients=2,
            slots=1,
            warm=(1,),
            budget={"step": 2, "load": 1, "second": 1},
        ),
        is_long=True,
    ),
    Scenario(
        "a store and a load, late, the coordinator dies, a worker dies",
        Sizes(
            slots=1,
            contents=2,
            cached=(1,),
            budget={"step": 1, "store": 1, "load": 1, "timeout": 1, "coordinator": 1, "worker": 1},
        ),
        is_long=True,
    ),
)

_OLD = {"step": 2, "coordinator": 1, "load": 1}
_COPY = Sizes(slots=1, warm=(1,), budget=_OLD)
_GIVEN_UP = Sizes(slots=1, warm=(1,), budget={"step": 2, "silence": 1, "load": 1})


def _without(*removed: str, is_long: bool = False, sizes: Sizes) -> Scenario:
    return Scenario(f"without {' and '.join(removed)}", sizes, removed, is_long)


UNSAFE: tuple[Scenario, ...] = (
    _without("exact", sizes=Sizes(slots=1, budget={"step": 1, "store": 1, "stale": 1})),
    _without(
        "present_epoch",
        sizes=Sizes(slots=1, warm=(1,), budget={"load": 1, "coordinator": 1, "stale": 1}),
    ),
    _without(
        "nonce",
        sizes=Sizes(
            ranks=1,
            slots=1,
            warm=(1,),
            budget={"step": 1, "load": 1, "worker": 1, "amnesia": 1, "coordinator": 2, "stale": 1},
        ),
    ),
    _without("grant_first", sizes=Sizes(budget={"step": 2, "worker": 1, "stale": 1})),
    _without("grant_above", sizes=Sizes(budget={"coordinator": 2, "stale": 1})),
    _without("epoch_above", sizes=Sizes(budget={"amnesia": 1, "coordinator": 1})),
    _without("superseded", sizes=Sizes(budget={"second": 1})),
    _without(
        "saved_forward",
        sizes=Sizes(ranks=1, cached=(1,), budget={"step": 1, "reset": 1, "second": 1, "client": 1}),
    ),
    _without("forward_epoch", sizes=_COPY),
    _without(
        "report_epoch", sizes=Sizes(slots=1, cached=(1,), budget={"store": 2, "coordinator": 1})
    ),
    _without("report_ranks", sizes=Sizes(slots=1, cached=(1,), budget={"store": 1, "doubled": 1})),
    _without("report_repeat", sizes=Sizes(slots=1, cached=(1,), budget={"store": 1, "lost": 1})),
    _without("applied_all", sizes=Sizes(budget={"step": 1})),
    _without("window", sizes=Sizes(window=1, budget={"step": 2})),
    _without(
        "stored_answer", sizes=Sizes(blocks=2, is_asking=True, budget={"step": 1, "again": 1})
    ),
    _without("steps_go_on", sizes=Sizes(contents=2, budget={"step": 3, "coordinator": 1})),
    _without("forward_order", sizes=Sizes(contents=2, clients=2, budget={"step": 3, "finish": 1})),
    _without(
        "step_reference",
        sizes=Sizes(contents=2, slots=1, warm=(1,), budget={"step": 2, "finish": 1, "load": 1}),
    ),
    _without(
        "transfer_reference",
        sizes=Sizes(contents=2, slots=1, cached=(1,), budget={"step": 1, "store": 1}),
    ),
    _without(
        "destination_quarantine",
        sizes=Sizes(slots=1, warm=(1,), budget={"step": 1, "load": 1, "timeout": 1}),
    ),
    _without(
        "host_hold",
        sizes=Sizes(
            blocks=2,
            contents=2,
            slots=1,
            warm=(1,),
            cached=(2,),
            budget={"store": 1, "load": 1, "replace": 1},
        ),
    ),
    _without("copy_in_forward", sizes=Sizes(blocks=2, budget={"step": 2, "fork": 1})),
    _without(
        "settle",
        sizes=Sizes(
            blocks=2,
            contents=2,
            ranks=1,
            cached=(1,),
            slots=1,
            warm=(2,),
            budget={"step": 3, "fork": 1, "load": 1, "fail": 1},
        ),
    ),
    _without(
        "unlabel_first",
        sizes=Sizes(contents=2, cached=(1,), budget={"step": 1, "coordinator": 1}),
    ),
    _without(
        "host_unlabel_first",
        sizes=Sizes(
            contents=2,
            slots=1,
            warm=(1,),
            cached=(2,),
            budget={"store": 1, "replace": 1, "worker": 1},
        ),
    ),
    _without("seal_late", sizes=Sizes(budget={"step": 1})),
    _without("visible_all", sizes=Sizes(slots=1, cached=(1,), budget={"store": 1})),
    _without("own_unsealed", sizes=Sizes(clients=2, budget={"step": 2})),
    _without(
        "tail_first",
        sizes=Sizes(blocks=2, contents=3, parents=CHAIN, cached=(1, 2), budget={"step": 1}),
    ),
    _without(
        "rename",
        sizes=Sizes(
            slots=1, warm=(1,), is_verifying=False, budget={"save": 1, "fetch": 1, "node": 1}
        ),
    ),
    _without("file_verified", sizes=Sizes(slots=1, filed=(1,), budget={"fetch": 1, "damage": 1})),
    _without("cascade", sizes=Sizes(budget={"step": 3, "fail": 1})),
    _without(
        "fail_late",
        sizes=Sizes(slots=1, warm=(1,), budget={"step": 2, "fail": 1, "load": 1}),
    ),
    _without("fence", sizes=_GIVEN_UP),
    _without("fence_waits", sizes=_GIVEN_UP),
    _without("leaving", sizes=_GIVEN_UP),
    _without("wait_copies", sizes=_COPY),
    _without("wait_forwards", sizes=_COPY),
    _without("loss_is_epoch", sizes=Sizes(cached=(1,), budget={"worker": 1})),
    _without(
        "all_ranks", sizes=Sizes(contents=2, cached=(1,), budget={"step": 1, "coordinator": 1})
    ),
    _without(
        "no_orphans",
        sizes=Sizes(
            blocks=3,
            contents=2,
            parents=CHAIN,
            cached=(1, 2, 1),
            labels=((1, 2, 0), (0, 2, 1)),
        ),
    ),
    _without(
        "withdraw_dropped",
        sizes=Sizes(blocks=2, contents=3, cached=(1, 1), budget={"step": 2, "coordinator": 1}),
    ),
    _without("attach_verify", sizes=Sizes(budget={"step": 2, "coordinator": 1})),
    _without(
        "model_epoch_saved",
        sizes=Sizes(cached=(1,), budget={"step": 1, "reset": 1, "coordinator": 1, "client": 1}),
    ),
    _without(
        "model_epoch_unknown",
        sizes=Sizes(
            ranks=1,
            cached=(1,),
            budget={"step": 1, "reset": 1, "amnesia": 1, "coordinator": 1, "client": 1},
        ),
    ),
    _without(
        "model_epoch_stated",
        "model_epoch_unknown",
        sizes=Sizes(cached=(1,), budget={"step": 1, "reset": 1, "coordinator": 1, "amnesia": 1}),
    ),
    _without("empty_step", sizes=Sizes(budget={"step": 1})),
    _without(
        "source_hold",
        "host_seal_command",
        sizes=Sizes(
            contents=2,
            slots=1,
            cached=(1,),
            budget={"step": 1, "store": 1, "timeout": 1, "worker": 1},
        ),
    ),
)

BACKED: dict[str, str] = {
    "source_hold": (
        "What a late store copied is dropped, and its label is never written: no harm is done "
        "while host labels are written by command."
    ),
    "host_seal_command": (
        "What a rank seals by itself is right, because the source of a late store is held: no "
        "harm is done while it is."
    ),
    "model_epoch_stated": (
        "The model epoch is saved, and where what was saved is lost it is taken above all that is "
        "found: no client knows a higher one while both hold."
    ),
    "one_of_equals": (
        "A second block of equal content costs room and nothing else here, where an index may "
        "name two blocks; the real index has one place for each content."
    ),
}
"""Rules that are no guard by themselves, with the reason."""


def scenario_named(name: str) -> Scenario:
    """Return a scenario by its name, or by the rule that it removes first."""
    for scenario in (*SAFE, *UNSAFE):
        if name in (scenario.name, *scenario.removed[:1]):
            return scenario
    raise KeyError(f"no scenario {name!r}: pass a rule, or the whole name of a safe one")
