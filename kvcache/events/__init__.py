"""Cache events: published to routers, and followed. See ARCHITECTURE.md, Cache events."""

from kvcache.events.codec import EventCodec
from kvcache.events.decoding import decode_batch
from kvcache.events.mirror import CacheMirror
from kvcache.events.prefix_index import PrefixIndex, PrefixMatch
from kvcache.events.publisher import EventPublisher, PublisherSettings, PublisherStatistics
from kvcache.events.subscriber import AsyncKVEventSubscriber, KVEventSubscriber
from kvcache.events.subscription import (
    Subscription,
    SubscriptionSettings,
    SubscriptionStatistics,
    Update,
)
from kvcache.events.wire_events import (
    ClearedEvent,
    EventBatch,
    RemovedEvent,
    StoredEvent,
    WireEvent,
)

__all__ = [
    "AsyncKVEventSubscriber",
    "CacheMirror",
    "ClearedEvent",
    "EventBatch",
    "EventCodec",
    "EventPublisher",
    "KVEventSubscriber",
    "PrefixIndex",
    "PrefixMatch",
    "PublisherSettings",
    "PublisherStatistics",
    "RemovedEvent",
    "StoredEvent",
    "Subscription",
    "SubscriptionSettings",
    "SubscriptionStatistics",
    "Update",
    "WireEvent",
    "decode_batch",
]
