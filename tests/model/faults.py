"""Faults: deaths, losses, damage, and old messages.

Each uses its own budget. Lost and late messages are no faults here: their receiver has not taken
them yet. They are repeated only if the rule that refuses them is off, because with it nothing
follows; grants of dead coordinators may arrive late anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import coordinator as ruler
from tests.model import disk, worker
from tests.model.sizes import Model
from tests.model.state import DAMAGED, FENCING, FOREIGN, Rank, State, with_rank

Words = tuple[object, ...]
"""The description, composed on demand."""

Raw = Iterator[tuple[Words, bool, State]]
"""Description, whether it is a fault, and the next state before it is settled."""


def coordinator_faults(model: Model, state: State) -> Raw:
    """Yield faults of coordinators; if none lives, one starts by itself."""
    if not state.coordinators:
        yield ("a coordinator begins",), False, ruler.begin(model, state)
    elif model.has(state, "second") and len(state.coordinators) == 1:
        yield (
            ("a second coordinator begins",),
            True,
            ruler.begin(model, model.spend(state, "second")),
        )
    if model.has(state, "coordinator"):
        for c in state.coordinators:
            after = ruler.resign(model.spend(state, "coordinator"), c)
            if c.phase == FENCING and model.has(state, "stale"):
                grant = (c.nonce, c.epoch)
                ranks = [rank._replace(grants=(*rank.grants, grant)) for rank in after.ranks]
                after = after._replace(ranks=tuple(ranks))
            yield (f"coordinator {c.nonce}", "dies"), True, after
    if model.has(state, "amnesia") and state.coordinators:
        spent = model.spend(state, "amnesia")
        yield ("what was saved is lost",), True, spent._replace(saved_epoch=0, saved_model_epoch=0)


def rank_faults(model: Model, state: State, r: int, rank: Rank) -> Raw:
    """Yield faults of a rank."""
    if model.has(state, "worker") and rank.nonce:
        spent = model.spend(state, "worker")
        yield (
            (f"rank {r}", "dies, a fresh process starts"),
            True,
            with_rank(spent, r, worker.die(model, rank)),
        )
    if model.has(state, "node"):
        spent, dead = model.spend(state, "node"), worker.die(model, rank, loses_host=True)
        yield (f"rank {r}", "loses its node's memory"), True, with_rank(spent, r, dead)
    if model.has(state, "lost") and not model.rules.report_repeat:
        for report in rank.reports:
            left = tuple([x for x in rank.reports if x != report])
            spent = model.spend(state, "lost")
            yield (
                (f"rank {r}", "says", report, "which is lost"),
                True,
                with_rank(spent, r, rank._replace(reports=left)),
            )


def old_messages(model: Model, state: State) -> Raw:
    """Yield late grants of dead coordinators, and messages that a removed rule would refuse."""
    rules = model.rules
    if not model.has(state, "stale"):
        return
    spent = model.spend(state, "stale")
    words: Words
    for r, rank in enumerate(state.ranks):
        for nonce, epoch in rank.grants:
            if worker.would_take(model, rank, nonce, epoch):
                after = worker.take_grant(model, rank, nonce, epoch)
                words = (f"rank {r}", "hears the old grant of", epoch, "to", nonce)
                yield words, True, with_rank(spent, r, after)
        for stream in state.streams:
            nonce, epoch, messages = stream
            is_own = (nonce, epoch) == (rank.nonce, rank.epoch)
            for n, message in enumerate(messages):
                after = worker.apply(model, rank, message, n + 1)
                if is_own and not rules.exact and n != rank.applied:
                    after = after._replace(applied=max(n + 1, rank.applied))
                elif not rank.nonce and not rules.grant_first and n == 0:
                    after = after._replace(nonce=nonce, epoch=epoch, applied=1)
                elif 0 < epoch < rank.epoch and not rules.present_epoch:
                    pass
                elif epoch == rank.epoch and not is_own and not rules.nonce and n == rank.applied:
                    after = after._replace(applied=n + 1)
                else:
                    continue
                words = (f"rank {r}", f"applies old ({nonce}:{epoch}:{n + 1})", message)
                yield words, True, with_rank(spent, r, after)


def disk_faults(model: Model, state: State) -> Raw:
    """Yield faults of files."""
    for kind, value in (("damage", DAMAGED), ("foreign", FOREIGN)):
        if not model.has(state, kind):
            continue
        spent = model.spend(state, kind)
        for r, rank in enumerate(state.ranks):
            for name, _ in rank.files:
                after = disk.with_file(rank, name, value)
                yield (f"file {name} of rank {r}", kind), True, with_rank(spent, r, after)
