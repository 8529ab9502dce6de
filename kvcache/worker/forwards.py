"""Which forwards may run on this rank: in order, one at a time, not of clients given up.

Stands inside the worker, which locks around it. Pure books: executes nothing and waits for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from kvcache.base.errors import InvariantError, RequestError

MAX_REMEMBERED_STEPS = 4096
"""Applied steps whose forward may still begin. Older ones are refused."""

MAX_REMEMBERED_CLIENTS = 1024
"""Clients whose last applied step is remembered."""


class ForwardGate:
    """The forwards of one epoch. `last_begun_seq` only rises; at most one forward is open.

    Invariant: `_fenced` holds numbers of `_clients` only, so both are bounded.
    """

    def __init__(self, rank: int) -> None:
        """Make the gate of `rank`, which appears in messages only."""
        self._rank = rank
        self._clients: OrderedDict[int, str] = OrderedDict()
        self._open_seq: int | None = None
        self._open_client = ""
        self._last_begun_seq = 0
        self._fenced: set[int] = set()
        self._client_steps: OrderedDict[str, int] = OrderedDict()
        self.num_forwards = 0

    @property
    def is_open(self) -> bool:
        """Whether a forward has begun and not ended."""
        return self._open_seq is not None

    @property
    def client_steps(self) -> Mapping[str, int]:
        """Number of each client's last applied step. A copy."""
        return MappingProxyType(dict(self._client_steps))

    def is_running(self, client_id: str) -> bool:
        """Say whether the open forward is of `client_id`."""
        return self.is_open and self._open_client == client_id

    def on_applied(self, seq: int, client_id: str, client_step: int) -> None:
        """Note that message `seq` is applied: the forward of the client's step may begin."""
        self._clients[seq] = client_id
        if len(self._clients) > MAX_REMEMBERED_STEPS:
            self._forget_first()
        if client_id:
            self._client_steps[client_id] = client_step
            self._client_steps.move_to_end(client_id)
            if len(self._client_steps) > MAX_REMEMBERED_CLIENTS:
                self._client_steps.popitem(last=False)

    def require_in_order(self, seq: int) -> None:
        """Raise RequestError if a forward is open, or `seq` or a later one has begun."""
        if self._open_seq is not None:
            raise RequestError(
                f"forward {seq} of rank {self._rank} begins while {self._open_seq} is open: end "
                "that one first"
            )
        if seq <= self._last_begun_seq:
            raise RequestError(
                f"forward {seq} of rank {self._rank} begins after {self._last_begun_seq}: forwards "
                "begin once and in order"
            )

    def begin(self, seq: int) -> None:
        """Open the forward of applied step `seq`; raises RequestError, changing nothing, if it may
        not begin."""
        self.require_in_order(seq)
        client_id = self._clients.get(seq)
        if client_id is None:
            raise RequestError(
                f"step {seq} of rank {self._rank} is too old for a forward, or was never sent"
            )
        if seq in self._fenced:
            raise RequestError(
                f"forward {seq} of rank {self._rank} belongs to client {client_id!r}, which was "
                "given up: attach again"
            )
        self._open_seq, self._open_client = seq, client_id
        self._last_begun_seq = seq
        self.num_forwards += 1
        while self._clients and next(iter(self._clients)) <= seq:
            self._forget_first()

    def end(self, seq: int) -> None:
        """Close the open forward; raises RequestError if `seq` is not it."""
        if self._open_seq != seq:
            raise RequestError(
                f"forward {seq} of rank {self._rank} is not open: begin it before ending it"
            )
        self._open_seq = None

    def fence(self, client_id: str) -> None:
        """Refuse the forwards of every step of `client_id` so far; it gets no other one."""
        self._fenced.update(s for s, owner in self._clients.items() if owner == client_id)
        self._client_steps.pop(client_id, None)

    def reset(self) -> None:
        """Forget steps and fences: a new epoch numbers from 1, and clients attach again."""
        self._clients.clear()
        self._last_begun_seq = 0
        self._fenced.clear()

    def check(self, applied_seq: int) -> None:
        """Raise InvariantError if a step is known that is not applied."""
        highest = max((self._last_begun_seq, *self._clients))
        if highest > applied_seq:
            raise InvariantError(
                f"rank {self._rank} may run forward {highest}, but applied only {applied_seq}"
            )

    def _forget_first(self) -> None:
        seq, _ = self._clients.popitem(last=False)
        self._fenced.discard(seq)
