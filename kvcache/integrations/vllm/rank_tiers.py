"""The tiers of one rank: what the connector does in a worker process.

Between vLLM's tensors, the rank's host segment and its files, with the jobs, copies, checksums and
labels of our own workers. The segment is kept by a process of its own and outlives the engine, as
files do. Obeys the scheduler's commands in the step that brings them, and reports jobs when they
have ended; a load that fails is reported, never raised.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.errors import ConfigurationError, NotEnoughMemoryError, NotRunningError
from kvcache.base.logs import get_logger
from kvcache.config.offload import DiskConfig
from kvcache.config.sections import Location
from kvcache.integrations.vllm.block_labels import (
    DIGEST_BYTES,
    MAX_BLOCK_TOKENS,
    block_labels,
    labelled_keys,
)
from kvcache.integrations.vllm.files_owner import FilesOwner
from kvcache.integrations.vllm.layer_rows import LayerRows, layer_rows
from kvcache.integrations.vllm.options import EngineSetting
from kvcache.integrations.vllm.peers import PeerReaders, Peers
from kvcache.integrations.vllm.rank_memory import MemoryWatch, open_rank_memory
from kvcache.integrations.vllm.remote_blocks import Imports
from kvcache.integrations.vllm.step_messages import (
    Inventory,
    LoadCommand,
    PeerMemory,
    RankCommands,
    RankReports,
    StoreCommand,
)
from kvcache.memory_service.client import service_address
from kvcache.offload.keys import OffloadKey, first_victims_first, unpack_keys
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import Discard, Fetch, Load, SealSlots, Spill, Store
from kvcache.protocol.labels import LabelTable
from kvcache.protocol.messages import MAX_REPORTED_BLOCKS, JobReport
from kvcache.worker.copies.checksums import ChecksumRule
from kvcache.worker.copies.cuda import CudaCopyEngine
from kvcache.worker.copies.engine import CopyEngine
from kvcache.worker.copies.measurement import make_copy_engine
from kvcache.worker.copies.runner import CopyRunner, CopyThread, InlineCopies
from kvcache.worker.files.file_pool import FilePool
from kvcache.worker.files.format import FileHead
from kvcache.worker.files.old_layouts import RankPlace, remove_in_background
from kvcache.worker.files.shared import position_in
from kvcache.worker.files.store import NUM_DIRECTORIES
from kvcache.worker.files.tier import FileTier, FileTierSettings
from kvcache.worker.host_memory.first_touch import FirstTouch
from kvcache.worker.host_memory.host_pool import HostPool
from kvcache.worker.host_memory.labels import Rows
from kvcache.worker.host_memory.segment_reader import SegmentReader
from kvcache.worker.kv_cache_pool import KVCachePool, PoolLayout, Region
from kvcache.worker.tiers import Tiers
from kvcache.worker.transfers import Copying, TransferJobs

logger = get_logger(__name__)

SCAN_S = 60.0
"""How long a rank reads at its start what files there are."""

FILES_PER_SPARE_FILE = 8
"""Of so many files, one more may be written before another one is removed."""

MAX_QUEUED_BLOCKS = 8192
"""Blocks that wait for the disk; more fail."""

_NO_SLOTS = int32_array(())
_OTHER_BLOCKS = "host slots hold other blocks than is said"


class RegisteredPool(KVCachePool):
    """vLLM's own tensors, as rows of bytes for jobs."""

    def __init__(self, layers: LayerRows, num_blocks: int) -> None:
        """Take what `layer_rows` has made; nothing is allocated."""
        self.rows = layers.rows
        self.device = layers.device
        regions = tuple(Region(0, int(rows.stride(0)), rows.shape[1]) for rows in self.rows)
        self.layout = PoolLayout(num_blocks, sum(rows.numel() for rows in self.rows), (), regions)


@dataclass
class RunningLoad:
    """A load that has begun. `wrong` are slots that hold something else than is wanted. From a
    peer: its `reader`, the other `slots`, and the labels `rows` that they had before. `is_overdue`:
    the request waits for it no longer."""

    command: LoadCommand
    deadline_s: float
    wrong: list[int] = field(default_factory=list)
    reader: SegmentReader | None = None
    slots: Int32Array = field(default_factory=lambda: _NO_SLOTS)
    rows: Rows | None = None
    is_overdue: bool = False


class RankTiers:
    """One rank's slots and files. All calls come from the model runner's thread: each step
    `await_stores`, then `obey` and `store`, then those that take.

    On CUDA the thread's current stream is the one of vLLM's forwards. A step's jobs begin when the
    device has executed what that stream had got before `obey` and `store`: the forward that writes
    the blocks of a store, and those that used the blocks of a load for other requests. A load is
    reported when its last byte is there, so no forward has to wait for it.
    """

    def __init__(
        self,
        setting: EngineSetting,
        rank: int,
        kv_caches: Mapping[str, object],
        *,
        backends: str = "",
        engine: CopyEngine | None = None,
    ) -> None:
        """Attach to the segment of the engine before, or make a new one; open the files.

        `backends` names vLLM's attention backends, which lay the tensors out. `engine` copies;
        by default the one for the tensors' device, on CUDA as a measurement chooses.

        Raises ConfigurationError for tensors that cannot be moved as rows of bytes and for a
        directory that cannot be used or has files of another model, NotEnoughMemoryError,
        StartupError, AlreadyRunningError if a living engine has the name.
        """
        self.rank = rank
        self._setting = setting
        layers = layer_rows(kv_caches, setting.num_blocks)
        pool = RegisteredPool(layers, setting.num_blocks)
        laid_out_by = _instruction_sets() if pool.device.type == "cpu" else pool.device.type
        fingerprint = setting.fingerprint(f"{layers.description}|{backends}|{laid_out_by}")
        offload = setting.options.offload
        owner = None if offload.disk is None else FilesOwner(setting, offload.disk)
        if owner is not None:
            owner.require(rank, fingerprint)  # before memory of this name is dropped
        self._engine = engine or _open_engine(pool.device)
        self._host = _open_host(setting, rank, fingerprint, pool)
        self._watch = _open_watch(setting, self._host)
        self.origin = self._host.segment.origin
        self._host.labels.withdraw_unsealed()
        rule = ChecksumRule(offload.verify)
        self._num_files = 0
        tiers = Tiers(self._host)
        if offload.disk is not None and owner is not None:
            self._num_files = offload.disk.capacity_per_rank // pool.layout.block_bytes
            try:
                owner.claim(rank, fingerprint)
                tiers = _open_files(setting, offload.disk, self._host, rule)
            except BaseException:
                self._host.close()
                raise
        self._tiers = tiers
        self._first_touch = FirstTouch(self._host.segment.memory)
        runner: CopyRunner = InlineCopies()
        if setting.options.is_asynchronous:
            runner = CopyThread(
                lambda: None, priority=offload.copy_priority, num_threads=offload.copy_threads
            )
        self._labels = LabelTable(setting.num_blocks, DIGEST_BYTES, MAX_BLOCK_TOKENS)
        copying = Copying(self._engine, runner, rule)
        self._jobs = TransferJobs(pool, tiers, copying, self._labels)
        address_of = partial(service_address, setting.options.name)
        self._peers = PeerReaders(address_of, self._host.segment.shape)
        self._imports = _open_imports(setting, self._host)
        self._loads: dict[int, RunningLoad] = {}
        self._num_loads: Counter[str] = Counter()  # by request, those that it waits for
        self._overdue_loads: list[int] = []
        self._failed: set[str] = set()
        self._stores: dict[int, Int32Array] = {}
        self._spoilt: set[int] = set()
        self._invalid_blocks: set[int] = set()
        self._received: set[str] = set()
        self._released: set[str] = set()
        self._reports: list[tuple[int, JobReport]] = []

    def inventory(self) -> Inventory:
        """Return what was adopted. Reads the heads of all files."""
        labels = self._host.labels
        every_slot = int32_array(range(self._host.num_slots))
        held = every_slot[labels.are_labelled(every_slot)]
        held = held[np.argsort(labels.generations(held))[::-1]]  # the newest first
        told = labels.labels_of(held)
        keys, slots = labelled_keys(told), held.tolist()
        order = first_victims_first(keys, unpack_keys(told.parent_digests, DIGEST_BYTES))
        tier = self._tiers.file_tier
        directory = "" if tier is None else str(tier.directory)
        position = position_in(directory) if directory else 0  # what follows is looked at again
        file_keys, problem = self._scan_files()
        return Inventory(
            self._host.num_slots,
            {slots[place]: keys[place] for place in order},
            self._num_files,
            file_keys,
            problem,
            self._host.segment.shape,
            directory,
            position,
        )

    def await_stores(self, commands: RankCommands) -> None:
        """Wait until no store reads blocks that the forward may write. What is not over in time is
        not kept: its bytes may be others'."""
        if not commands.reused_blocks:
            return
        blocks = int32_array(commands.reused_blocks)
        end_s = time.monotonic() + self._setting.options.offload.job_s
        for copy in self._jobs.uses.reads.using(blocks):
            if not copy.wait(max(0.0, end_s - time.monotonic())):
                self._spoilt |= {
                    job for job, used in self._stores.items() if np.isin(used, blocks).any()
                }

    def obey(self, commands: RankCommands) -> None:
        """Begin everything but stores."""
        if commands.loads:  # earlier forwards may still use these blocks
            self._engine.on_forward_end()
        if commands.forgotten_slots or commands.forgotten_keys:
            slots = int32_array(commands.forgotten_slots)
            self._jobs.discard(Discard(FILE_MEDIUM, slots, commands.forgotten_keys))
        if commands.sealed:
            self._jobs.seal(SealSlots(HOST_MEDIUM, int32_array(commands.sealed)))
        for spill in commands.spills:
            sources = int32_array(spill.slots)
            self._jobs.start(Spill(spill.job_id, FILE_MEDIUM, sources, spill.keys))
        for fetch in commands.fetches:
            destinations = int32_array(fetch.slots)
            self._jobs.start(Fetch(fetch.job_id, FILE_MEDIUM, fetch.keys, destinations))
        if self._imports is not None:
            for imported in commands.imports:
                self._imports.start(imported)
        self._invalid_blocks.update(commands.invalid_blocks)
        self._failed.update(commands.failed)
        self._received.update(commands.received)
        self._released.update(commands.released)
        self._num_loads.update(load.request_id for load in commands.loads)
        for load in commands.loads:
            if load.peer is None:
                self._start_load(load)
            else:
                self._start_peer_load(load, load.peer)
        self._poll()

    def store(self, commands: RankCommands) -> None:
        """Begin the step's store."""
        store = commands.store
        if store is None:
            return
        blocks, slots = int32_array(store.blocks), int32_array(store.slots)
        job = Store(store.job_id, HOST_MEDIUM, blocks, slots)
        self._engine.on_forward_end()
        self._start_store(job, store)
        self._poll()

    def take_reports(self) -> RankReports | None:
        """Return which jobs have ended since the last call, None if there are none."""
        self._poll()
        if not self._reports and not self._overdue_loads:
            return None
        reports = RankReports(tuple(self._reports), tuple(self._overdue_loads))
        self._reports, self._overdue_loads = [], []
        return reports

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks are not needed any more, and those that wait no longer
        for their loads, since the last call."""
        self._poll()
        finished = self._released, self._received
        self._released, self._received = set(), set()
        return finished

    def take_failed_requests(self) -> set[str]:
        """Return those of the last `take_finished` that have to be computed from their start: in
        other blocks, because a load hangs, or because single blocks cannot be computed again."""
        failed, self._failed = self._failed, set()
        return failed

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks whose load failed since the last call, where vLLM computes single
        blocks again."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def close(self) -> None:
        """Give segment and directory back; the memory service has the segment still."""
        self._first_touch.close()
        if self._watch is not None:
            self._watch.close()
        if (self._imports is None or self._imports.close()) and self._jobs.close():
            self._engine.close()

    # --- jobs

    def _start_load(self, load: LoadCommand) -> None:
        """Load what slots hold as is said; the rest has failed."""
        slots, blocks = int32_array(load.slots), int32_array(load.blocks)
        labels = self._host.labels
        is_right = labels.are_readable(slots) & labels.are_whole(slots)
        readable = np.flatnonzero(is_right)
        held = labelled_keys(labels.labels_of(slots[readable]))
        wanted = [load.keys[place] for place in readable.tolist()]
        is_right[readable] = [a == b for a, b in zip(held, wanted, strict=True)]
        self._loads[load.job_id] = RunningLoad(load, self._deadline_s(), slots[~is_right].tolist())
        job = Load(load.job_id, HOST_MEDIUM, slots[is_right], blocks[is_right])
        if is_right.any():
            self._jobs.start(job)
        else:
            self._jobs.refuse(job, _OTHER_BLOCKS)

    def _start_peer_load(self, load: LoadCommand, peer: PeerMemory) -> None:
        """Load what slots of a peer hold as is said; the rest has failed."""
        slots, blocks = int32_array(load.slots), int32_array(load.blocks)
        running = RunningLoad(load, self._deadline_s(), list(load.slots))
        self._loads[load.job_id] = running
        try:
            reader = self._peers.reader_of(peer)
            rows = reader.rows_at(slots)
        except (NotRunningError, IndexError) as error:
            self._jobs.refuse(Load(load.job_id, HOST_MEDIUM, slots, blocks), str(error))
            return
        is_right = reader.are_whole(rows)
        wanted = block_labels(slots, load.keys)
        digests = np.frombuffer(wanted.digests, np.uint8).reshape(len(slots), -1)
        is_right &= (rows["digest"] == digests).all(axis=1) & (rows["group"] == wanted.groups)
        job = Load(load.job_id, HOST_MEDIUM, slots[is_right], blocks[is_right])
        running.wrong = slots[~is_right].tolist()
        running.reader, running.slots, running.rows = reader, job.sources, rows[is_right]
        if is_right.any():
            self._jobs.start_from(reader, job, running.rows["checksum"].astype(np.int64))
        else:
            self._jobs.refuse(job, _OTHER_BLOCKS)

    def _deadline_s(self) -> float:
        return time.monotonic() + self._setting.options.offload.job_s

    def _start_store(self, job: Store, store: StoreCommand) -> None:
        self._stores[job.job_id] = job.sources
        self._labels.withdraw(job.sources)
        self._labels.apply(block_labels(job.sources, store.keys, store.parents))
        self._jobs.start(job)

    def _poll(self) -> None:
        """Take note of what has ended."""
        for ended in self._jobs.poll():
            report, load = ended, self._loads.pop(ended.job_id, None)
            if load is not None:
                report = self._end_load(load, ended)
            self._stores.pop(ended.job_id, None)
            if ended.job_id in self._spoilt:
                self._spoilt.discard(ended.job_id)
                report = JobReport(ended.job_id, ok=False, detail="its blocks were used again")
            self._reports.append((self.rank, report))
        if self._imports is not None:
            self._reports += [(self.rank, report) for report in self._imports.poll()]
        self._give_up_loads()

    def _give_up_loads(self) -> None:
        """Say which loads have taken too long, and all others of their requests. Their copies go
        on, and are reported at their end.

        A step that does its own copies has none that go on.
        """
        now_s = time.monotonic() if self._loads else 0.0
        late = {
            load.command.request_id
            for load in self._loads.values()
            if load.deadline_s <= now_s and not load.is_overdue
        }
        for job_id, load in self._loads.items() if late else ():
            if load.command.request_id in late and not load.is_overdue:
                load.is_overdue = True
                self._overdue_loads.append(job_id)
        for request_id in late:
            del self._num_loads[request_id]
        self._received |= late
        self._failed |= late

    def _end_load(self, load: RunningLoad, report: JobReport) -> JobReport:
        """Note what of a load is wrong; return the report of all of it."""
        command = load.command
        if not load.is_overdue:
            self._num_loads[command.request_id] -= 1
            if self._num_loads[command.request_id] <= 0:
                del self._num_loads[command.request_id]
                self._received.add(command.request_id)
        if load.reader is not None and load.rows is not None:
            is_same = load.reader.are_unchanged(load.slots, load.rows)
            load.wrong += load.slots[~is_same].tolist()
        if report.ok and not load.wrong:
            return report
        is_whole = not report.ok and not 0 < len(report.block_ids) < MAX_REPORTED_BLOCKS
        wrong = set(command.slots) if is_whole else {*load.wrong, *report.block_ids}
        if not load.is_overdue:
            self._note_failure(command, wrong)
        detail = report.detail or _OTHER_BLOCKS
        logger.warning(
            "rank %d could not load %d of %d blocks, and they are computed again: %s",
            self.rank,
            len(wrong),
            len(command.slots),
            detail,
        )
        named = () if is_whole else tuple(sorted(wrong))[:MAX_REPORTED_BLOCKS]
        return replace(report, ok=False, detail=detail, block_ids=named)

    def _note_failure(self, load: LoadCommand, wrong: set[int]) -> None:
        """Have vLLM compute what could not be loaded from the slots `wrong`."""
        if self._setting.groups.fails_whole_requests:
            self._failed.add(load.request_id)
            return
        self._invalid_blocks |= {
            block for slot, block in zip(load.slots, load.blocks, strict=True) if slot in wrong
        }

    def _scan_files(self) -> tuple[tuple[bytes, ...], str]:
        """Return the keys of all good files, and what is wrong with the directory as a whole."""
        if self._tiers.files is None:
            return (), self._tiers.files_problem
        pool = self._tiers.files
        pool.scan()
        heads: list[FileHead] = []
        num_read, give_up_s = 0, time.monotonic() + SCAN_S
        while num_read < NUM_DIRECTORIES:
            for directory in pool.take_scanned():
                num_read += 1
                heads += directory.heads
            if time.monotonic() > give_up_s:
                return (), f"rank {self.rank} has not read what files there are after {SCAN_S:g} s"
            time.sleep(0.001)
        keys = [OffloadKey(head.key) for head in heads]
        order = first_victims_first(keys, [head.parent_digest for head in heads])
        return tuple(keys[place] for place in order), ""


def find_peers(setting: EngineSetting) -> Peers | None:
    """Return the other replicas of an engine's name; None if its memory ends with it."""
    options = setting.options
    if not options.offload.keeps_memory:
        return None
    return Peers(partial(service_address, options.name), setting.replica)


def _open_imports(setting: EngineSetting, host: HostPool) -> Imports | None:
    """Return what copies from other nodes; None without a coordinator."""
    options = setting.options.coordinator
    if options is None:
        return None
    return Imports(host, options.silence_s, setting.options.offload.wait_s)


def _open_host(setting: EngineSetting, rank: int, fingerprint: str, pool: KVCachePool) -> HostPool:
    """Return the rank's host memory; raises as `RankTiers` does."""
    try:
        segment = open_rank_memory(setting, rank, fingerprint, pool)
        return HostPool(segment, is_pinned=pool.device.type == "cuda")
    except NotEnoughMemoryError as error:
        raise NotEnoughMemoryError(
            f"rank {rank} has no room for its host memory: {error}"
        ) from error


def _open_watch(setting: EngineSetting, host: HostPool) -> MemoryWatch | None:
    """Return what has the host memory kept; None if it ends with the engine."""
    options = setting.options
    if not options.offload.keeps_memory:
        return None
    service = service_address(options.name, setting.replica)
    return MemoryWatch(host.segment, service, options.idle_memory_s)


def _open_engine(device: torch.device) -> CopyEngine:
    """Return the copy engine of the workers for `device`.

    vLLM may have left too little device memory for the measurement: then copy units do all copies.
    """
    try:
        return make_copy_engine(device)
    except torch.OutOfMemoryError as error:
        logger.warning("%s copies without a measurement: %s", device, error)
        return CudaCopyEngine(device)


def _open_files(
    setting: EngineSetting, disk: DiskConfig, host: HostPool, rule: ChecksumRule
) -> Tiers:
    """Return the tiers with the rank's directory of files; raises ConfigurationError."""
    location = Location.of(disk.directory)
    block_bytes = host.slot_bytes
    num_files = disk.capacity_per_rank // block_bytes
    if not num_files:
        raise ConfigurationError(
            f"offload.disk.capacity_per_rank is {disk.capacity_per_rank} bytes, a block of this "
            f"model has {block_bytes} on each rank: set it to many times that"
        )
    settings = FileTierSettings(
        location.root,
        setting.options.name,
        below=location.below,
        threads=disk.num_threads,
        max_queued_blocks=MAX_QUEUED_BLOCKS,
        max_shared_files=num_files + num_files // FILES_PER_SPARE_FILE,
        sync=disk.sync,
    )
    shape = host.segment.shape
    tier = FileTier(settings, shape, uuid.uuid4().hex, rule)
    root = location.root / location.below / setting.options.name
    remove_in_background(RankPlace(root, shape.layout_fingerprint, shape.rank, setting.num_ranks))
    pool = FilePool(
        tier.store,
        host.segment.slot_views,
        settings.access.make_lanes(settings.threads),
        max_queued_blocks=settings.max_queued_blocks,
    )
    return Tiers(host, pool, tier)


def _instruction_sets() -> str:
    """Return what the processor can do: vLLM's CPU backend lays keys out by it."""
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.cpu._is_amx_tile_supported()}"
