"""A rank's host memory: taken over from the engine before, or made; and kept while the engine runs.

The memory service of the engine's name has the memory, so it outlives the engine. If that service
dies before the engine, `MemoryWatch` starts another one and registers the memory there.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from weakref import WeakValueDictionary

from kvcache.base.errors import (
    AlreadyRunningError,
    ConfigurationError,
    KVCacheError,
    NotEnoughMemoryError,
    NotRunningError,
)
from kvcache.base.logs import get_logger
from kvcache.integrations.vllm.block_labels import DIGEST_BYTES, MAX_BLOCK_TOKENS
from kvcache.integrations.vllm.options import EngineSetting
from kvcache.memory_service.client import MemoryServiceAddress, MemoryServiceClient, service_address
from kvcache.memory_service.process import ensure_service
from kvcache.memory_service.protocol import lock_owner, memory_number, process_text
from kvcache.worker.host_memory.segment import (
    MAX_TENSORS,
    PRIVATE,
    HostSegment,
    SegmentShape,
    open_segment,
)
from kvcache.worker.host_memory.shared_memory import total_memory_bytes
from kvcache.worker.kv_cache_pool import KVCachePool

logger = get_logger(__name__)

DEFAULT_MEMORY_SHARE = 8
"""Without a size, the ranks of an engine take one part in so many of the node's memory, or of their
container's."""

OTHER_ENGINE_S = 30.0
"""How long a rank waits for the process before it to be gone."""

PEERS_LET_GO_S = 5.0
"""How long a rank waits for memory of its own that others map."""

WATCH_S = 2.0
"""How often a rank looks whether the memory service still keeps its memory."""

_LOOK_S = 0.1

_open_here: WeakValueDictionary[str, HostSegment] = WeakValueDictionary()
"""This process's own, by name: the kernel's locks only keep other processes out."""


def open_rank_memory(
    setting: EngineSetting, rank: int, fingerprint: str, pool: KVCachePool
) -> HostSegment:
    """Return the rank's memory; raises as `RankTiers` does."""
    options = setting.options
    num_pieces = len(pool.layout.regions)
    if num_pieces > MAX_TENSORS:
        raise ConfigurationError(
            f"a block of this model has {num_pieces} pieces on each rank, the connector moves at "
            f"most {MAX_TENSORS}: set VLLM_KV_CACHE_LAYOUT to a layout that begins with B, such as "
            "BLNHC, or remove --kv-transfer-config"
        )
    shape = SegmentShape(
        layout_fingerprint=fingerprint,
        rank=rank,
        num_slots=_num_slots(setting, pool.layout.block_bytes),
        widths=tuple(region.width_bytes for region in pool.layout.regions),
        digest_bytes=DIGEST_BYTES,
        max_block_tokens=MAX_BLOCK_TOKENS,
    )
    if not options.offload.keeps_memory:
        return open_segment(shape)
    service = service_address(options.name, setting.replica)
    ensure_service(service.address, options.idle_memory_s)
    _await_free(service, setting, rank)
    _drop_surplus(service, setting.num_ranks)
    segment = _open_segment(shape, service, setting)
    if segment.origin.startswith(PRIVATE):
        logger.warning("rank %d: %s", rank, segment.origin)
        owner = _user_of(service, rank)
        if owner:  # both have started at once
            segment.close()
            raise _in_use(owner, setting, rank)
    _open_here[f"{service.address} {service.name_of(rank)}"] = segment
    return segment


class MemoryWatch:
    """Has the memory service keep a rank's memory, also after the service has died.

    Ends with `close`, or when the segment is closed or gone. Asks for the list of memories only: a
    descriptor of the own memory would take this process's lock away when it is closed.
    """

    def __init__(self, segment: HostSegment, service: MemoryServiceAddress, idle_s: float) -> None:
        """Start the thread. `idle_s` is for another service."""
        self._segment = weakref.ref(segment)
        self._service = service
        self._idle_s = idle_s
        self._problem = ""
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="kvcache-memory-watch", daemon=True).start()

    def close(self) -> None:
        """End the thread soon. Repeatable."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(WATCH_S):
            segment = self._segment()
            if segment is None or not segment.is_open:
                return
            try:
                self._look(segment)
            except (KVCacheError, OSError) as error:
                self._note(str(error))
            del segment

    def _look(self, segment: HostSegment) -> None:
        """Register the memory if it is not kept."""
        service, name = self._service, self._service.name_of(segment.shape.rank)
        client = MemoryServiceClient(service.address, service.timeout_s)
        try:
            kept = client.list(name)
        except NotRunningError:
            ensure_service(service.address, self._idle_s)
            kept = {}
        with segment.lend() as descriptor:
            if descriptor is None or self._ended.is_set():
                return
            if kept.get(name) != memory_number(descriptor):
                client.put(name, descriptor)
                logger.warning("%s: another memory service keeps %s now", service.address, name)
        self._problem = ""

    def _note(self, problem: str) -> None:
        """Log a problem, once."""
        if problem != self._problem:
            logger.warning("host memory ends with its engine as long as this lasts: %s", problem)
        self._problem = problem


def _open_segment(
    shape: SegmentShape, service: MemoryServiceAddress, setting: EngineSetting
) -> HostSegment:
    """Return the rank's segment. If it takes the place of another one, which peers may map a moment
    longer, wait for its memory. Raises NotEnoughMemoryError."""
    give_up_s = time.monotonic() + PEERS_LET_GO_S
    while True:
        try:
            return open_segment(shape, service)
        except NotEnoughMemoryError:
            if not _has_peers(service, setting) or time.monotonic() > give_up_s:
                raise
        time.sleep(_LOOK_S)


def _has_peers(service: MemoryServiceAddress, setting: EngineSetting) -> bool:
    client = MemoryServiceClient(service.address, service.timeout_s)
    try:
        kept = client.list(f"{setting.options.name}/")
    except KVCacheError:
        return False
    return any(not name.startswith(f"{service.cluster}/rank") for name in kept)


def _num_slots(setting: EngineSetting, slot_bytes: int) -> int:
    """Return how many blocks fit; raises ConfigurationError for none."""
    num_bytes = setting.options.offload.host_memory_per_rank
    if num_bytes is None:
        total_bytes = total_memory_bytes()
        if total_bytes is None:
            raise ConfigurationError(
                "the memory of this node cannot be read: set offload.host_memory_per_rank"
            )
        num_bytes = total_bytes // DEFAULT_MEMORY_SHARE // setting.num_ranks
    if num_bytes < slot_bytes:
        raise ConfigurationError(
            f"offload.host_memory_per_rank is {num_bytes} bytes, a block of this model has "
            f"{slot_bytes} on each rank: set it to many times that"
        )
    return num_bytes // slot_bytes


def _await_free(service: MemoryServiceAddress, setting: EngineSetting, rank: int) -> None:
    """Wait until no engine has the rank's memory; raises AlreadyRunningError if one keeps it.

    The ranks of an engine that was killed live a moment longer than it.
    """
    own = _open_here.get(f"{service.address} {service.name_of(rank)}")
    if own is not None and own.is_open:  # before a descriptor is opened, and its lock lost
        raise _in_use(os.getpid(), setting, rank)
    give_up_s = time.monotonic() + OTHER_ENGINE_S
    while owner := _user_of(service, rank):
        if time.monotonic() > give_up_s:
            raise _in_use(owner, setting, rank)
        time.sleep(_LOOK_S)


def _in_use(owner: int, setting: EngineSetting, rank: int) -> AlreadyRunningError:
    return AlreadyRunningError(
        f"{process_text(owner)} has the host memory of rank {rank} of {setting.options.name!r}, "
        f"replica {setting.replica}: end that engine, or give this one another replica"
    )


def _user_of(service: MemoryServiceAddress, rank: int) -> int:
    """Return which other process has a rank's memory, 0 if none."""
    client = MemoryServiceClient(service.address, service.timeout_s)
    descriptor = client.attach(service.name_of(rank))
    if descriptor is None:
        return 0
    try:
        return lock_owner(descriptor)
    finally:
        os.close(descriptor)


def _drop_surplus(service: MemoryServiceAddress, num_ranks: int) -> None:
    """Free the memory of ranks that an earlier engine had and this one has not, which no engine
    could use any more."""
    client = MemoryServiceClient(service.address, service.timeout_s)
    begin = f"{service.cluster}/rank"
    for name in client.list(begin):
        rank = int(name.removeprefix(begin))
        if rank >= num_ranks and not _user_of(service, rank):
            client.drop(name)
