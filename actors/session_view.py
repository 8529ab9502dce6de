"""What a client knows of itself: the same for the synchronous and the asyncio one.

Reads the session's state, which the client's own waits bring up to date. Changes nothing.
"""

from __future__ import annotations

from actors.connection import ClientConnection
from kvcache.base.errors import NotRunningError
from kvcache.client.session import SessionState
from kvcache.protocol.messages import Attached, FailedForward


class SessionView:
    """Read-only properties over a connection's session."""

    _connection: ClientConnection
    _last_seq: int

    @property
    def client_id(self) -> str:
        """The name under which steps are counted, this incarnation included."""
        return self._connection.session.client_id

    @property
    def attached(self) -> Attached:
        """What the coordinator said when this client attached last: epoch, plan, model epoch."""
        attached = self._connection.session.attached
        if attached is None:
            raise NotRunningError(f"client {self.client_id} has not attached yet")
        return attached

    @property
    def is_attached(self) -> bool:
        """Whether steps are taken: False once the epoch is known to be over, until `attach`."""
        return self._connection.session.state is SessionState.ATTACHED

    @property
    def epoch(self) -> int:
        """The epoch in which steps are scheduled now; forwards begin with it."""
        return self._connection.session.epoch

    @property
    def last_seq(self) -> int:
        """`seq` of the newest answer that was taken: what `begin_forward` waits for."""
        return self._last_seq

    @property
    def finished_step(self) -> int:
        """Every step up to this one is over on every rank, as far as has been heard."""
        return self._connection.session.finished_step

    @property
    def failures(self) -> tuple[FailedForward, ...]:
        """Content-checked forwards that found wrong bytes."""
        return self._connection.session.failures

    @property
    def bytes_checked(self) -> int:
        """Bytes compared by content-checked forwards, over all ranks."""
        return self._connection.session.bytes_checked
