"""The faulty network: its faults, and their repetition by seed."""

from __future__ import annotations

import random

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError
from tests.protocol.network import FaultyNetwork, NetworkFaults


def play(
    faults: NetworkFaults, seed: int = 1, count: int = 200
) -> tuple[FaultyNetwork, list[bytes]]:
    clock = VirtualClock()
    network = FaultyNetwork(clock, random.Random(seed), faults)
    for i in range(count):
        network.send("a", "b", b"%03d" % i)
        clock.advance(0.0001)
    clock.advance(10.0)
    return network, [delivery.payload for delivery in network.arrivals()]


def test_without_faults_everything_arrives_once_whole_and_in_order() -> None:
    _, arrived = play(NetworkFaults())
    assert arrived == [b"%03d" % i for i in range(200)]


def test_nothing_arrives_before_its_time() -> None:
    clock = VirtualClock()
    network = FaultyNetwork(clock, random.Random(1), NetworkFaults(latency_s=0.5))
    network.send("a", "b", b"x")
    assert network.arrivals() == []
    assert network.next_arrival_s() == 0.5
    clock.advance(0.5)
    assert [delivery.receiver for delivery in network.arrivals()] == ["b"]
    assert network.next_arrival_s() is None


def test_each_fault_happens_in_its_share_and_is_counted() -> None:
    network, arrived = play(NetworkFaults(dropped=0.2, duplicated=0.2, reordered=0.5, torn=0.1))
    statistics = network.statistics()
    assert (
        20 < statistics.dropped < 60
        and 10 < statistics.duplicated < 60
        and 5 < statistics.torn < 40
    )
    assert (
        statistics.sent - statistics.dropped + statistics.duplicated
        == statistics.delivered
        == len(arrived)
    )
    whole = [payload for payload in arrived if len(payload) == 3]
    assert len(arrived) - len(whole) == statistics.torn
    assert whole != sorted(whole)


def test_the_same_seed_does_the_same() -> None:
    faults = NetworkFaults(dropped=0.2, duplicated=0.2, delayed=0.3, reordered=0.5, torn=0.1)
    assert play(faults)[1] == play(faults)[1]
    assert play(faults)[1] != play(faults, seed=2)[1]


def test_messages_in_flight_to_a_dead_peer_are_lost() -> None:
    clock = VirtualClock()
    network = FaultyNetwork(clock, random.Random(1), NetworkFaults())
    network.send("a", "b", b"x")
    network.send("a", "c", b"y")
    network.forget("b")
    clock.advance(1.0)
    assert [delivery.payload for delivery in network.arrivals()] == [b"y"]


def test_shares_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"dropped is 1.5: pass a share, 0 to 1"):
        NetworkFaults(dropped=1.5)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_meant_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match=r"^latency_s is .*: pass 0 or more$"):
        NetworkFaults(latency_s=seconds)
