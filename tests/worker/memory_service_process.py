"""A memory service or a worker of its node, to be killed.

`python -m tests.worker.memory_service_process ROLE ADDRESS` prints what it did on a line of
standard output, and then waits. A memory service imports no torch.
"""

from __future__ import annotations

import signal
import sys

from kvcache.memory_service import HostMemoryService, MemoryServiceAddress

PAYLOADS = {2: b"\x11" * 96, 5: b"\x77" * 96}
"""The content that `fill` seals, by slot."""


def service_of(address: str) -> MemoryServiceAddress:
    return MemoryServiceAddress(address, "cluster", timeout_s=20.0)


def keep(address: str) -> tuple[object, str]:
    service = HostMemoryService(address, max_segments=4, max_bytes=2**24)
    service.serve()
    return service, f"serves, torch {'torch' in sys.modules}"


def work(address: str) -> tuple[object, str]:
    from kvcache.worker.host_memory.segment import open_segment
    from tests.worker.tier_support import SHAPE, fill

    segment = open_segment(SHAPE, service_of(address))
    fill(segment, PAYLOADS)
    labels = segment.labels.sealed().labels
    return segment, f"{segment.origin}; {labels.digests.hex()}"


def main() -> None:
    role, address = sys.argv[1:]
    held, said = keep(address) if role == "service" else work(address)
    print(said, flush=True)
    signal.pause()
    del held


if __name__ == "__main__":
    main()
