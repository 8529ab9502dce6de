"""Forks by a client's calls to a coordinator."""

from __future__ import annotations

import numpy as np
import pytest

from actors import LocalCluster
from kvcache import Request, RequestError
from kvcache.config import parse_config
from kvcache.coordinator.remote_calls import RemoteCalls, pack_values
from kvcache.protocol.messages import Call
from kvcache.protocol.step import NO_STEP
from tests.manager.managers_under_test import make_manager

CONFIG = parse_config(
    {
        "name": "forks",
        "model": {
            "name": "small",
            "max_model_len": 128,
            "layers": [{"kind": "full", "count": 2, "num_kv_heads": 2, "head_size": 8}],
        },
        "cache": {"block_size": 4, "memory_per_rank": "1MiB"},
        "parallel": {"tensor_parallel_size": 2},
        "content_check": {"enabled": False},
    }
)


def test_a_client_forks_by_call() -> None:
    with LocalCluster(CONFIG) as cluster, cluster.client() as client:
        parent = Request("parent", list(range(5)))
        client.allocate_slots(parent, 5)
        parent.num_computed_tokens = 5
        parent.append_output_token_ids([5])
        client.allocate_slots(parent, 1)
        parent.num_computed_tokens = 6
        child = Request("child", list(range(6)))
        shared = client.fork(parent, child)
        assert shared.get_block_ids() == client.get_block_ids("parent")
        assert child.num_computed_tokens == 6
        block_id = shared.get_block_ids()[0][1]
        for host in cluster.workers:
            host.worker.kv_caches["layers.0"][block_id].fill_(3.0)
        child.append_output_token_ids([1])
        own = client.allocate_slots(child, 1)
        copy = own.get_block_ids()[0][0]
        assert copy != block_id
        for host in cluster.workers:
            host.worker.begin_forward(client.epoch, client.last_seq, timeout_s=1.0)
            cache = host.worker.kv_caches["layers.0"]
            assert np.array_equal(cache[copy].numpy(), cache[block_id].numpy())
            host.worker.end_forward(client.epoch, client.last_seq)
        with pytest.raises(RequestError, match="nobody is not known and cannot be forked"):
            client.fork(Request("nobody", [1]), Request("grandchild", [1]))
        client.free(parent)
        client.free(child)
        assert client.usage() == 0.0


def test_a_child_with_a_known_id_is_refused_and_the_known_request_is_unharmed() -> None:
    with LocalCluster(CONFIG) as cluster, cluster.client() as client:
        parent = Request("parent", list(range(6)))
        client.allocate_slots(parent, 6)
        parent.num_computed_tokens = 6
        with pytest.raises(RequestError, match="request parent is to be a child but known: use"):
            client.fork(parent, Request("parent", [*range(6), 90, 91]))
        parent.append_output_token_ids([6])
        assert client.allocate_slots(parent, 1) is not None
        known = cluster.coordinator.manager.get_request("parent")
        assert known.all_token_ids.tolist() == list(range(7))


def test_a_child_that_was_refused_can_come_again_with_other_tokens() -> None:
    with LocalCluster(CONFIG) as cluster, cluster.client() as client:
        parent = Request("parent", list(range(6)))
        client.allocate_slots(parent, 6)
        parent.num_computed_tokens = 6
        with pytest.raises(RequestError, match="token 3 is 9, that of the parent 3"):
            client.fork(parent, Request("child", [0, 1, 2, 9, 4, 5]))
        child = Request("child", list(range(7)))
        assert client.fork(parent, child) is not None
        assert client.allocate_slots(child, 1) is not None
        assert client.get_block_ids("child") == ([1, 3],)


def test_a_client_does_not_fork_what_another_one_has() -> None:
    with LocalCluster(CONFIG) as cluster, cluster.client() as one, cluster.client() as two:
        parent = Request("parent", list(range(6)))
        one.allocate_slots(parent, 6)
        parent.num_computed_tokens = 6
        with pytest.raises(RequestError, match="request parent is known as another object"):
            two.fork(parent, Request("child", list(range(6))))
        assert one.fork(parent, Request("child", list(range(6)))) is not None


def test_tokens_that_differ_from_the_known_ones_are_refused() -> None:
    calls = RemoteCalls(make_manager())

    def allocate(tokens: list[int]) -> bytes:
        request = {
            "request_id": "r",
            "start": 0,
            "token_ids": np.array(tokens, dtype="<i4").tobytes(),
        }
        arguments = pack_values({"num_new_tokens": 4, "request": request})
        return calls.call(Call("one#1", 1, 1, NO_STEP, "allocate_slots", arguments))

    allocate([1, 2, 3, 4])
    message = r"request r: tokens \[0, 4\) differ from the known ones: free it, or use another id"
    with pytest.raises(RequestError, match=message):
        allocate([1, 2, 9, 4, 5, 6, 7, 8])
