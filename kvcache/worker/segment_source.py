"""Where a rank's host segment comes from: the process before this one, or nowhere.

Between a worker that starts and the memory service of its node. What the memory service has is used
if it is exactly what this rank needs; otherwise it is let go first, so that its memory can be had
again, and a new one is made: cold, and said why. Without a memory service the segment is private,
and ends with the process. Refuses to fail for want of a memory service; want of memory is an error.
"""

from __future__ import annotations

import os

from kvcache.base.errors import ClusterError, ExhaustedError, PlanMismatchError, ProtocolError
from kvcache.base.logs import get_logger
from kvcache.memory_service.client import MemoryServiceAddress, MemoryServiceClient
from kvcache.worker.free_memory import SYSTEM_ROOT
from kvcache.worker.host_segment import HostSegment, SegmentShape
from kvcache.worker.shared_memory import make_memory

logger = get_logger(__name__)

ATTACHED = "attached"
FRESH = "fresh"
PRIVATE = "private"

_MEMORY_SERVICE_ERRORS = (ClusterError, ProtocolError, ExhaustedError)


def open_segment(shape: SegmentShape, service: MemoryServiceAddress | None = None) -> HostSegment:
    """Return the rank's segment; its `origin` says where it is from.

    `attached`: the memory of an earlier process, with what it had sealed. `fresh`: new, and the
    memory service has it; a reason follows where it could not be attached. `private`: the memory
    service has it not.

    Raises NotEnoughMemoryError.
    """
    if service is None:
        return _make(shape, f"{PRIVATE}: no memory service is configured")
    client = MemoryServiceClient(service.address, service.timeout_s)
    name = service.name_of(shape.rank)
    origin = FRESH
    try:
        descriptor = client.attach(name)
        if descriptor is not None:
            try:
                return HostSegment(descriptor, shape, ATTACHED)
            except PlanMismatchError as error:
                os.close(descriptor)
                origin = f"{FRESH}: {error}"
                logger.warning("rank %d starts with cold host memory: %s", shape.rank, error)
                client.drop(name)
    except _MEMORY_SERVICE_ERRORS as error:
        return _private(shape, error)
    segment = _make(shape, origin)
    reason = keep_segment(segment, segment.descriptor, service)
    if reason:
        segment.origin = f"{PRIVATE}: {reason}"
    return segment


def keep_segment(segment: HostSegment, descriptor: int, service: MemoryServiceAddress) -> str:
    """Have the memory service keep a segment, `descriptor` of it; return why it does not, empty if
    it does.

    May be called again, and from any thread: a memory service that has died and come back keeps
    nothing.
    """
    rank = segment.shape.rank
    try:
        MemoryServiceClient(service.address, service.timeout_s).put(
            service.name_of(rank), descriptor
        )
    except _MEMORY_SERVICE_ERRORS as error:
        logger.warning("host memory of rank %d ends with its process: %s", rank, error)
        return str(error)
    if segment.origin.startswith(PRIVATE):
        segment.origin = FRESH
    return ""


def _private(shape: SegmentShape, error: Exception) -> HostSegment:
    logger.warning("host memory of rank %d ends with its process: %s", shape.rank, error)
    return _make(shape, f"{PRIVATE}: {error}")


def _make(shape: SegmentShape, origin: str) -> HostSegment:
    descriptor = make_memory(f"kvcache-rank{shape.rank}", shape.size_bytes, SYSTEM_ROOT)
    return HostSegment(descriptor, shape, origin)
