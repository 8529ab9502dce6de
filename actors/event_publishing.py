"""From a configuration and a plan to the publisher of cache events, on the coordinator's side."""

from __future__ import annotations

from dataclasses import astuple

from kvcache.base.clock import Clock
from kvcache.base.curve import CurveKeys
from kvcache.base.errors import ConfigurationError
from kvcache.config import ClusterConfig
from kvcache.coordinator.event_feed import LinkedEventFeed
from kvcache.events.process_link import ProcessLink
from kvcache.events.publisher import PublisherSettings
from kvcache.events.publisher_process import SocketSettings
from kvcache.events.translation import group_kinds, usable_group
from kvcache.planner import Plan

OPEN_SHARE = 0.25
"""Of `deadlines.startup_s`, for the publisher: the coordinator begins with it, and has to find the
workers in what is left."""


def make_event_feed(
    config: ClusterConfig, plan: Plan, clock: Clock, keys: CurveKeys | None
) -> LinkedEventFeed | None:
    """Return the feed of a publisher that has bound its sockets; None where events are off.

    `keys` are the cluster's, for followers that must prove themselves.

    Raises ConfigurationError when it cannot bind them, or there are no keys and it needs them;
    ClusterError when it does not start.
    """
    events = config.events
    if not events.enabled:
        return None
    settings = PublisherSettings(
        topic=events.topic or f"kv@{config.name}@{config.model.name}",
        data_parallel_rank=events.data_parallel_rank,
        encoding=events.encoding,
        publish_groups=events.publish_groups,
        one_block_per_event=events.publish_one_block_per_event,
        heartbeat_s=events.heartbeat_s,
        history_batches=events.history_batches,
        history_bytes=events.history_bytes,
    )
    curve_keys = None
    if events.curve == "always":
        if keys is None:
            raise ConfigurationError(
                "events.curve is always, but a cluster inside one process has no keys: set it to "
                "never"
            )
        curve_keys = astuple(keys)
    groups = [group.kv_cache_spec for group in plan.model_config.kv_cache_groups]
    kinds = group_kinds(plan.model_config.kv_cache_groups)
    link = ProcessLink(
        settings,
        kinds,
        SocketSettings(events.endpoint, events.replay_endpoint, curve_keys=curve_keys),
        clock,
        max_waiting_bytes=events.queue_bytes,
    )
    link.open(OPEN_SHARE * config.deadlines.startup_s)
    return LinkedEventFeed(link, block_size=groups[usable_group(kinds) or 0].block_size)
