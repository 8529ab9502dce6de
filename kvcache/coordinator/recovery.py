"""How an epoch begins: a manager rebuilt from labels, then the return of the clients.

After a warm start no request holds blocks: the blocks of running requests are cached like all
others. Until the clients that ran steps before are back, or a deadline has passed, no step is
executed, so that no client takes blocks for which another one comes back. Then the hits of all
requests in their first steps are held, and released step by step as these are executed.

    attach ──▶ first step: all running requests as new ones, with all their tokens so far
                 └── every expected client, or the deadline ──▶ hold all hits ──▶ execute
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.base.errors import KVCacheError
from kvcache.base.logs import get_logger
from kvcache.coordinator.clients import Clients
from kvcache.coordinator.label_collection import LabelCollection
from kvcache.coordinator.parts import ManagerFactory
from kvcache.coordinator.serving import StepServer
from kvcache.manager import KVCacheManager
from kvcache.protocol.step import StepRequest

logger = get_logger(__name__)


@dataclass(frozen=True)
class Recovery:
    """How an epoch began. `num_labels` is the most that one rank sent; `reason` is empty, or says
    why nothing was kept."""

    num_kept_blocks: int = 0
    num_labels: int = 0
    reason: str = ""

    def describe(self) -> str:
        """Return a text about what was kept."""
        if self.reason:
            return f"cold, {self.reason}"
        return f"{self.num_kept_blocks} blocks are kept, a rank has labels of {self.num_labels}"

    @property
    def is_cold(self) -> bool:
        """Whether the ranks have to drop everything."""
        return bool(self.reason)


def recover(
    make_manager: ManagerFactory, model_epoch: int, collection: LabelCollection
) -> tuple[KVCacheManager, Recovery]:
    """Return the manager of a new epoch, and how much of the cache it kept."""
    manager = make_manager(model_epoch)
    label_sets = collection.label_sets()
    num_labels = max((len(labels.labels.block_ids) for labels in label_sets), default=0)
    reason = collection.problem
    if not reason and not num_labels:
        return manager, Recovery(reason="no rank holds anything")
    if not reason:
        try:
            num_kept = manager.restore(label_sets)
            return manager, Recovery(num_kept, num_labels)
        except KVCacheError as error:
            reason = f"the labels could not be put together: {error}"
            manager = make_manager(model_epoch)
    logger.warning("model epoch %d: no labels are kept: %s", model_epoch, reason)
    return manager, Recovery(0, num_labels, reason)


class Reattachment:
    """Awaited clients at the beginning of one epoch, and the hits held for them.

    `gone`: clients that did not return in time, until they are taken.
    """

    def __init__(
        self, clients: Clients, server: StepServer, expected: Iterable[str], give_up_s: float
    ) -> None:
        """Wait for the `expected` clients until `give_up_s`, a time of the coordinator's clock."""
        self._clients = clients
        self._server = server
        self._expected = set(expected)
        self._give_up_s = give_up_s
        self.is_waiting = bool(self._expected)
        """Whether no step may be executed yet."""
        self._first_steps: dict[str, int] = {}
        self.gone: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the clients that are waited for."""
        return sorted(name for name in self._expected if not self._is_back(name))

    def look(self, now_s: float) -> bool:
        """Return whether steps may be executed; when waiting ends, hold the hits of first steps."""
        if not self.is_waiting:
            return True
        if now_s < self._give_up_s and self.missing():
            return False
        self.is_waiting = False
        self.gone = tuple(sorted(n for n in self._expected if self._clients.get(n) is None))
        self._expected.clear()
        for ledger in self._clients.attached():
            first = ledger.receiver.ready_step
            if isinstance(first, StepRequest) and first.new:
                self._server.hold(ledger.client_id, first.new)
                self._first_steps[ledger.client_id] = first.step
        return True

    def take_gone(self) -> tuple[str, ...]:
        """Return, once, the awaited clients that have not returned."""
        gone, self.gone = self.gone, ()
        return gone

    def on_executed(self, client_id: str, step: int) -> None:
        """Release the hits held for a client's first step: its requests have their blocks now."""
        if self._first_steps and step >= self._first_steps.get(client_id, step + 1):
            del self._first_steps[client_id]
            self._server.let_go(client_id)

    def forget(self, client_id: str) -> None:
        """Stop waiting for a client that has gone; release its hits."""
        self._expected.discard(client_id)
        if self._first_steps.pop(client_id, None) is not None:
            self._server.let_go(client_id)

    def _is_back(self, client_id: str) -> bool:
        """Return whether a client has sent a step, or said that it has none, or left."""
        ledger = self._clients.get(client_id)
        if ledger is None:
            return self._clients.has_gone(client_id)
        return ledger.receiver.ready_step is not None or ledger.has_acknowledged
