"""Part of the table: tiers below the device, their parts, and the hierarchy over them."""

from __future__ import annotations

import itertools

from kvcache import Namespace
from kvcache.config.tenants import TenantsConfig
from kvcache.offload import (
    TIERS,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    Deadlines,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    HierarchyOptions,
    HostLoadStoreSpec,
    JobKind,
    LabelShape,
    OffloadingEvent,
    ReqContext,
    TierHierarchy,
    TierManager,
    TierOptions,
    cache_events,
    get_offload_block_hash,
    get_offload_group_idx,
    label_keys,
    make_offload_key,
    make_offload_keys,
    make_tier,
    namespaced_digest,
    pack_keys,
    unpack_keys,
)
from kvcache.offload.disk_use import DiskUse
from kvcache.policies import EVICTION_POLICIES
from kvcache.protocol.commands import Label
from tests.attack.argument_kinds import (
    BOOL,
    BYTES,
    COUNT,
    COUNTS,
    DIGESTS,
    MAPPING,
    NAME,
    NO_INTEGERS,
    NO_LIST,
    NUMBER,
    POSITIVE,
    SHARE,
    TEXT,
    THING,
    TIME_LIMIT,
    Kind,
    instance_of,
    list_of,
)
from tests.attack.type_table import Builder, Subject, function_case
from tests.offload.label_chains import chain_label

NAMESPACE = instance_of(Namespace)

KEYS = tuple(make_offload_key(bytes([i]) * 8, 0) for i in range(6))
KEY = BYTES.also(b"1234")
KEY_LIST = list_of("keys", ["aa"], [bytearray(12)])
CONTEXT = instance_of(ReqContext).without(None)


class Rows:
    """A tensor of one-byte elements."""

    shape = (4, 16)

    def element_size(self) -> int:
        return 1


def offload_subject() -> Subject:
    namespace = Namespace(0, None, "s", None)
    host, gpu, file = (
        Builder(HostLoadStoreSpec),
        Builder(GPULoadStoreSpec, lambda world: GPULoadStoreSpec([1, 2])),
        Builder(FileLoadStoreSpec),
    )
    many = Kind("ids", (*COUNTS.wrong, [2**31]), COUNTS.forms)
    host.made({"block_ids": [1, 2]}, block_ids=many)
    gpu.made(
        {"block_ids": [1, 2], "group_sizes": [1, 1], "block_indices": [0, 3]},
        block_ids=many,
        group_sizes=COUNTS.without(None),
        block_indices=COUNTS.without(None),
    )
    file.made({"keys": KEYS}, keys=KEY_LIST)
    context = Builder(ReqContext)
    context.made({"req_id": "r", "params": {"a": 1}}, req_id=TEXT, params=MAPPING)
    reference, tensor, caches = (
        Builder(CanonicalKVCacheRef),
        Builder(CanonicalKVCacheTensor),
        Builder(CanonicalKVCaches),
    )
    reference.made({"tensor_idx": 0, "page_bytes": 4}, tensor_idx=COUNT, page_bytes=POSITIVE)
    tensor.made({"tensor": Rows()}, tensor=THING)
    caches.made(
        {
            "tensors": (CanonicalKVCacheTensor(Rows()),),
            "group_refs": ((CanonicalKVCacheRef(0, 4),),),
        },
        tensors=list_of("tensors"),
        group_refs=Kind("references", (*NO_LIST, [None], [5], [[5]], [[None]], [{1: 2}])),
    )
    deadlines = Builder(Deadlines, lambda world: Deadlines())
    times = {"store_s": 1.0, "load_s": 1.0, "spill_s": 1.0, "fetch_s": 1.0}
    deadlines.made(times, **dict.fromkeys(times, TIME_LIMIT))
    deadlines.method("of", {"kind": JobKind.STORE}, kind=instance_of(JobKind))
    hierarchy = Builder(HierarchyOptions)
    hierarchy.made(
        {
            "disk_write": "on_evict",
            "spare_share": 0.5,
            "max_spilling_blocks": 4,
            "max_fetching_blocks": 4,
            "deadlines": Deadlines(),
        },
        disk_write=NAME,
        spare_share=SHARE,
        max_spilling_blocks=POSITIVE,
        max_fetching_blocks=POSITIVE,
        deadlines=instance_of(Deadlines),
    )
    tier = Builder(TierOptions)
    tier.made(
        {
            "medium": "host",
            "num_slots": 4,
            "blocks_per_slot": 1,
            "policy": "lru",
            "store_after": 1,
            "labels": LabelShape(8, 4),
            "block_bytes": 4,
            "tenants": None,
        },
        num_slots=COUNT,
        blocks_per_slot=POSITIVE,
        policy=TEXT,
        store_after=POSITIVE,
        labels=instance_of(LabelShape).without(None),
        tenants=instance_of(TenantsConfig).without(None),
    )
    shape = Builder(LabelShape)
    shape.made(
        {"digest_bytes": 8, "max_block_tokens": 4}, digest_bytes=POSITIVE, max_block_tokens=POSITIVE
    )
    built = (host, gpu, file, context, reference, tensor, caches, deadlines, hierarchy)
    more = (tier, shape)
    event = OffloadingEvent(KEYS, "host", False)
    label = chain_label(2)
    functions = (
        function_case(
            make_offload_key,
            {"block_hash": b"12345678", "group_idx": 1},
            group_idx=COUNT.also(2**32),
        ),
        function_case(
            make_offload_keys,
            {"digests": [b"12345678"], "group_idx": 1, "namespace": namespace},
            digests=DIGESTS.also([b"1", b"12"]),
            group_idx=COUNT.also(2**32),
            namespace=NAMESPACE.without(None),
        ),
        function_case(
            make_tier,
            {"options": TierOptions("host", 4), "tiers": TIERS, "policies": EVICTION_POLICIES},
            options=instance_of(TierOptions),
            tiers=MAPPING,
        ),
        function_case(get_offload_block_hash, {"key": KEYS[0]}, key=KEY),
        function_case(get_offload_group_idx, {"key": KEYS[0]}, key=KEY),
        function_case(namespaced_digest, {"digest": b"12345678", "namespace": namespace}),
        function_case(
            cache_events,
            {"event": event, "block_sizes": [4], "none_hash": b"1"},
            event=instance_of(OffloadingEvent),
            block_sizes=COUNTS,
            none_hash=BYTES.without(b""),
        ),
        function_case(label_keys, {"label": label}, label=instance_of(Label)),
        function_case(
            pack_keys, {"keys": KEYS, "key_bytes": 12}, keys=KEY_LIST, key_bytes=POSITIVE.also(4)
        ),
        function_case(
            unpack_keys,
            {"data": b"".join(KEYS), "key_bytes": 12},
            data=BYTES.without(b""),
            key_bytes=POSITIVE.also(4),
        ),
    )
    cases = [case for each in (*built, *more) for case in each.cases]
    return Subject("tiers without state", cases=(*cases, *functions))


LABEL = chain_label(3)
LABEL_KEYS = tuple(label_keys(LABEL))
LABELS = instance_of(Label)
TEXT_OR_NONE = TEXT.without("")
ADDRESSES = Kind("addresses", (*NO_INTEGERS, [-1]), lambda good: (set(good), tuple(good)))


def make_tier_world() -> TierManager:
    tier = make_tier(TierOptions("host", 8, store_after=2))
    tier.reserve(KEYS[:3], is_forced=True)
    tier.complete_store(KEYS[:2])
    tier.prepare_load(KEYS[:1])
    tier.prepare_spill(KEYS[1:2])
    return tier


def state_of_tier(tier: TierManager) -> object:
    return (
        tier.statistics(),
        sorted(tier.slots.present_keys()),
        tier.states_of(KEYS).tolist(),
        tier.slots.addresses_of(KEYS).tolist(),
        tier.slots.is_dirty.tolist(),
        tier.slots.num_jobs(),
        tier.eviction.order(),
        tier.is_adopting,
        dict(tier.sightings._counts),
    )


def tier_subject() -> Subject:
    of = Builder(TierManager, kinds={"keys": KEY_LIST, "ctx": CONTEXT})
    of.made(
        {"options": TierOptions("host", 4), "policies": EVICTION_POLICIES, "spec_of": print},
        options=instance_of(TierOptions),
        spec_of=THING,
    )
    context = ReqContext("r")
    of.method("lookup", {"key": KEYS[0], "ctx": context}, key=BYTES)
    of.method("prepare_load", {"keys": KEYS[:1], "ctx": context})
    of.method("hold_leading", {"keys": KEYS[:1]})
    of.method("complete_load", {"keys": KEYS[:1]})
    of.method("prepare_spill", {"keys": KEYS[:1]})
    of.method("complete_spill", {"keys": KEYS[1:2]})
    of.method("touch", {"keys": KEYS[:1]})
    of.method("prepare_store", {"keys": KEYS[4:], "ctx": context})
    of.method(
        "reserve",
        {
            "keys": KEYS[4:],
            "labels": None,
            "spares": KEYS[:1],
            "is_forced": False,
            "drops_dirty": True,
            "needs_all": False,
            "tenant": "",
        },
        labels=LABELS.without(None),
        spares=KEY_LIST,
        is_forced=BOOL,
        drops_dirty=BOOL,
        needs_all=BOOL,
        tenant=TEXT_OR_NONE,
    )
    of.method("complete_store", {"keys": KEYS[2:3], "success": True}, success=BOOL)
    of.method("states_of", {"keys": KEYS})
    of.method("tenants_of", {"keys": KEYS[:2]})
    of.method("forget", {"keys": KEYS[1:2]})
    return Subject("tier", make_tier_world, state_of_tier, lambda t: t.check(), tuple(of.cases))


def make_hierarchy() -> TierHierarchy:
    """With a job of each kind open, numbered as in `OPEN_JOBS`."""
    shape = LabelShape(len(LABEL.digests) // 3, 4)
    host, disk = (make_tier(TierOptions(medium, 8, labels=shape)) for medium in ("host", "file"))
    tiers = TierHierarchy(
        host, disk, itertools.count(1).__next__, HierarchyOptions(disk_write="on_store")
    )
    disk.reserve(LABEL_KEYS[2:], is_forced=True)
    disk.complete_store(LABEL_KEYS[2:])
    assert tiers.plan_store(KEYS[4:], 0.0, is_private=True) is not None
    stored = tiers.plan_store(LABEL_KEYS[:2], 0.0, labels=_rows(2))
    tiers.end(stored.job_id, True)
    assert tiers.plan_spills(0.0) is not None
    assert tiers.plan_load(LABEL_KEYS[:1], 0.0) is not None
    assert tiers.plan_fetch(LABEL_KEYS[2:], 0.0) is not None
    return tiers


def _rows(count: int) -> Label:
    return chain_label(count)


def state_of_hierarchy(tiers: TierHierarchy) -> object:
    keys = (*KEYS, *LABEL_KEYS)
    return (
        tiers.statistics(),
        len(tiers.transfers),
        tiers.num_without_room,
        bool(tiers.discards),
        tiers.disk_use.problem,
        tiers.has_spills,
        tiers.is_disk_in_use,
        tiers.locate(keys).tolist(),
        [(t.eviction.order(), t.slots.num_jobs()) for t in (tiers.host, tiers.disk) if t],
        tiers._spills.owed(keys),
    )


def empty_hierarchy() -> TierHierarchy:
    host, disk = (make_tier(TierOptions(medium, 8)) for medium in ("host", "file"))
    return TierHierarchy(host, disk, itertools.count(1).__next__)


OPEN_JOBS = (1, 3, 4, 5)
"""A store, spill, load and fetch."""


def hierarchy_subjects() -> tuple[Subject, ...]:
    of = Builder(TierHierarchy, kinds={"keys": KEY_LIST, "now_s": NUMBER, "ok": BOOL})
    of.made(
        lambda world: {
            "host": make_tier(TierOptions("host", 4)),
            "disk": make_tier(TierOptions("file", 4)),
            "new_job_id": itertools.count(1).__next__,
            "options": HierarchyOptions(),
        },
        host=instance_of(TierManager),
        disk=instance_of(TierManager).without(None),
        new_job_id=THING,
        options=instance_of(HierarchyOptions).without(None),
    )
    for name in ("locate", "forget"):
        of.method(name, {"keys": LABEL_KEYS})
    of.method(
        "plan_store",
        {
            "keys": KEYS[:2],
            "now_s": 1.0,
            "labels": None,
            "is_private": True,
            "namespace": Namespace(0, None, "s", None),
        },
        labels=LABELS.without(None),
        is_private=BOOL,
        namespace=NAMESPACE.without(None),
    )
    of.method("plan_fetch", {"keys": LABEL_KEYS, "now_s": 1.0})
    of.method("plan_load", {"keys": LABEL_KEYS[:2], "now_s": 1.0})
    of.method("plan_spills", {"now_s": 1.0})
    for job_id in OPEN_JOBS:
        of.method(
            "end",
            {"job_id": job_id, "ok": True, "failed": [0], "lost": [0]},
            job_id=COUNT,
            failed=ADDRESSES,
            lost=ADDRESSES.without(None),
        )
    of.method("expire", {"now_s": 1.0})
    use = Builder(DiskUse, kinds={"now_s": NUMBER})
    use.method("rest", {"reason": "slow", "now_s": 1.0}, reason=TEXT_OR_NONE)
    use.method("leave", {"problem": "broken"}, problem=TEXT_OR_NONE)
    use.method("postpone", {"problem": "slow"}, problem=TEXT_OR_NONE)
    empty = Builder(TierHierarchy)
    empty.method("adopt_host", {"labels": LABEL}, labels=LABELS)
    empty.method("adopt_disk", {"labels": LABEL}, labels=LABELS)
    return (
        Subject(
            "hierarchy",
            make_hierarchy,
            state_of_hierarchy,
            lambda tiers: tiers.check(),
            tuple(of.cases),
        ),
        Subject(
            "empty hierarchy",
            empty_hierarchy,
            state_of_hierarchy,
            lambda tiers: tiers.check(),
            tuple(empty.cases),
        ),
        Subject(
            "use of a disk",
            DiskUse,
            lambda use: (use.is_off, use.problem, use.num_rests),
            lambda use: None,
            tuple(use.cases),
        ),
    )


TIER_SUBJECTS = (offload_subject(), tier_subject(), *hierarchy_subjects())
