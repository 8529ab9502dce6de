"""Real messages, broken and sent again to a coordinator and to its workers.

Clusters run in this process, without sockets, which makes no difference to the receivers. These
hold before and after every attack: no undocumented error, consistent state, and another client that
is served.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from actors import KVCacheClient, LocalCluster
from actors.transport import Inbound, client_peer
from actors.transport.local import LocalServer
from kvcache.base.errors import KVCacheError
from kvcache.config import ClusterConfig
from kvcache.protocol.messages import WorkerAddress
from kvcache.protocol.step import EMPTY_RUNNING, NewRequest, RunningRequests, StepRequest
from tests.fuzz.mutations import mutate_msgpack

PROMPT_TOKENS = 40
PATIENCE_S = 30.0


@dataclass
class Sent:
    """Recorded payloads, by direction."""

    by_clients: list[bytes] = field(default_factory=list)
    by_workers: list[Inbound] = field(default_factory=list)
    to_workers: list[bytes] = field(default_factory=list)


@contextmanager
def listening(server: LocalServer, sent: Sent) -> Iterator[None]:
    """Record the payloads that pass a server."""
    put, send = server.put, server.send

    def put_and_note(inbound: Inbound) -> None:
        if isinstance(inbound.peer.address, WorkerAddress):
            sent.by_workers.append(inbound)
        else:
            sent.by_clients.append(inbound.payload)
        put(inbound)

    def send_and_note(addresses: Any, *payloads: bytes) -> None:
        if any(isinstance(address, WorkerAddress) for address in addresses):
            sent.to_workers.extend(payloads)
        send(addresses, *payloads)

    server.put, server.send = put_and_note, send_and_note  # type: ignore[method-assign]
    try:
        yield
    finally:
        del server.put, server.send


class Storm:
    """One cluster, an honest client that is served, and another one whose messages are broken."""

    def __init__(self, config: ClusterConfig, seed: int) -> None:
        self.chance = random.Random(seed)
        self.cluster = LocalCluster(config)
        self.honest, self.other = self.cluster.client("honest"), self.cluster.client("other")
        self.sent = Sent()
        self._number = 0
        with listening(self._server, self.sent):
            for client in (self.other, self.honest):
                for _ in range(3):
                    self.play(client)
        own = self.other.client_id.encode()
        self.sent.by_clients = [payload for payload in self.sent.by_clients if own in payload]

    @property
    def _server(self) -> LocalServer:
        return self.cluster._server

    @property
    def num_faults(self) -> int:
        return self.cluster._service.statistics().faults + sum(
            worker.statistics().faults for worker in self.cluster.workers
        )

    def play(self, client: KVCacheClient) -> None:
        """Admit a prompt, decode a token, finish it."""
        self._number += 1
        name, first = f"r{self._number}", self.chance.randrange(5) * 1000
        tokens = np.arange(first, first + PROMPT_TOKENS, dtype=np.int32)
        new = NewRequest(name, tokens, max_new_tokens=PROMPT_TOKENS)
        result = client.step(StepRequest(new=(new,)))
        client.wait_finished(result.step)
        slot = int(result.admitted_slots[0])
        running = EMPTY_RUNNING if slot < 0 else decode_row(slot)
        again = client.step(StepRequest(completed_step=result.step, running=running))
        client.wait_finished(again.step)
        done = client.submit(StepRequest(completed_step=again.step, finished=(name,)))
        client.wait_finished(done)
        client.wait_finished(client.submit(StepRequest(completed_step=done)))

    def break_clients(self, count: int) -> None:
        """Send the coordinator broken messages of a client."""
        peer = client_peer(self.other.client_id)
        for _ in range(count):
            next_step = self.other._connection.session.next_step + self._num_taken()
            self._server.put(Inbound(peer, self._broken(self.sent.by_clients, next_step)))
            self.cluster.pump()

    def break_workers(self, count: int) -> None:
        """Send the coordinator broken messages of its workers."""
        payloads = [inbound.payload for inbound in self.sent.by_workers]
        for _ in range(count):
            peer = self.chance.choice(self.sent.by_workers).peer
            self._server.put(Inbound(peer, self._broken(payloads)))
            self.cluster.pump()

    def break_coordinator(self, count: int) -> None:
        """Send workers broken messages of their coordinator."""
        for _ in range(count):
            rank = WorkerAddress(self.chance.randrange(len(self.cluster.workers)))
            self._server.send((rank,), self._broken(self.sent.to_workers))
            self.cluster.pump()

    def _num_taken(self) -> int:
        """How many broken steps of the other client were accepted as its own."""
        epoch_state = self.cluster.coordinator._epoch_state
        ledger = None if epoch_state is None else epoch_state._clients.get(self.other.client_id)
        if ledger is None:
            return 0
        return ledger.receiver.next_step - self.other._connection.session.next_step

    def check(self) -> None:
        """Fail unless the state is consistent and the honest client is served."""
        assert self.num_faults == 0, self.cluster._service.statistics()
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.play(self.honest)
                break
            except KVCacheError:
                assert time.monotonic() < give_up_s
                attach_again(self.honest)
        self.cluster.coordinator.check()
        for worker in self.cluster.workers:
            worker.worker.check()

    def close(self) -> None:
        self.cluster.close()

    def _broken(self, payloads: list[bytes], next_step: int | None = None) -> bytes:
        """Return one of the payloads, broken: sometimes so that its types are still right and it is
        accepted."""
        payload = self.chance.choice(payloads)
        if self.chance.random() < 0.3:
            return mutate_msgpack(payload, payloads, self.chance)
        values = msgpack.unpackb(payload, strict_map_key=False)
        num_names = 5 if next_step is not None else 6  # version, kind, sender and time
        names, rest = values[:num_names], values[num_names:]
        if next_step is not None and len(values) > num_names:
            names[3] = next_step
        for _ in range(self.chance.randint(1, 3)):
            rest = mutate_alike(rest, self.chance)
        try:
            packed: bytes = msgpack.packb([*names, *rest])
        except (OverflowError, ValueError):
            return payload
        return packed


ODD_INTEGERS = (-(2**63), -(2**31) - 1, -(2**31), -2, -1, 0, 1, 2, 2**31 - 1, 2**31, 2**63 - 1)
ODD_TEXTS = ("", "x", "r1", "r2", "\0", "\u2603" * 100)


def mutate_alike(value: Any, chance: random.Random) -> Any:
    """Return a value of the same type in which one part, however deep, is different."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice((*ODD_INTEGERS, value - 1, value + 1))
    if isinstance(value, str):
        return chance.choice(ODD_TEXTS)
    if isinstance(value, bytes):
        return _mutate_numbers(value, chance)
    if isinstance(value, list) and value:
        place = chance.randrange(len(value))
        match chance.randrange(6):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return [*value, *[value[place]] * chance.choice((1, 2, 300))]
            case _:
                changed = mutate_alike(value[place], chance)
                return [*value[:place], changed, *value[place + 1 :]]
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        return {**value, key: mutate_alike(value[key], chance)}
    return value


def _mutate_numbers(value: bytes, chance: random.Random) -> bytes:
    """Return other bytes: int32 numbers, as many bytes, or more or fewer."""
    if chance.random() < 0.3:
        return chance.randbytes(len(value))
    numbers = [
        chance.choice((-1, 0, 1, 5, 2**31 - 1, -(2**31))) for _ in range(chance.randrange(9))
    ]
    made = np.array(numbers, dtype="<i4").tobytes()
    return chance.choice((made, value + made, value[: len(value) // 8 * 4], value * 2))


def decode_row(slot: int) -> RunningRequests:
    one, none = np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    ends = np.array([0, 1], dtype=np.int32)
    return RunningRequests(
        np.array([slot], dtype=np.int32), one, none, none, ends, np.array([7], dtype=np.int32)
    )


def attach_again(client: KVCacheClient) -> None:
    try:
        client.attach(timeout_s=1.0)
    except KVCacheError:
        return
