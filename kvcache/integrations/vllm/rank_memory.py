"""The host memory of one rank: what the connector does in a worker process.

Between vLLM's tensors and the rank's host segment, with the copies, checksums and labels of our own
workers. The segment is kept by a process of its own and outlives the engine. Obeys the scheduler's
commands in the step that brings them; a load that fails is reported, never raised.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.errors import AlreadyRunningError, ConfigurationError, NotEnoughMemoryError
from kvcache.base.logs import get_logger
from kvcache.integrations.vllm.options import DIGEST_BYTES, EngineSetting
from kvcache.integrations.vllm.step_messages import Inventory, RankReports, StepCommands
from kvcache.memory_service.client import MemoryServiceAddress, MemoryServiceClient
from kvcache.memory_service.process import ensure_service
from kvcache.memory_service.protocol import lock_owner
from kvcache.protocol.commands import Label
from kvcache.worker.copies.checksums import ChecksumRule
from kvcache.worker.copies.engine import CpuCopyEngine
from kvcache.worker.copies.task import BlockMove, Comparison, CopyResult, CopyTask
from kvcache.worker.host_memory.host_pool import HostPool
from kvcache.worker.host_memory.segment import PRIVATE, SegmentShape, open_segment

logger = get_logger(__name__)

DEFAULT_MEMORY_SHARE = 8
"""Without a size, the ranks of an engine take one part in so many of the node's memory."""

OTHER_ENGINE_S = 30.0
"""How long a rank waits for the process before it to be gone."""

_LOOK_S = 0.1


class RankMemory:
    """One rank's slots. Each step calls `load`, then `store`, in the model runner's thread."""

    def __init__(
        self, setting: EngineSetting, rank: int, kv_caches: Mapping[str, torch.Tensor]
    ) -> None:
        """Attach to the segment of the engine before, or make a new one.

        Raises ConfigurationError for tensors that cannot be moved as rows of bytes,
        NotEnoughMemoryError, StartupError, AlreadyRunningError if a living engine has the name.
        """
        self.rank = rank
        self._rows = _rows_of(kv_caches, setting.num_blocks)
        options = setting.options
        widths = tuple(rows.shape[1] for rows in self._rows)
        layers = [(name, tuple(t.shape[1:]), t.dtype) for name, t in kv_caches.items()]
        shape = SegmentShape(
            layout_fingerprint=setting.fingerprint(str(layers)),
            rank=rank,
            num_slots=_num_slots(setting, sum(widths)),
            widths=widths,
            digest_bytes=DIGEST_BYTES,
            max_block_tokens=1,  # labels are found by digest, and carry no tokens
        )
        service = service_address(options.name) if options.offload.keeps_memory else None
        if service is not None:
            ensure_service(service.address, options.idle_memory_s)
            _await_free(service, rank)
        try:
            segment = open_segment(shape, service)
        except NotEnoughMemoryError as error:
            raise NotEnoughMemoryError(
                f"rank {rank} has no room for its host memory of {shape.size_bytes} bytes: lower "
                f"offload.host_memory_per_rank ({error})"
            ) from error
        if service is not None and segment.origin.startswith(PRIVATE):
            logger.warning("rank %d: %s", rank, segment.origin)
        self.origin = segment.origin
        self._host = HostPool(segment, is_pinned=False)
        self._labels = self._host.labels
        self._labels.withdraw_unsealed()
        self._engine = CpuCopyEngine()
        self._rule = ChecksumRule(options.offload.verify)
        self._has_failed_load = False
        self._invalid_blocks: set[int] = set()
        self._reports = RankReports()

    def inventory(self) -> Inventory:
        """Return what was adopted."""
        slots = int32_array(range(self._host.num_slots))
        held = slots[self._labels.are_labelled(slots)]
        digests = _split(self._labels.labels_of(held).digests)
        return Inventory(self._host.num_slots, dict(zip(held.tolist(), digests, strict=True)))

    def load(self, commands: StepCommands) -> None:
        """Do what comes before the forward."""
        if commands.forgets_all:
            self._labels.withdraw_all()
        if commands.forgotten:
            self._labels.withdraw(int32_array(commands.forgotten))
        if commands.sealed:
            self._labels.seal(int32_array(commands.sealed))
        self._has_failed_load = False
        if not commands.load_slots:
            return
        slots, blocks = int32_array(commands.load_slots), int32_array(commands.load_blocks)
        failed = self._load(slots, blocks, commands.load_digests)
        self._has_failed_load = bool(failed)
        self._invalid_blocks |= {commands.load_blocks[place] for place in failed}
        lost = frozenset(commands.load_digests[place] for place in failed)
        self._tell(RankReports(loaded={commands.step: 1}, lost=lost))
        if failed:
            logger.warning(
                "rank %d could not load %d of %d blocks: they are computed again",
                self.rank,
                len(failed),
                len(slots),
            )

    def store(self, commands: StepCommands) -> None:
        """Do what comes after the forward."""
        if not commands.store_slots:
            return
        if self._has_failed_load or not self._store(commands):
            self._tell(RankReports(not_stored=frozenset((commands.step,))))
        else:
            self._tell(RankReports(stored={commands.step: 1}))

    def take_reports(self) -> RankReports | None:
        """Return what was done since the last call, None if that is nothing."""
        reports, self._reports = self._reports, RankReports()
        return None if reports == RankReports() else reports

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks whose load failed since the last call."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def close(self) -> None:
        """Give the segment back; the memory service has it still."""
        self._host.close()

    # --- copies

    def _load(self, slots: Int32Array, blocks: Int32Array, digests: Sequence[bytes]) -> list[int]:
        """Copy slots to blocks; return the places whose bytes are not those of their digest."""
        is_right = self._labels.are_readable(slots)
        held = _split(self._labels.labels_of(slots).digests)
        is_right &= np.array([a == b for a, b in zip(held, digests, strict=True)], np.bool_)
        places = np.flatnonzero(is_right)
        failed = set(np.flatnonzero(~is_right).tolist())
        if len(places):
            comparison = Comparison(
                self._labels.checksums(slots[places]), self._rule.chosen(len(places))
            )
            move = BlockMove(self._rows, self._host, blocks[places], slots[places], False)
            result = self._run(CopyTask(move, self._engine, comparison=comparison))
            wrong = range(len(places)) if result.problem else result.wrong.tolist()
            failed |= {int(places[i]) for i in wrong}
        return sorted(failed)

    def _store(self, commands: StepCommands) -> bool:
        """Copy blocks to slots and label them; say whether all are there."""
        slots, blocks = int32_array(commands.store_slots), int32_array(commands.store_blocks)
        count = len(slots)
        generations = self._labels.begin(slots)
        zeros = np.zeros(count, np.int32)
        self._labels.describe(
            slots,
            Label(
                block_ids=blocks,
                groups=zeros,
                slots=zeros - 1,
                digests=b"".join(commands.store_digests),
                parent_digests=b"".join(commands.store_parents),
                token_counts=zeros,
                token_ids=zeros[:0],
                namespaces=zeros,
                namespace_names=(b"",),
            ),
        )
        move = BlockMove(self._rows, self._host, blocks, slots, True)
        result = self._run(CopyTask(move, self._engine, takes_checksums=self._rule.takes))
        if result.problem:
            self._labels.withdraw(slots)
            return False
        self._labels.finish(slots, generations, result.checksums)
        return True

    def _run(self, task: CopyTask) -> CopyResult:
        task.begin()
        result = task.finish()
        if result.problem:
            logger.error("rank %d: %s", self.rank, result.problem)
        return result

    def _tell(self, reports: RankReports) -> None:
        self._reports = self._reports.aggregate(reports)


def service_address(name: str) -> MemoryServiceAddress:
    """Return where the memory service of the engine `name` of this user listens on this node."""
    return MemoryServiceAddress(f"unix:@kvcache-vllm-{os.getuid()}-{name}", name)


def _rows_of(kv_caches: Mapping[str, Any], num_blocks: int) -> list[torch.Tensor]:
    """Return each layer's tensor as `(num_blocks, width)` bytes; layers that share one, once.

    Raises ConfigurationError for what is no such tensor.
    """
    rows: list[torch.Tensor] = []
    seen: set[int] = set()
    for layer, tensor in kv_caches.items():
        is_tensor = isinstance(tensor, torch.Tensor)
        if not is_tensor or tensor.shape[0] != num_blocks or not tensor.is_contiguous():
            shape = tuple(tensor.shape) if is_tensor else type(tensor).__name__
            raise ConfigurationError(
                f"the KV cache of layer {layer} is {shape}, the connector moves contiguous tensors "
                f"of {num_blocks} blocks, blocks first: remove --kv-transfer-config, or choose "
                "another attention backend"
            )
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            rows.append(tensor.view(num_blocks, -1).view(torch.uint8))
    return rows


def _num_slots(setting: EngineSetting, slot_bytes: int) -> int:
    """Return how many blocks fit; raises ConfigurationError for none."""
    num_bytes = setting.options.offload.host_memory_per_rank
    if num_bytes is None:
        page_bytes, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        num_bytes = page_bytes * pages // DEFAULT_MEMORY_SHARE // setting.num_ranks
    if num_bytes < slot_bytes:
        raise ConfigurationError(
            f"offload.host_memory_per_rank is {num_bytes} bytes, a block of this model has "
            f"{slot_bytes} on each rank: set it to many times that"
        )
    return num_bytes // slot_bytes


def _await_free(service: MemoryServiceAddress, rank: int) -> None:
    """Wait until no process has the rank's memory; raises AlreadyRunningError if one keeps it.

    The ranks of an engine that was killed live a moment longer than it.
    """
    give_up_s = time.monotonic() + OTHER_ENGINE_S
    client = MemoryServiceClient(service.address, service.timeout_s)
    while True:
        descriptor = client.attach(service.name_of(rank))
        if descriptor is None:
            return
        try:
            owner = lock_owner(descriptor)
        finally:
            os.close(descriptor)
        if not owner:
            return
        if time.monotonic() > give_up_s:
            raise AlreadyRunningError(
                f"process {owner} has the host memory of rank {rank} of {service.cluster!r}: end "
                "that engine, or give this one another name"
            )
        time.sleep(_LOOK_S)


def _split(digests: bytes) -> list[bytes]:
    """Return the digests that lie one behind the other."""
    return [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]
