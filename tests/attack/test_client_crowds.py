"""Crowds of clients that come, work and leave in every way: no trace of any of them remains.

Longer, by hand: `python -m tests.attack.test_client_crowds 0:200` plays the mixed crowd by seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from actors.async_client import AsyncKVCacheClient
from actors.client import KVCacheClient
from actors.clusters.placement import wait_until
from actors.connection import ClientConnection
from kvcache.base.errors import NotRunningError, StaleEpochError
from kvcache.protocol.messages import Detach, FromClient
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.requests.request import Request
from tests.attack.crowd_member import NUM_MEMBERS
from tests.attack.crowded_cluster import DEADLINE_S, KINDS, CrowdedCluster, crowd_config

ROOT = Path(__file__).resolve().parents[2]
NUM_CLIENTS = 64


def prompt(client_id: str, number: int = 0) -> NewRequest:
    """Return a request that shares a block with others and has two of its own."""
    chance = random.Random(f"{client_id}/{number}")
    tokens = [*range(16), *(chance.randrange(1000) for _ in range(32))]
    return NewRequest(f"{client_id}/{number}", np.array(tokens, dtype=np.int32), max_new_tokens=48)


async def connect(cluster: CrowdedCluster, count: int) -> list[AsyncKVCacheClient]:
    """Return attached clients with a request each, and steps in flight."""
    clients = [await AsyncKVCacheClient.connect(cluster) for _ in range(count)]
    first = [await c.submit(StepRequest(new=(prompt(c.client_id),))) for c in clients]
    await asyncio.gather(*(c.wait_result(n) for c, n in zip(clients, first, strict=True)))
    for client in clients:
        for _ in range(3):
            await client.submit(StepRequest())
    return clients


@pytest.mark.parametrize("kind", KINDS)
def test_async_clients_that_close_together_leave_nothing(kind: str) -> None:
    async def crowd(cluster: CrowdedCluster) -> None:
        clients = await connect(cluster, NUM_CLIENTS)
        assert cluster.left().num_requests == NUM_CLIENTS
        await asyncio.gather(*(client.close() for client in clients))

    with CrowdedCluster(kind) as cluster:
        for _ in range(2):
            asyncio.run(crowd(cluster))
            cluster.await_nothing_left()


class Work:
    """A call in a thread. Its error is raised by `end`, never in a later test."""

    def __init__(self, action: Callable[..., object], *arguments: object) -> None:
        """Start it."""
        self._errors: list[BaseException] = []

        def run() -> None:
            try:
                action(*arguments)
            except BaseException as error:
                self._errors.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for its end; raise its error."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "a thread hangs"
        for error in self._errors:
            raise error


@pytest.mark.parametrize("kind", KINDS)
def test_clients_in_threads_that_close_together_leave_nothing(kind: str) -> None:
    num_clients = 16
    barrier = threading.Barrier(num_clients, timeout=DEADLINE_S)

    def work(cluster: CrowdedCluster) -> None:
        with KVCacheClient(cluster) as client:
            client.step(StepRequest(new=(prompt(client.client_id),)))
            for _ in range(3):
                client.submit(StepRequest())
            barrier.wait()

    with CrowdedCluster(kind) as cluster:
        threads = [Work(work, cluster) for _ in range(num_clients)]
        for thread in threads:
            thread.end()
        cluster.await_nothing_left()


def test_a_farewell_that_is_lost_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    send, lost = ClientConnection.send, set()

    def lose_first(self: ClientConnection, messages: Sequence[FromClient]) -> None:
        for message in messages:
            if isinstance(message, Detach) and message.client_id not in lost:
                lost.add(message.client_id)
            else:
                send(self, (message,))

    monkeypatch.setattr(ClientConnection, "send", lose_first)

    async def crowd(cluster: CrowdedCluster) -> None:
        clients = await connect(cluster, 4)
        await asyncio.gather(*(client.close() for client in clients))

    with CrowdedCluster() as cluster:
        with KVCacheClient(cluster) as client:
            client.step(StepRequest(new=(prompt(client.client_id),)))
        asyncio.run(crowd(cluster))
        assert len(lost) == 5
        cluster.await_nothing_left()


@pytest.mark.parametrize("kind", ["unix", "process"])
def test_clients_that_close_while_another_coordinator_takes_over_are_not_waited_for(
    kind: str,
) -> None:
    async def crowd(cluster: CrowdedCluster) -> None:
        clients = await connect(cluster, 16)
        restart = asyncio.get_running_loop().run_in_executor(None, cluster.restart_coordinator)
        await asyncio.gather(*(client.close() for client in clients))
        await restart

    with CrowdedCluster(kind) as cluster:
        for _ in range(3):
            asyncio.run(crowd(cluster))
            cluster.await_nothing_left()
            with KVCacheClient(cluster) as client:
                client.step(StepRequest(new=(prompt(client.client_id),)))


@pytest.mark.parametrize("kind", ["unix", "process"])
def test_clients_that_close_after_the_coordinator_has_gone_do_so_at_once(kind: str) -> None:
    async def crowd(cluster: CrowdedCluster) -> None:
        clients = await connect(cluster, 4)
        sync = KVCacheClient(cluster)
        await asyncio.get_running_loop().run_in_executor(None, cluster.close)
        await asyncio.wait_for(asyncio.gather(*(c.close() for c in clients)), DEADLINE_S)
        sync.close()

    endless = crowd_config(
        transport={"resend_s": 100.0, "heartbeat_s": 0.4}, deadlines={"worker_silence_s": 200.0}
    )
    asyncio.run(crowd(CrowdedCluster(kind, endless)))


def test_a_client_whose_connection_ends_goes_on_with_what_it_has() -> None:
    with CrowdedCluster() as cluster, KVCacheClient(cluster) as client:
        request = Request("r", list(range(40)))
        assert client.allocate_slots(request, 40) is not None
        before = client.get_block_ids("r")
        for _ in range(3):
            cluster.hang_up_on(client.client_id)
            assert client.get_block_ids("r") == before
        assert cluster.left().num_requests == 1


async def play(cluster: CrowdedCluster, chance: random.Random) -> None:
    """Act like a client: attach, step, call, close."""
    client = await AsyncKVCacheClient.connect(cluster)
    try:
        for number in range(chance.randint(1, 4)):
            await client.step(StepRequest(new=(prompt(client.client_id, number),)))
            request = Request(f"{client.client_id}/call{number}", list(range(40)))
            await client.allocate_slots(request, 40)
            if chance.random() < 0.5:
                await client.free(request)
    finally:
        await client.close()


def open_files() -> int:
    """Return how many descriptors this process has."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def cancel_somewhere(cluster: CrowdedCluster, chance: random.Random) -> None:
    """Start a client's work, and cancel it at some moment, perhaps twice."""
    playing = asyncio.ensure_future(play(cluster, chance))
    for _ in range(chance.randint(1, 2)):
        for _ in range(chance.randrange(60)):
            if not playing.done():
                await asyncio.sleep(0.001 if chance.random() < 0.3 else 0.0)
        playing.cancel()
    with contextlib.suppress(asyncio.CancelledError, NotRunningError):
        await playing


@pytest.mark.parametrize("kind", KINDS)
def test_clients_that_are_cancelled_anywhere_leave_nothing(kind: str) -> None:
    async def crowd(cluster: CrowdedCluster) -> None:
        lives = (cancel_somewhere(cluster, random.Random(i)) for i in range(16))
        await asyncio.gather(*lives)
        await asyncio.get_running_loop().run_in_executor(None, cluster.await_nothing_left)

    with CrowdedCluster(kind) as cluster:
        asyncio.run(crowd(cluster))  # creates the executor's threads and other singletons
        before = open_files()
        asyncio.run(crowd(cluster))
        assert wait_until(lambda: open_files() <= before, DEADLINE_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unclosed sockets
def test_clients_whose_event_loop_ends_leave_nothing() -> None:
    closing: list[asyncio.Task[None]] = []

    async def crowd(cluster: CrowdedCluster) -> None:
        clients = await connect(cluster, 8)
        closing.extend(asyncio.create_task(client.close()) for client in clients[:4])
        await asyncio.sleep(0)

    soon = crowd_config(deadlines={"reattach_s": 1.0})
    with CrowdedCluster("unix", soon) as cluster:
        asyncio.run(crowd(cluster))
        assert all(task.done() for task in closing)
        gc.collect()
        cluster.await_nothing_left()


@pytest.mark.parametrize("kind", ["unix", "zmq"])
def test_clients_that_are_killed_leave_nothing_and_others_keep_everything(kind: str) -> None:
    soon = crowd_config(deadlines={"reattach_s": 1.0})
    with CrowdedCluster(kind, soon) as cluster, KVCacheClient(cluster) as survivor:
        survivor.step(StepRequest(new=(prompt(survivor.client_id),)))
        arguments = [cluster.endpoint().address, soon.model_dump_json()]
        command = [sys.executable, "-m", "tests.attack.crowd_member", *arguments]
        member = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        try:
            assert member.stdout is not None and member.stdout.readline() == b"attached\n"
            assert cluster.left().num_clients == 1 + NUM_MEMBERS
        finally:
            member.kill()
            member.communicate()
        assert wait_until(lambda: cluster.left().num_clients == 1, DEADLINE_S), cluster.left()
        assert cluster.left().num_requests == 1
        survivor.step(StepRequest())


def mixed_crowd(cluster: CrowdedCluster, seed: int) -> None:
    """Threads and event loops, some of them cancelled, while coordinators come and go."""
    chance = random.Random(seed)
    num_restarts = chance.choice((0, 0, 1, 3))

    async def gather() -> None:
        lives = [
            cancel_somewhere(cluster, random.Random(f"{seed}/{i}"))
            if chance.random() < 0.5
            else play(cluster, random.Random(f"{seed}/{i}"))
            for i in range(chance.randint(1, 24))
        ]
        for outcome in await asyncio.gather(*lives, return_exceptions=True):
            # The end of an epoch makes steps void; a client that learns of it may leave.
            assert outcome is None or isinstance(outcome, StaleEpochError), outcome
        await asyncio.get_running_loop().run_in_executor(None, done.wait, DEADLINE_S)

    def work(name: str) -> None:
        turn = random.Random(f"{seed}/{name}")
        with contextlib.suppress(StaleEpochError), KVCacheClient(cluster) as client:
            for number in range(turn.randint(1, 4)):
                client.submit(StepRequest(new=(prompt(client.client_id, number),)))
            if turn.random() < 0.5:
                client.step(StepRequest())

    done = threading.Event()
    threads = [Work(work, f"thread-{i}") for i in range(chance.randint(0, 8))]
    loop = Work(lambda: asyncio.run(gather()))
    try:
        for _ in range(num_restarts):
            cluster.restart_coordinator()
        for thread in threads:
            thread.end()
    finally:
        done.set()
    loop.end()
    cluster.await_nothing_left()


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.long)], ids=["short", "long"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_crowd_leaves_nothing(kind: str, seeds: range) -> None:
    with CrowdedCluster(kind, crowd_config(deadlines={"reattach_s": 2.0})) as cluster:
        for seed in seeds:
            mixed_crowd(cluster, seed)


if __name__ == "__main__":
    for one_kind in KINDS:
        with CrowdedCluster(one_kind, crowd_config(deadlines={"reattach_s": 2.0})) as crowded:
            first, _, end = sys.argv[1].partition(":")
            for one_seed in range(int(first), int(end)):
                print(one_kind, one_seed, flush=True)
                mixed_crowd(crowded, one_seed)
