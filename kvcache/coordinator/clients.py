"""The coordinator's clients in one epoch: attached, leaving and gone.

A client that leaves is kept until every rank has applied its fence. Its name is never used again,
because its messages may arrive late. Refuses more clients than configured.

    attach ──▶ attached ──Detach, silence, or a connection that ended and did not come back──▶
    leaving ──fence applied everywhere──▶ forgotten
"""

from __future__ import annotations

from collections import OrderedDict

from kvcache.base.errors import InvariantError
from kvcache.coordinator.client_ledger import ClientLedger
from kvcache.coordinator.settings import CoordinatorSettings
from kvcache.protocol.messages import Attach
from kvcache.protocol.step_delivery import ReceivedMessage

MAX_CLIENT_ID_CHARS = 256
MAX_STEP = 2**53
"""Highest step number: a client cannot begin close to the end of the numbers."""

_MAX_GONE = 1024


class Clients:
    """The ledgers of all clients, the one served last at the end."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        """Start without clients. The limits are in `settings`."""
        self._settings = settings
        self._ledgers: dict[str, ClientLedger] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._num_leaving = 0

    def __len__(self) -> int:
        return len(self._ledgers)

    def get(self, client_id: str) -> ClientLedger | None:
        """Return the ledger of a client, also of a leaving one, or None."""
        return self._ledgers.get(client_id)

    def has_gone(self, client_id: str) -> bool:
        """Return whether a client was detached or given up: its id is not used again."""
        ledger = self._ledgers.get(client_id)
        return client_id in self._gone or (ledger is not None and ledger.is_leaving)

    def attached(self) -> list[ClientLedger]:
        """Return the ledgers of the clients that are served."""
        return [ledger for ledger in self._ledgers.values() if not ledger.is_leaving]

    @property
    def has_leaving(self) -> bool:
        """Whether `leaving` has any."""
        return self._num_leaving > 0

    def leaving(self) -> list[ClientLedger]:
        """Return the ledgers of the clients that can be forgotten."""
        return [ledger for ledger in self._ledgers.values() if ledger.is_leaving]

    def attach(self, message: Attach, now_s: float) -> str:
        """Attach a client, for the first time or again; return the refusal, empty if done.

        Unexecuted numbers below its next one are void. A client that believes to be attached
        nowhere, after steps of it were executed, considers them void: it is released. An
        introduction with a lower number is an old one that arrives late.
        """
        client_id, next_step = message.client_id, message.next_step
        if not 0 < len(client_id) <= MAX_CLIENT_ID_CHARS or not 0 < next_step <= MAX_STEP:
            return f"client id or step {next_step} cannot be meant"
        ledger = self._ledgers.get(client_id)
        if self.has_gone(client_id):
            return f"client {client_id} was detached or given up: use a new client id"
        if ledger is None:
            if len(self._ledgers) >= self._settings.max_clients:
                return (
                    f"{len(self._ledgers)} clients are attached, no more can attach: detach one or "
                    "raise transport.max_clients"
                )
            max_stored = self._settings.max_client_steps
            self._ledgers[client_id] = ClientLedger(client_id, max_stored, next_step, now_s)
        elif ledger.is_untouched and ledger.receiver.next_step < next_step:
            ledger.start_at(next_step)
        elif not (ledger.is_untouched or message.nonce or next_step < ledger.receiver.next_step):
            self.let_go(client_id)
            return f"client {client_id} gave its steps up, they are freed: use a new client id"
        return ""

    def take_ready(self) -> tuple[ClientLedger, ReceivedMessage] | None:
        """Return the next step of the client that has waited longest; None if none is ready. That
        client is asked last from now on."""
        for ledger in self._ledgers.values():
            message = None if ledger.is_leaving else ledger.receiver.take_ready()
            if message is not None:
                self._ledgers[ledger.client_id] = self._ledgers.pop(ledger.client_id)
                return ledger, message
        return None

    def let_go(self, client_id: str) -> None:
        """Stop serving the client; it is forgotten later."""
        ledger = self._ledgers[client_id]
        self._num_leaving += not ledger.is_leaving
        ledger.is_leaving = True

    def detach(self, client_id: str) -> bool:
        """Stop serving the client; return whether it is known.

        The name of an unknown client is taken from now on: its `Attach` may arrive later.
        """
        if client_id in self._ledgers:
            self.let_go(client_id)
            return True
        if len(client_id) <= MAX_CLIENT_ID_CHARS:
            self._take_name(client_id)
        return False

    def has_left(self, client_id: str) -> bool:
        """Whether the client has left for good, as far as that is remembered."""
        return client_id in self._gone

    def forget(self, client_id: str) -> None:
        """Forget a client; its name stays taken."""
        self._num_leaving -= self._ledgers.pop(client_id).is_leaving
        self._take_name(client_id)

    def clear(self) -> list[str]:
        """Forget all clients, because their epoch has ended; return the attached ones."""
        attached = [ledger.client_id for ledger in self.attached()]
        for ledger in self.leaving():
            self.forget(ledger.client_id)
        self._ledgers.clear()
        self._num_leaving = 0
        return attached

    def _take_name(self, client_id: str) -> None:
        """Reserve the name of a client that has gone. The oldest names become free again."""
        self._gone[client_id] = None
        while len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    def check(self) -> None:
        """Raise `InvariantError` if the table or the steps of a client are inconsistent."""
        for ledger in self._ledgers.values():
            ledger.check()
        if self._num_leaving != len(self.leaving()):
            raise InvariantError(f"{len(self.leaving())} clients leave, not {self._num_leaving}")
