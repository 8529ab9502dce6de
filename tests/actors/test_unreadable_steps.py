"""Unsendable and unreadable steps on a real cluster: an error of the call, and service
continues."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors import EmbeddedCluster, KVCacheCluster
from actors.clusters.access import ClusterAccess
from kvcache.base.errors import MalformedMessageError, RequestError
from kvcache.protocol.messages import Message
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.requests.request import Request
from tests.protocol.loose_sender import unchecked

pytestmark = pytest.mark.ray

MAX_CALL_S = 20.0
"""Less than any deadline of the configuration: an error must come at once, not as a time-out."""

BAD = StepRequest(completed_step=2**63)
LONG = StepRequest(finished=("r",) * 65_537)
REFUSED = (RequestError, MalformedMessageError)
SAID = r"^StepRequest\.completed_step is 9223372036854775808: pass an integer of 64 bits$"


def spoiled(message: Message, max_bytes: int) -> bytes:
    """Return a message of a client with other rules than ours."""
    if isinstance(message, StepRequest):
        message = replace(message, completed_step=2**63)
    return unchecked(message)


def prompt(name: str) -> StepRequest:
    return StepRequest(new=(NewRequest(name, np.arange(40, dtype=np.int32), 40),))


def use(cluster: ClusterAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send unsendable and unreadable steps; all other steps are served in between."""
    with cluster.client() as client:
        for bad in (BAD, LONG):
            with pytest.raises(REFUSED, match=r"completed_step is 9|finished has 65537 items"):
                client.step(bad)
        client.wait_finished(client.step(prompt("a")).step)
        with monkeypatch.context() as patch:
            patch.setattr("actors.connection.encode", spoiled)
            with pytest.raises(MalformedMessageError, match=SAID):
                client.step(StepRequest(), MAX_CALL_S)
        after = client.step(StepRequest(completed_step=1, finished=("a",)))
        client.wait_finished(after.step)
        assert (after.step, client.usage(), client.num_resent) == (3, 0.0, 0)
        client.attach()


async def use_async(cluster: ClusterAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a client for asyncio, and its calls."""
    async with await cluster.async_client() as client:
        for bad in (BAD, LONG):
            with pytest.raises(REFUSED, match=r"completed_step is 9|finished has 65537 items"):
                await client.step(bad)
        first = await client.step(prompt("b"))
        await client.wait_finished(first.step)
        with monkeypatch.context() as patch:
            patch.setattr("actors.connection.encode", spoiled)
            with pytest.raises(MalformedMessageError, match=SAID):
                await client.step(StepRequest(), MAX_CALL_S)
        with pytest.raises(RequestError, match="num_new_tokens is"):
            await client.allocate_slots(Request("c", [1]), 2**70)
        done = await client.step(StepRequest(completed_step=first.step, finished=("b",)))
        await client.wait_finished(done.step)
        assert await client.usage() == 0.0
        await client.attach()


def test_clients_of_a_cluster_go_on(
    shared: KVCacheCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shared.statistics().service
    use(shared, monkeypatch)
    asyncio.run(use_async(shared, monkeypatch))
    statistics = shared.message_statistics()
    assert statistics.malformed - before.malformed == 2
    assert "StepRequest.completed_step is 9223372036854775808" in statistics.last_malformed


def test_clients_of_an_embedded_coordinator_go_on(
    ray_cluster: str, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedCluster.launch(make_config()) as cluster:
        use(cluster, monkeypatch)
        asyncio.run(use_async(cluster, monkeypatch))
        statistics = cluster.message_statistics()
        assert statistics.malformed == 2
