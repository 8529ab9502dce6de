"""Part of the table: cache events, from the codec to the subscribers and the index of routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcache import BlocksStored, KVCacheGroupSpec, Namespace
from kvcache.base.curve import CurveKeys, generate_curve_keys
from kvcache.events import (
    AsyncKVEventSubscriber,
    CacheMirror,
    EventBatch,
    EventCodec,
    EventPublisher,
    KVEventSubscriber,
    PrefixIndex,
    PublisherSettings,
    RemovedEvent,
    StoredEvent,
    Subscription,
    SubscriptionSettings,
    Update,
    decode_batch,
)
from kvcache.events.publisher import SEQUENCE
from kvcache.events.translation import GroupKind
from kvcache.requests.hash_algorithms import BlockHash
from tests.attack.argument_kinds import (
    BOOL,
    BYTES,
    COUNT,
    HASHABLE,
    NAME,
    NUMBER,
    OPTIONAL_TEXT,
    OPTIONAL_THING,
    POSITIVE,
    SECONDS,
    TEXT,
    TIME_LIMIT,
    instance_of,
    list_of,
)
from tests.attack.type_table import Builder, Case, Subject, function_case
from tests.core.builders import full

BLOCKS = BlocksStored(
    0,
    "device",
    (BlockHash(b"1" * 32),),
    None,
    np.arange(4, dtype=np.int32),
    4,
    Namespace(0, None, None, None),
)
STORED = StoredEvent(np.array([7], np.uint64), None, np.arange(4, dtype=np.int32), 4, "GPU")
REMOVED = RemovedEvent(np.array([7], np.uint64), "GPU")
GROUPS = (KVCacheGroupSpec(("a",), full()),)
CODEC = EventCodec(GROUPS)
PAYLOAD = CODEC.encode_wire(1.0, [STORED])
UPDATE = Update(1, EventBatch(1.0, [STORED]), False)

EVENTS = list_of("events")
FRAMES = list_of("frames", ["a"], [b"a", 5], [bytearray(1)])
TOPIC = TEXT.without("")
RANK = COUNT.also(1 << 21)


def settings_cases() -> list[Case]:
    publisher, subscription = Builder(PublisherSettings), Builder(SubscriptionSettings)
    publisher.made(
        vars(PublisherSettings("kv@a")),
        topic=TOPIC,
        data_parallel_rank=RANK,
        publish_groups=NAME,
        one_block_per_event=BOOL,
        heartbeat_s=TIME_LIMIT,
        history_batches=POSITIVE,
        history_bytes=POSITIVE,
    )
    subscription.made(
        vars(SubscriptionSettings()),
        is_shared=BOOL,
        reply_s=TIME_LIMIT,
        silence_s=TIME_LIMIT,
        max_kept_batches=POSITIVE,
        max_payload_bytes=POSITIVE,
    )
    codec = Builder(EventCodec, lambda world: CODEC, {"time_s": NUMBER, "events": EVENTS})
    codec.made(
        {"groups": GROUPS, "data_parallel_rank": 1, "encoding": "map"},
        groups=list_of("groups"),
        data_parallel_rank=RANK,
    )
    codec.method("encode", {"time_s": 1.0, "events": [BLOCKS]})
    codec.method("encode_wire", {"time_s": 1.0, "events": [STORED]})
    decoded = function_case(
        decode_batch,
        {"payload": PAYLOAD, "max_bytes": 100_000},
        payload=BYTES,
        max_bytes=COUNT.also(0),
    )
    made = (publisher, subscription, codec)
    return [*(case for each in made for case in each.cases), decoded.of_message()]


def make_publisher() -> EventPublisher:
    made = EventPublisher(PublisherSettings("kv@a"), [GroupKind("full")])
    made.begin(5, 1.0, [BLOCKS])
    return made


def publisher_subject() -> Subject:
    of = Builder(EventPublisher, kinds={"time_s": NUMBER, "events": EVENTS, "state": EVENTS})
    of.made(
        {"settings": PublisherSettings("kv@a"), "kinds": [GroupKind("full")]},
        settings=instance_of(PublisherSettings),
        kinds=list_of("kinds"),
    )
    of.method("begin", {"first_seq": 9, "time_s": 1.0, "state": [BLOCKS]}, first_seq=COUNT)
    of.method("publish", {"time_s": 1.0, "events": [BLOCKS]})
    of.method("heartbeat", {"time_s": 1.0})
    of.method("answer", {"request": [b"a", b"", SEQUENCE.pack(5)], "time_s": 1.0}, request=FRAMES)
    return Subject(
        "publisher", make_publisher, lambda made: made.statistics(), cases=tuple(of.cases)
    )


def make_mirror() -> CacheMirror:
    mirror = CacheMirror()
    mirror.apply([STORED])
    return mirror


def mirror_subject() -> Subject:
    of = Builder(CacheMirror)
    of.method(
        "contains",
        {"block_hash": 7, "medium": "GPU", "group_idx": 0},
        block_hash=COUNT,
        group_idx=COUNT,
    )
    at = {"block_hash": 7, "group_idx": 0}
    of.method("is_cached", at, block_hash=COUNT, group_idx=COUNT)
    of.method("apply", {"events": [REMOVED]}, events=EVENTS)
    return Subject("mirror", make_mirror, _state_of_mirror, cases=tuple(of.cases))


def _state_of_mirror(mirror: CacheMirror) -> object:
    return len(mirror), mirror.checksum, mirror.num_unknown_removals


def make_index() -> PrefixIndex:
    index = PrefixIndex()
    index.follow("a", UPDATE)
    return index


def index_subject() -> Subject:
    of = Builder(PrefixIndex, kinds={"source": HASHABLE})
    of.method("num_blocks", {"source": "a"})
    of.method("follow", {"source": "b", "update": UPDATE}, update=instance_of(Update))
    of.method("forget", {"source": "a"})
    of.method(
        "match",
        {"token_ids": list(range(8)), "lora_name": "l", "cache_salt": "s", "items": [("h", 1)]},
        lora_name=OPTIONAL_TEXT,
        items=list_of("items", ["ab"], [([],)]),
    )
    return Subject(
        "index",
        make_index,
        lambda index: [(source, index.num_blocks(source)) for source in index.sources],
        cases=tuple(of.cases),
    )


def make_subscription() -> Subscription:
    made = Subscription(None, 1.0)
    made.on_live([b"kv@a", SEQUENCE.pack(3), CODEC.encode_wire(1.0, [])], 2.0)
    return made


def subscription_subject() -> Subject:
    of = Builder(Subscription, kinds={"now_s": NUMBER, "frames": FRAMES})
    settings = instance_of(SubscriptionSettings).without(None)
    of.made({"settings": SubscriptionSettings(), "now_s": 1.0}, settings=settings)
    live = [b"kv@a", SEQUENCE.pack(4), PAYLOAD]
    of.method("on_live", {"frames": live, "now_s": 3.0})
    of.method("on_reply", {"frames": [b"", *live], "now_s": 3.0})
    of.method("start_over", {"problem": "p", "now_s": 3.0}, problem=TEXT.without(""))
    of.method("request", {"now_s": 30.0})
    return Subject(
        "subscription",
        make_subscription,
        lambda made: (made.statistics(), made._heard_s, made._ask_at_s),
        cases=tuple(of.cases),
    )


NOWHERE = "tcp://127.0.0.1:9"
KEYS = generate_curve_keys()


def subscriber_cases() -> list[Case]:
    """Each call has a subscriber of its own, without a publisher, and ends it."""
    cases = []
    place = TEXT.also("nowhere", "tcp://host")
    for cls in (KVEventSubscriber, AsyncKVEventSubscriber):
        of = Builder(cls)
        arguments = {
            "endpoint": NOWHERE,
            "replay_endpoint": NOWHERE,
            "topic": "kv@",
            "settings": SubscriptionSettings(),
            "keys": KEYS,
        }
        of.made(
            arguments if cls is AsyncKVEventSubscriber else {**arguments, "on_update": print},
            endpoint=place,
            replay_endpoint=place,
            topic=TOPIC,
            on_update=OPTIONAL_THING,
            settings=instance_of(SubscriptionSettings).without(None),
            keys=instance_of(CurveKeys, CurveKeys(b"a", b"", b"b", b"c")).without(None),
        )
        cases += [_closed(case) for case in of.cases]
    calls = Builder(KVEventSubscriber)
    calls.method("poll", {"timeout_s": 0.0}, timeout_s=SECONDS)
    calls.method("wait_for", {"seq": 1, "timeout_s": 0.0}, seq=COUNT, timeout_s=SECONDS)
    for case in calls.cases:
        call = _on_a_subscriber(case.call)
        skipped = frozenset(case.kinds)  # there is nothing to wait for
        cases.append(Case(case.name, case.kinds, case.good, call, skipped))
    return cases


def _closed(case: Case) -> Case:
    def call(world: Any, arguments: dict[str, Any]) -> object:
        made: Any = case.call(world, arguments)
        getattr(made, "_inner", made).close()
        return None

    return Case(case.name, case.kinds, case.good, call)


def _on_a_subscriber(call: Callable[..., object]) -> Callable[..., object]:
    def called(world: Any, arguments: dict[str, Any]) -> object:
        with KVEventSubscriber(NOWHERE, NOWHERE) as subscriber:
            return call(subscriber, arguments)

    return called


def keys_cases() -> tuple[Case, ...]:
    of = Builder(CurveKeys)
    key = BYTES.without(b"")
    of.made(vars(KEYS), **dict.fromkeys(vars(KEYS), key))
    return tuple(of.cases)


EVENT_SUBJECTS = (
    Subject("settings of events", cases=tuple(settings_cases())),
    publisher_subject(),
    mirror_subject(),
    index_subject(),
    subscription_subject(),
    Subject("subscribers", cases=(*subscriber_cases(), *keys_cases())),
)
