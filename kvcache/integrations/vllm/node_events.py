"""An engine's events for the coordinator of several nodes, which publishes those of all.

The engine's publisher binds free ports of its node, guarded by the coordinator's keys; the block
server announces them with the topic, which names node, engine and replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.events.feed_sender import FeedSender
from kvcache.events.translation import GroupKind
from kvcache.integrations.vllm.block_server import own_host
from kvcache.integrations.vllm.options import EngineSetting
from kvcache.integrations.vllm.tier_events import TierEvents, open_publisher
from kvcache.sharing.access import IndexPlace

HEARTBEAT_S = 1.0
"""A follower learns so late of a batch that was lost, if no other one follows."""


def open_node_publisher(
    setting: EngineSetting, index: IndexPlace, model: str, kinds: Sequence[GroupKind]
) -> FeedSender:
    """Return the sender of a publisher that the coordinator at `index` can follow.

    `events` of the options says in which form. Raises ConfigurationError, ClusterError.
    """
    place = f"tcp://{_host(setting, index)}:*"
    events = setting.options.events.model_copy(
        update={"endpoint": place, "replay_endpoint": place, "heartbeat_s": HEARTBEAT_S}
    )
    topic = _topic(setting, index, model)
    return open_publisher(events, topic, kinds, setting.replica, index.keys)


def stream_of(
    setting: EngineSetting, index: IndexPlace, model: str, events: TierEvents | None
) -> tuple[str, str, str]:
    """Return topic and endpoints of what the coordinator publishes of an engine; empty if that is
    nothing."""
    options = setting.options.coordinator
    if options is None or not options.events or events is None:
        return "", "", ""
    return _topic(setting, index, model), *events.endpoints


def _topic(setting: EngineSetting, index: IndexPlace, model: str) -> str:
    return f"kv@{_host(setting, index)}/{setting.options.name}/{setting.replica}@{model}"


def _host(setting: EngineSetting, index: IndexPlace) -> str:
    options = setting.options.coordinator
    assert options is not None
    return options.host or own_host(index.address)
