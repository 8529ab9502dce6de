"""Clusters on Ray: started, found, used by every kind of client, and gone without a trace."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import ray

from actors import (
    WORKER_CONCURRENCY_GROUPS,
    EmbeddedWorker,
    KVCacheCluster,
    WorkerMethods,
    connect_peer,
)
from actors.clusters.placement import wait_until
from actors.transport import Endpoint, client_peer, worker_peer
from actors.transport.mailbox import Mailbox
from kvcache.base.errors import AlreadyRunningError, NotRunningError, RequestError
from kvcache.config import ClusterConfig
from kvcache.protocol.messages import Ack, Attach, FinishedAck
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.protocol.wire import encode
from kvcache.requests.request import Request

pytestmark = pytest.mark.ray

EMPTY = StepRequest("", 0, 0)


def prompt(request_id: str, num_tokens: int, first: int = 0) -> NewRequest:
    tokens = np.arange(first, first + num_tokens, dtype=np.int32)
    return NewRequest(request_id, tokens, max_new_tokens=num_tokens)


def play(client: Any, request_id: str, first: int) -> int:
    """Compute a prompt, finish it, and return how much of it another request hits."""
    computed = client.step(StepRequest("", 0, 0, new=(prompt(request_id, 40, first),)))
    client.wait_finished(computed.step)
    finished = client.step(
        StepRequest("", 0, 0, completed_step=computed.step, finished=(request_id,))
    )
    client.wait_finished(finished.step)
    again = client.step(StepRequest("", 0, 0, new=(prompt(f"{request_id}-2", 40, first),)))
    client.wait_finished(again.step)
    done = client.step(
        StepRequest("", 0, 0, completed_step=again.step, finished=(f"{request_id}-2",))
    )
    client.wait_finished(done.step)
    assert client.failures == ()
    return int(again.num_hit_tokens[0])


def test_steps_are_computed_hit_and_checked_on_every_rank(shared: KVCacheCluster) -> None:
    with shared.client() as client:
        assert play(client, "a", 1000) == 32
        assert client.bytes_checked > 0
    status = shared.status()
    assert (status.state, status.problem, len(status.ranks)) == ("ready", "", 2)
    statistics = shared.statistics()
    assert [worker is not None and worker.epoch for worker in statistics.workers] == [1, 1]


def test_a_running_cluster_is_found_by_name_and_by_other_processes(shared: KVCacheCluster) -> None:
    found = KVCacheCluster.connect(shared.name)
    assert found.status().fingerprint == shared.status().fingerprint

    @ray.remote(num_cpus=0)
    def use(name: str) -> int:
        with KVCacheCluster.connect(name) as cluster, cluster.client() as client:
            return client.step(StepRequest("", 0, 0)).epoch

    assert ray.get(use.remote(shared.name), timeout=60) == 1
    assert shared.status().state == "ready"  # that process must not end it


def test_a_second_launch_under_the_name_is_refused_and_the_first_lives_on(
    shared: KVCacheCluster,
) -> None:
    with pytest.raises(AlreadyRunningError) as caught:
        KVCacheCluster.launch(shared.config)
    assert str(caught.value) == (
        "a cluster named 'test-shared' is running: connect to it, stop it, or launch under "
        "another name"
    )
    with shared.client() as client:
        client.wait_finished(client.step(EMPTY).step)


def test_an_unknown_name_is_an_error(ray_cluster: str) -> None:
    with pytest.raises(NotRunningError, match="no cluster named 'nobody' is running"):
        KVCacheCluster.connect("nobody")


def test_steps_are_pipelined_in_order(shared: KVCacheCluster) -> None:
    with shared.client() as client:
        numbers = [client.submit(EMPTY) for _ in range(200)]
        client.wait_finished(numbers[-1])
        assert [client.wait_result(n).step for n in numbers[-50:]] == numbers[-50:]


@pytest.mark.parametrize("rank", [2, -1, "0", 10**30])
def test_a_rank_that_does_not_exist_is_refused(shared: KVCacheCluster, rank: Any) -> None:
    for ask in (shared.collect_labels, shared.replace_worker):
        with pytest.raises(RequestError, match=r"rank is .*: pass an integer from 0 to 1"):
            ask(rank)
    with pytest.raises(RequestError, match="rank is "):
        shared.read_block(rank, "layers.0", 1)


@pytest.mark.parametrize(
    ("layer", "block", "message"),
    [
        ("layers.9", 1, "there is no layer 'layers.9': this rank has layers.0"),
        (b"layers.0", 1, "there is no layer b'layers.0'"),
        ("layers.0", -1, "block_id is -1: pass an integer from 0 to "),
        ("layers.0", 10**6, "block_id is 1000000: pass an integer from 0 to "),
    ],
)
def test_a_block_that_does_not_exist_cannot_be_read(
    shared: KVCacheCluster, layer: Any, block: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        shared.read_block(0, layer, block)


def test_threads_share_a_client(shared: KVCacheCluster) -> None:
    with shared.client() as client:
        done: list[int] = []

        def work() -> None:
            for _ in range(20):
                number = client.submit(EMPTY)
                client.wait_finished(number)
                done.append(number)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(done) == list(range(1, 61))


def test_the_asyncio_client_steps_pipelines_and_calls(shared: KVCacheCluster) -> None:
    async def work() -> None:
        async with await shared.async_client() as client:
            numbers = [await client.submit(EMPTY) for _ in range(100)]
            results = await asyncio.gather(*(client.wait_result(n) for n in numbers))
            assert [result.step for result in results] == numbers
            await client.wait_finished(numbers[-1])
            request = Request("async", list(range(5000, 5040)))
            hit, num_tokens = await client.get_computed_blocks(request)
            assert await client.allocate_slots(request, 40 - num_tokens, num_tokens, hit)
            await client.free(request)
            with pytest.raises(RequestError, match="num_new_tokens"):
                await client.allocate_slots(Request("bad", [1]), 0)

    asyncio.run(work())


def test_calls_for_single_requests_travel(shared: KVCacheCluster) -> None:
    with shared.client() as client:
        request = Request("call", list(range(6000, 6040)))
        new = client.allocate_slots(request, 40)
        assert client.get_block_ids("call") == new.get_block_ids()
        client.free(request)


def test_whatever_is_not_ours_is_counted_and_the_cluster_lives_on(shared: KVCacheCluster) -> None:
    from actors.connect import connect_peer, this_node

    coordinator = shared._parts.coordinator
    endpoint: Endpoint = ray.get(coordinator.endpoint_for.remote(this_node()))
    limit = shared.config.transport.max_message_bytes * 4
    before = shared.statistics().service
    stranger = connect_peer(endpoint, client_peer("stranger"), limit, Mailbox(1))
    fake = connect_peer(endpoint, worker_peer(1, "fake"), limit, Mailbox(1))
    whole = encode(Attach("stranger", 1))
    try:
        stranger.send(b"")
        stranger.send(b"\xc1 no msgpack")
        stranger.send(whole[:-3])
        stranger.send(encode(Attach("somebody-else", 1)))
        stranger.send(encode(FinishedAck("nonce", 1, (1, 2))))
        stranger.send(bytes(shared.config.transport.max_message_bytes + 1))
        fake.send(encode(Ack("nonce", "fake", 1, 1, 10**6)))
        fake.send(encode(Ack("nonce", "fake", 0, 1, 1)))
        with shared.client() as client:
            client.wait_finished(client.step(EMPTY).step)

        def counted() -> bool:
            now = shared.statistics().service
            return (
                now.malformed - before.malformed == 3
                and now.impersonated - before.impersonated == 3
                and now.transport.oversized - before.transport.oversized == 1
            )

        assert wait_until(counted, 15.0)
        with shared.client() as client:
            assert play(client, "after", 8000) == 32
    finally:
        stranger.close()
        fake.close()


def test_workers_count_messages_that_are_not_for_them(launch: Any, make_config: Any) -> None:
    from actors.transport.local import LocalServer
    from actors.workers.embedding import EmbeddedWorker
    from kvcache.planner import plan_cluster
    from kvcache.protocol.messages import Ping, WorkerAddress

    config = make_config(parallel={"tensor_parallel_size": 1})
    server = LocalServer()
    worker = EmbeddedWorker(config, 0, lambda endpoint, peer, limit, box: server.connect(peer))
    worker.allocate(0, plan_cluster(config))
    worker.attach(Endpoint("local"))
    worker.poll()
    whole = encode(Ping("nonce", 1))
    for payload in (b"", whole[:-1], b"\xff" * 100, encode(Attach("c", 1)), whole):
        server.send([WorkerAddress(0)], payload)
    worker.poll()
    statistics = worker.statistics()
    assert (statistics.malformed, statistics.misdirected) == (3, 1)
    assert worker.worker.statistics().num_foreign_messages == 1
    worker.close()


@pytest.mark.launches
def test_tensor_and_pipeline_parallel_ranks_serve_a_hybrid_and_leave_nothing(
    launch: Any, make_config: Any, traces: Any
) -> None:
    config = make_config(
        model={
            "layers": [
                {"kind": "full", "count": 2, "num_kv_heads": 2, "head_size": 8},
                {
                    "kind": "sliding_window",
                    "count": 2,
                    "num_kv_heads": 2,
                    "head_size": 8,
                    "window_tokens": 32,
                },
            ]
        },
        parallel={"pipeline_parallel_size": 2},
    )
    said: list[str] = []
    cluster = launch(config, on_progress=said.append)
    assert said[-1] == "ready"
    with cluster.client() as client:
        assert play(client, "a", 0) == 32
    cluster.stop()
    cluster.stop()
    traces.check(config.name)


def test_any_process_can_stop_a_detached_cluster(
    ray_cluster: str, make_config: Any, traces: Any
) -> None:
    config = make_config(parallel={"tensor_parallel_size": 1})
    KVCacheCluster.launch(config, detached=True)
    KVCacheCluster.connect(config.name).stop()
    traces.check(config.name)
    with pytest.raises(NotRunningError):
        KVCacheCluster.connect(config.name)


@pytest.mark.parametrize(
    "transport", [{"kind": "ray"}, pytest.param({"curve": "always"}, marks=pytest.mark.launches)]
)
def test_every_transport_carries_steps(launch: Any, make_config: Any, transport: Any) -> None:
    cluster = launch(make_config(transport=transport))
    with cluster.client() as client:
        assert play(client, "a", 0) == 32

    async def work() -> None:
        async with await cluster.async_client() as client:
            await client.wait_finished((await client.step(EMPTY)).step)

    asyncio.run(work())


@ray.remote(num_cpus=0.1, concurrency_groups=WORKER_CONCURRENCY_GROUPS)
class Engine(WorkerMethods):
    """An engine's own actor that keeps a rank's cache inside itself."""

    def __init__(self, config: ClusterConfig, place: int) -> None:
        self.kvcache = EmbeddedWorker(config, place, connect_peer)

    def forward(self, epoch: int, seq: int) -> list[int]:
        """Run one forward: write into the blocks of slot 0."""
        worker = self.kvcache.worker
        worker.begin_forward(epoch, seq, timeout_s=10.0)
        blocks = worker.block_tables[0][0][:3].tolist()
        for name in worker.kv_caches:
            worker.kv_caches[name][blocks] = 3
        worker.end_forward(epoch, seq)
        self.kvcache.poll()
        return list(blocks)


def test_an_engines_own_actors_are_the_workers(launch: Any, make_config: Any) -> None:
    config = make_config(content_check={"enabled": False})
    engines = [Engine.remote(config, place) for place in range(2)]
    cluster = launch(config, worker_actors=engines)
    with cluster.client() as client:
        result = client.step(StepRequest("", 0, 0, new=(prompt("a", 40),)))
        calls = [engine.forward.remote(result.epoch, result.seq) for engine in engines]
        assert ray.get(calls, timeout=30) == [result.patches.block_ids.tolist()] * 2
        client.wait_applied(result.step)
        page = cluster.read_block(1, "layers.0", int(result.patches.block_ids[0]))
        assert len(set(page)) == 2
    cluster.stop()
    with pytest.raises(NotRunningError):
        KVCacheCluster.connect(config.name)
    for engine in engines:
        ray.kill(engine)
