"""Cache events: published to routers, and followed. See ARCHITECTURE.md, Cache events."""

from kvcache.events.codec import EventCodec
from kvcache.events.prefix_index import PrefixIndex, PrefixMatch
from kvcache.events.subscriber import AsyncKVEventSubscriber, KVEventSubscriber
from kvcache.events.subscription import (
    Subscription,
    SubscriptionSettings,
    SubscriptionStatistics,
    Update,
)
from kvcache.events.wire_events import ClearedEvent, EventBatch, RemovedEvent, StoredEvent

__all__ = [
    "AsyncKVEventSubscriber",
    "ClearedEvent",
    "EventBatch",
    "EventCodec",
    "KVEventSubscriber",
    "PrefixIndex",
    "PrefixMatch",
    "RemovedEvent",
    "StoredEvent",
    "Subscription",
    "SubscriptionSettings",
    "SubscriptionStatistics",
    "Update",
]
