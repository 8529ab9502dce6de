"""A publisher's addresses, from its coordinator's report."""

from __future__ import annotations

import pytest

from actors.routing.event_endpoints import EventEndpoints, endpoints_in, moved
from kvcache.base.errors import ConfigurationError, NotRunningError

STATISTICS = {"endpoint": "tcp://0.0.0.0:5557", "replay_endpoint": "tcp://127.0.0.1:5657"}


def test_an_address_bound_on_all_interfaces_is_looked_for_on_its_host() -> None:
    found = endpoints_in(STATISTICS, "c", 2.0, host="10.0.0.7")
    assert found == EventEndpoints("tcp://10.0.0.7:5557", "tcp://127.0.0.1:5657", 2.0)
    assert endpoints_in(STATISTICS, "c").endpoint == "tcp://0.0.0.0:5557"


def test_a_publisher_that_is_off_or_away_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ConfigurationError, match="c publishes no cache events: launch it with"):
        endpoints_in(None, "c")
    away = {"endpoint": "", "replay_endpoint": "", "problem": "it has ended"}
    with pytest.raises(NotRunningError, match="of c is not there: it has ended"):
        endpoints_in(away, "c")


def test_a_publisher_is_followed_where_it_has_moved() -> None:
    before = EventEndpoints("tcp://h:1", "tcp://h:2", 3.0, "kv@x")
    now = moved(before, STATISTICS, "h")
    assert now == EventEndpoints("tcp://h:5557", "tcp://127.0.0.1:5657", 3.0, "kv@x")
    assert moved(now, STATISTICS, "h") == now
    for nothing in (None, {"endpoint": "", "replay_endpoint": ""}):
        assert moved(before, nothing, "h") == before
