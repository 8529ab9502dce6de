"""A whole cluster in one process, one thread and virtual time, with faults from a seed.

Real coordinator, manager, workers (content checking on tiny tensors) and client sessions talk
through a network that loses, repeats, delays, reorders and truncates messages. `simulate(seed)`
plays one schedule to its end and raises if a byte is wrong, something does not end, or state is
inconsistent. Files are real, in a directory of the schedule's own.
"""

from __future__ import annotations

import math
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from kvcache.base.clock import Clock, VirtualClock
from kvcache.base.errors import MalformedMessageError
from kvcache.client.session import ClientSession, SessionSettings, SessionState
from kvcache.coordinator import Coordinator, Phase
from kvcache.coordinator.parts import CoordinatorParts, OffloadParts
from kvcache.coordinator.settings import (
    AuditSettings,
    CoordinatorSettings,
    OffloadSettings,
    SwapRule,
    SwapWhen,
)
from kvcache.coordinator.step_recorder import StepRecorder
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.memory_service import HostMemoryService, MemoryServiceAddress
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.jobs import Deadlines
from kvcache.offload.options import HierarchyOptions, TierOptions
from kvcache.offload.registry import make_tier
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import WriteExpected
from kvcache.protocol.messages import (
    ClientAddress,
    Finished,
    FromClient,
    FromWorker,
    Message,
    Outgoing,
    StepCommands,
    WorkerAddress,
)
from kvcache.protocol.state_store import MemoryStateStore
from kvcache.protocol.wire import decode, encode
from kvcache.recorder import FileStepRecorder, ManagerConfig
from kvcache.specs import KVCacheConfig
from kvcache.worker import CopyEngine, KVCacheWorker, WorkerSettings
from kvcache.worker.files.tier import FileTierSettings
from tests.protocol.engine import Engine, Sequence, WeightChanger
from tests.protocol.network import FaultyNetwork, NetworkFaults
from tests.protocol.scenario import (
    MAX_ENCODER_TOKENS,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MODELS,
    Scenario,
    config_of,
)
from tests.protocol.virtual_disk import VirtualDisk
from tests.worker.delayed_engine import DelayedEngine

COORDINATOR = "coordinator"
TICK_S = 0.02
MAX_VIRTUAL_S = 120.0
ADOPTION_S = 5.0
MAX_SET_ASIDE = 4

FROM_CLIENT = get_args(FromClient)
FROM_WORKER = get_args(FromWorker)


class Cluster:
    """All parties of one schedule and the network between them."""

    def __init__(self, scenario: Scenario, directory: Path | None = None) -> None:
        """`directory` is for files, if the scenario has any."""
        self.scenario = scenario
        self.clock = VirtualClock()
        self.random = random.Random(scenario.seed * 7919 + 1)
        self.network = FaultyNetwork(self.clock, self.random, scenario.faults)
        self.config = config_of(
            scenario.model, scenario.num_blocks, scenario.num_host_blocks, scenario.num_disk_blocks
        )
        self.are_copies_failing = bool(scenario.disk_fail_share or scenario.disk_stall_share)
        self.num_fetched_tokens = self.num_swapped_in = 0
        self.num_loaded_tokens = 0
        self.num_adopted_blocks = 0
        self._max_unacknowledged = self.random.choice((2, 4, 64))
        self._store = MemoryStateStore()
        self.num_coordinators = 0
        self._audit_mode = ("on", "sample")[scenario.seed % 2]
        self.num_kept_blocks = 0
        self.coordinator = self._make_coordinator()
        self.superseded: list[Coordinator] = []
        self.num_processes = 0
        self.workers: dict[int, KVCacheWorker] = {}
        self.lost_workers: list[KVCacheWorker] = []
        self.num_short_ways: Counter[str] = Counter()
        self.disks: dict[int, VirtualDisk] = {}
        if directory is not None and scenario.num_disk_blocks:
            self.disks = {
                rank: VirtualDisk(
                    directory / f"tier/layout/rank{rank}",
                    self.clock,
                    random.Random(scenario.seed * 6271 + rank),
                    scenario.disk_fail_share,
                    stall_share=scenario.disk_stall_share,
                )
                for rank in range(scenario.num_ranks)
            }
        self._directory = directory
        self._service: MemoryServiceAddress | None = None
        self.resources = ExitStack()
        if scenario.keeps_memory:
            self._service = self._keep_memory()
        for rank in range(scenario.num_ranks):
            self._start_worker(rank)
        num_engines = scenario.num_clients + scenario.num_visitors
        self.engines: dict[str, Engine | WeightChanger] = {
            f"engine-{i}": self._make_engine(i) for i in range(num_engines)
        }
        self._add_weight_changer()
        going = random.Random(scenario.seed * 15487469 + 5)
        self._hang_ups_s = sorted(going.uniform(0.05, 1.5) for _ in range(scenario.num_hang_ups))
        self._departures_s = {
            f"engine-{i}": going.uniform(0.05, 0.8)
            for i in range(scenario.num_clients, num_engines)
        }
        self._going = going
        self._away: dict[str, float] = {}
        self.num_killed = self.num_departed = 0
        losses = [self.random.uniform(0.05, 1.5) for _ in range(scenario.num_worker_losses)]
        self._losses_s = sorted(losses)
        chance = random.Random(scenario.seed * 104729 + 3)
        restarts = [chance.uniform(0.05, 1.5) for _ in range(scenario.num_restarts)]
        self._restarts_s = sorted(restarts)
        self._restart_chance = chance
        self._sleepy: dict[int, float] = {}
        self._epochs_begun: set[int] = set()
        self._ended_jobs: set[tuple[int, int, int]] = set()
        self._jobs: dict[tuple[int, str], dict[int, tuple[int, int]]] = {}
        self._checked: dict[str, tuple[int, int]] = {}

    def play(self) -> None:
        """Run until every engine is done and has all answers; then check the state."""
        self._send_all(self.coordinator.start())
        for name, engine in self.engines.items():
            self._send(name, COORDINATOR, engine.session.attach())
        next_tick_s = 0.0
        while not all(engine.is_done for engine in self.engines.values()):
            if self.clock.now() > MAX_VIRTUAL_S:
                raise AssertionError(f"not over after {MAX_VIRTUAL_S} s: {self._describe()}")
            for delivery in self.network.arrivals():
                self._deliver(delivery.sender, delivery.receiver, delivery.payload)
            if self.clock.now() >= next_tick_s:
                next_tick_s = self.clock.now() + TICK_S
                self._tick()
            arrival_s = self.network.next_arrival_s()
            wake_s = next_tick_s if arrival_s is None else min(next_tick_s, arrival_s)
            self.clock.advance(max(0.0, wake_s - self.clock.now()))
        self._finish()
        if self.disks:
            self._check_files()

    def close(self) -> None:
        """Release resources that the process would keep."""
        for disk in self.disks.values():
            disk.kill()
        self.resources.close()

    def _keep_memory(self) -> MemoryServiceAddress:
        """Start a node's memory service."""
        address = f"unix:@kvcache-test-{secrets.token_hex(8)}"
        service = HostMemoryService(address, max_segments=8, max_bytes=2**26)
        self.resources.callback(service.close)
        service.serve()
        return MemoryServiceAddress(address, "simulated")

    def _tick(self) -> None:
        if self._losses_s and self.clock.now() >= self._losses_s[0]:
            self._losses_s.pop(0)
            self._lose_worker(self.random.randrange(self.scenario.num_ranks))
        if self._restarts_s and self.clock.now() >= self._restarts_s[0]:
            self._restarts_s.pop(0)
            self._restart()
        self._let_clients_go()
        for coordinator in (*self.superseded, self.coordinator):
            self._send_all(coordinator.on_tick())
        for rank, worker in self.workers.items():
            if rank in self.disks:
                self.disks[rank].run_due()
            self._run_forwards(rank, worker)
            self._send(self._name(worker), COORDINATOR, worker.on_tick())
        for name, engine in self.engines.items():
            if not self._is_away(name):
                self._turn(name, engine)
                self._send(name, COORDINATOR, engine.session.on_tick())

    def _let_clients_go(self) -> None:
        """Let clients leave when it is time, and end connections of others."""
        now_s = self.clock.now()
        for name in [name for name, at_s in self._departures_s.items() if now_s >= at_s]:
            del self._departures_s[name]
            engine = self.engines[name]
            if engine.is_done:
                continue
            engine.is_done = True
            if self._going.random() < 0.5:
                self.num_departed += 1
                self._send(name, COORDINATOR, engine.session.detach())
            else:
                self.num_killed += 1
                self._hang_up(name, math.inf)
        while self._hang_ups_s and now_s >= self._hang_ups_s[0]:
            self._hang_ups_s.pop(0)
            there = [name for name in self.engines if not self._is_away(name)]
            if there:
                away_s = self._going.choice((0.0, 0.3, 2.5))
                self._hang_up(self._going.choice(there), now_s + away_s)

    def _hang_up(self, name: str, until_s: float) -> None:
        """End a client's connection; it has no new one before `until_s`."""
        self._away[name] = until_s
        self.network.hang_up(name)
        self.coordinator.on_client_lost(name)

    def _is_away(self, name: str) -> bool:
        return self.clock.now() < self._away.get(name, 0.0)

    def _are_departed_forgotten(self) -> bool:
        """Whether the coordinator has forgotten the clients that left or were killed, and every
        rank has applied the consequences."""
        departed = [
            name
            for name, engine in self.engines.items()
            if engine.session.state in (SessionState.DETACHING, SessionState.CLOSED)
            or self._is_away(name)
        ]
        if any(self.coordinator._clients.get(name) is not None for name in departed):
            return False
        return not (departed and self.coordinator.statistics().num_unacknowledged)

    def _deliver(self, sender: Hashable, receiver: Hashable, payload: bytes) -> None:
        if self._is_taken_undecoded(sender, receiver, payload):
            return
        try:
            message = decode(payload)
        except MalformedMessageError as error:
            self._on_unreadable(sender, receiver, payload, str(error))
            return
        if receiver == COORDINATOR:
            if isinstance(message, FROM_CLIENT):
                self._send_all(self.coordinator.on_client_message(message))
            elif isinstance(message, FROM_WORKER) and isinstance(sender, tuple):
                self._send_all(self.coordinator.on_worker_message(sender[0], message))
        elif isinstance(receiver, tuple):
            worker = self.workers[receiver[0]]
            if self._name(worker) == receiver:
                self._send(receiver, COORDINATOR, worker.on_message(message))
                if self.random.random() < 0.7:
                    self._run_forwards(receiver[0], worker)
        elif not self._is_away(str(receiver)):
            engine = self.engines[str(receiver)]
            self._send(receiver, COORDINATOR, engine.session.on_message(message))
            self._turn(str(receiver), engine)

    def _on_unreadable(
        self, sender: Hashable, receiver: Hashable, payload: bytes, reason: str
    ) -> None:
        """Pass an undecodable payload to its receiver, as the actors do."""
        if receiver == COORDINATOR:
            is_worker = isinstance(sender, tuple)
            address = WorkerAddress(sender[0]) if is_worker else ClientAddress(str(sender))
            self._send_all(self.coordinator.on_unreadable(address, payload, reason))
        elif isinstance(receiver, tuple):
            worker = self.workers[receiver[0]]
            if self._name(worker) == receiver:
                self._send(receiver, COORDINATOR, worker.on_unreadable(payload, reason))
        else:
            session = self.engines[str(receiver)].session
            self._send(receiver, COORDINATOR, session.on_unreadable(payload, reason))

    def _is_taken_undecoded(self, sender: Hashable, receiver: Hashable, payload: bytes) -> bool:
        """Try the fast decoder of a payload's receiver, as the actors do."""
        if receiver == COORDINATOR and isinstance(sender, tuple):
            is_taken = self.coordinator.on_plain_applied(sender[0], payload)
            if is_taken:
                self.num_short_ways["coordinator"] += 1
                self._send_all(self.coordinator.settle())
            return is_taken
        if isinstance(receiver, tuple) and self._name(self.workers[receiver[0]]) == receiver:
            num_taken, answer = self.workers[receiver[0]].on_plain_steps((payload,))
            if num_taken:
                self.num_short_ways["worker"] += 1
                self.network.send(receiver, COORDINATOR, answer)
            return bool(num_taken)
        return False

    def _run_forwards(self, rank: int, worker: KVCacheWorker) -> None:
        """Run due work, unless this rank is slow now."""
        now_s = self.clock.now()
        if now_s < self._sleepy.get(rank, 0.0):
            return
        if self.random.random() < 0.02:
            self._sleepy[rank] = now_s + self.random.uniform(0.0, 0.3)
        messages = worker.run_due_forwards()
        for message in messages:
            if isinstance(message, Finished):
                self._ended_jobs |= {(message.epoch, rank, job.job_id) for job in message.jobs}
        self._send(self._name(worker), COORDINATOR, messages)

    def _send_all(self, outgoing: Iterable[Outgoing]) -> None:
        for item in outgoing:
            if isinstance(item.message, StepCommands):
                if item.message.seq == 1 and item.message.epoch not in self._epochs_begun:
                    self._epochs_begun.add(item.message.epoch)
                    self.num_kept_blocks += self.coordinator.statistics().num_kept_blocks
                self._note_commands(item.message)
            for address in item.to:
                if isinstance(address, WorkerAddress):
                    receiver: Hashable = self._name(self.workers[address.rank])
                else:
                    assert isinstance(address, ClientAddress)
                    receiver = address.client_id
                self.network.send(COORDINATOR, receiver, self._encoded(item.message, receiver))

    def _send(self, sender: Hashable, receiver: Hashable, messages: Iterable[Message]) -> None:
        for message in messages:
            self.network.send(sender, receiver, self._encoded(message, receiver))

    def _encoded(self, message: Message, receiver: Hashable) -> bytes:
        """Return the bytes of a message to one peer."""
        return encode(message)

    def _note_commands(self, message: StepCommands) -> None:
        """Remember which job, in which message, is a step's forward."""
        steps = self._jobs.setdefault((message.epoch, message.client_id), {})
        jobs = [c.job_id for c in message.commands if isinstance(c, WriteExpected)]
        steps[message.client_step] = (message.seq, jobs[0] if jobs else 0)

    def _turn(self, name: str, engine: Engine | WeightChanger) -> None:
        """Check that progress sent to the client is true of every rank, before the client acts."""
        session = engine.session
        epoch, steps = session.epoch, self._jobs.get((session.epoch, name), {})
        is_same_epoch, last = self._checked.get(name, (0, 0))
        first = last + 1 if is_same_epoch == epoch else min(steps, default=1)
        first = max(first, session._void_step + 1)
        for step in range(first, session.finished_step + 1):
            seq, job_id = steps.get(step, (0, 0))
            for rank, worker in self.workers.items():
                if worker.epoch != epoch:
                    continue
                assert worker.applied_seq >= seq, f"step {step} is not applied on rank {rank}"
                is_over = not job_id or (epoch, rank, job_id) in self._ended_jobs
                assert is_over, f"the forward of step {step} is not over on rank {rank}"
        self._checked[name] = (epoch, max(session.finished_step, first - 1))
        self._send(name, COORDINATOR, engine.turn())

    def _restart(self) -> None:
        """Replace the coordinator; the old one may live on without receiving messages.

        Messages in flight to the old one arrive at the new one. The state may be lost, with or
        without all workers.
        """
        chance = self._restart_chance
        if chance.random() < 0.5:
            self.superseded.append(self.coordinator)
        is_total_loss = chance.random() < 0.2
        if is_total_loss or chance.random() < 0.3:
            self._store = MemoryStateStore()
            # A coordinator that hears no peer, not even the store, would be obeyed forever by a
            # rank's new process: nothing shows which of two is newer.
            self.superseded.clear()
        if is_total_loss:
            self.superseded.clear()
            self._jobs.clear()
            self._ended_jobs.clear()
            for rank in self.workers:
                self._lose_worker(rank)
        self.coordinator = self._make_coordinator()
        known = {r: w.settings.incarnation for r, w in self.workers.items()}
        self._send_all(self.coordinator.start(known if chance.random() < 0.5 else None))
        for worker in self.workers.values():
            worker.introduce()

    def _lose_worker(self, rank: int) -> None:
        """Kill the process of a rank; another one replaces it."""
        self.network.forget(self._name(self.workers[rank]))
        self.lost_workers.append(self.workers[rank])
        if rank in self.disks:
            self.disks[rank].kill()
        self._start_worker(rank)

    def _start_worker(self, rank: int) -> None:
        self.num_processes += 1
        self.workers[rank] = KVCacheWorker(
            WorkerSettings(
                rank=rank,
                kv_cache_config=self.config,
                fingerprint="plan",
                layout_fingerprint="layout",
                incarnation=f"process-{self.num_processes}",
                max_num_seqs=MAX_NUM_SEQS,
                max_model_len=MAX_MODEL_LEN,
                is_content_checking=self.scenario.is_content_checking,
                hello_interval_s=0.1,
                repeat_interval_s=0.1,
                heartbeat_interval_s=0.5,
                memory_service=self._service,
                file_tier=self._file_tier(rank),
            ),
            clock=self.clock,
            copy_engine=self._make_copy_engine(),
        )

    def _make_copy_engine(self) -> CopyEngine | None:
        if not self.scenario.has_slow_copies:
            return None
        return DelayedEngine(self.scenario.seed + self.num_processes)

    def _file_tier(self, rank: int) -> FileTierSettings | None:
        if self._directory is None or rank not in self.disks:
            return None
        return FileTierSettings(
            self._directory,
            "tier",
            threads=1 + self.scenario.seed % 3,
            max_set_aside=MAX_SET_ASIDE,
            access=self.disks[rank].access,
        )

    @staticmethod
    def _name(worker: KVCacheWorker) -> tuple[int, str]:
        return worker.settings.rank, worker.settings.incarnation

    def _make_coordinator(self) -> Coordinator:
        self.num_coordinators += 1
        recorder = self._make_recorder()
        clock: Clock = self.clock if recorder is None else recorder.clock
        settings = CoordinatorSettings(
            self.scenario.num_ranks,
            "plan",
            is_content_checking=self.scenario.is_content_checking,
            max_unacknowledged=self._max_unacknowledged,
            max_client_steps=8,
            resend_s=0.1,
            heartbeat_s=0.5,
            audit=AuditSettings(self._audit_mode, interval_s=0.1),
        )
        parts = CoordinatorParts(
            lambda model_epoch: self.manager_config.make(clock, model_epoch),
            self.clock,
            self._store,
            recorder or StepRecorder(),
            offload=self._offload_parts(),
        )
        return Coordinator(settings, parts, f"nonce-{self.num_coordinators}")

    def _make_recorder(self) -> FileStepRecorder | None:
        """Return the recorder of the next coordinator, if any."""
        return None

    def _offload_parts(self) -> OffloadParts | None:
        scenario, config = self.scenario, self.config
        if not scenario.num_host_blocks:
            return None
        sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        num_slots = scenario.num_host_blocks // scenario.blocks_per_slot
        host = TierOptions(
            HOST_MEDIUM, num_slots, scenario.blocks_per_slot, store_after=scenario.store_after
        )
        disk = TierOptions(FILE_MEDIUM, scenario.num_disk_blocks)
        options = HierarchyOptions(
            "on_store" if scenario.writes_through else "on_evict",
            spare_share=0.25,
            deadlines=Deadlines(spill_s=1.0, fetch_s=1.0),
        )

        def make_tiers(new_job_id: Callable[[], int]) -> TierHierarchy:
            below = make_tier(disk) if self.disks else None
            return TierHierarchy(make_tier(host), below, new_job_id, options)

        return OffloadParts(
            OffloadSettings(
                hold_s=0.5,
                wait_s=5.0,
                adoption_s=ADOPTION_S,
                swap=SwapRule(SwapWhen.ALWAYS, hold_s=20.0),
            ),
            TierHitFinder(config, math.gcd(*sizes), use_eagle=self._uses_eagle),
            make_tiers,
        )

    @property
    def _uses_eagle(self) -> bool:
        return self.scenario.seed % 3 == 0 and supports_eagle(self.config)

    @property
    def manager_config(self) -> ManagerConfig:
        """The arguments of every manager."""
        return ManagerConfig(
            self.config,
            MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            use_eagle=self._uses_eagle,
        )

    def _make_engine(self, index: int) -> Engine:
        rng = random.Random(self.scenario.seed * 31 + index)
        shared = [rng.randint(0, 50) for _ in range(16)]
        specs = MODELS[self.scenario.model]
        has_encoder = any(spec.keeps_encoder_tokens for spec in specs)
        chance = random.Random(self.scenario.seed * 37 + index)
        sequences = []
        for i in range(self.scenario.num_requests):
            prompt = shared[: rng.choice((0, 8, 16))] + [
                rng.randint(0, 50) for _ in range(rng.randint(1, 12))
            ]
            target = len(prompt) + rng.randint(1, 6)
            salt = rng.choice((None, None, "salt"))
            num_encoder = chance.randint(0, MAX_ENCODER_TOKENS) if has_encoder else 0
            num_external = chance.randrange(len(prompt)) if chance.random() < 0.2 else 0
            name = f"engine-{index}/r{i}"
            sequences.append(Sequence(name, prompt, target, salt, num_encoder, num_external))
        return Engine(
            self._make_session(f"engine-{index}"),
            rng,
            sequences,
            fail_share=self.scenario.fail_share,
            depth=rng.randint(1, 3),
            num_lookahead=chance.choice((0, 0, 1, 5)),
            swap_share=self.scenario.swap_share,
            keeps_states=any(spec.num_state_blocks is not None for spec in specs),
        )

    def _add_weight_changer(self) -> None:
        if self.scenario.num_weight_changes:
            changes = random.Random(self.scenario.seed * 198491317 + 29)
            session = self._make_session("weights")
            self.engines["weights"] = WeightChanger(
                session, changes, self.scenario.num_weight_changes
            )

    def _make_session(self, name: str) -> ClientSession:
        settings = SessionSettings(window=4, resend_s=0.1, heartbeat_s=0.5, step_s=60, forward_s=60)
        return ClientSession(name, settings, self.clock)

    def _finish(self) -> None:
        """Check that no byte is wrong, nothing is left, and the state is consistent."""
        self._losses_s.clear()
        self._restarts_s.clear()
        self._hang_ups_s.clear()
        self.network.faults = NetworkFaults()
        for _ in range(600):
            is_running = self.coordinator.phase is Phase.RUNNING
            if is_running and not self._num_loads() and self._are_departed_forgotten():
                break
            self._step_on()
        assert self.coordinator.phase is Phase.RUNNING, self._describe()
        assert self._are_departed_forgotten(), self._describe()
        self._check_state()
        attached = set(self.engines)
        # Write-through continues without steps, and a disk that hangs takes its time.
        for _ in range(600 if self.scenario.num_disk_blocks else 60):
            for name in [name for name in self.engines if name in attached]:
                if not self._is_away(name):
                    self._send(name, COORDINATOR, self.engines[name].session.detach())
                    attached.remove(name)
            if self._is_quiet():
                break
            self._step_on()
        self._check_state()
        statistics = self.coordinator.statistics()
        if statistics.offload is not None:
            self.num_loaded_tokens += statistics.offload.num_loaded_tokens
            self.num_swapped_in += statistics.offload.num_swapped_in
            self.num_fetched_tokens += statistics.offload.num_fetched_tokens
            self.num_adopted_blocks += statistics.offload.num_adopted_blocks
            if not self.are_copies_failing:
                assert statistics.offload.num_failed_jobs == 0, statistics.offload
        assert statistics.num_clients == 0, statistics
        for name, engine in self.engines.items():
            assert name in attached or engine.session.state is SessionState.CLOSED, name
        num_audits = self._audit_mode == "sample"  # one is in flight
        assert statistics.num_open_jobs <= num_audits, statistics
        assert statistics.num_unacknowledged <= num_audits, statistics
        assert statistics.num_wrong_blocks == 0, statistics

    def _num_loads(self) -> int:
        """Loads that still hold blocks, and unfinished jobs of tiers."""
        manager = self.coordinator.manager
        num_jobs = 0 if self._tiers is None else len(self._tiers.transfers)
        return num_jobs if manager is None else num_jobs + len(manager.tiers.loads)

    @property
    def _tiers(self) -> TierHierarchy | None:
        """The tiers of the present epoch."""
        epoch_state = self.coordinator._epoch_state
        offloading = None if epoch_state is None else epoch_state._offloading
        return None if offloading is None else offloading.tiers

    def _is_quiet(self) -> bool:
        statistics = self.coordinator.statistics()
        is_over = not (
            statistics.num_clients or statistics.num_unacknowledged or statistics.num_open_jobs
        )
        return is_over and not len(self.network)

    def _is_idle(self) -> bool:
        """Whether only audits, which never end, are in progress."""
        statistics = self.coordinator.statistics()
        num_audits = self._audit_mode == "sample"
        return max(statistics.num_unacknowledged, statistics.num_open_jobs) <= num_audits

    def _step_on(self) -> None:
        self.clock.advance(TICK_S)
        for delivery in self.network.arrivals():
            self._deliver(delivery.sender, delivery.receiver, delivery.payload)
        self._tick()

    def _check_state(self) -> None:
        self.coordinator.check()
        for engine in self.engines.values():
            assert engine.session.failures == (), engine.session.failures
        for worker in (*self.workers.values(), *self.lost_workers):
            if self._service is None or worker not in self.lost_workers:
                worker.check()  # kept memory belongs to another process now
            counts = worker.statistics()
            has_fenced = self.num_departed or self.num_killed  # their forwards are refused
            if not (self.are_copies_failing or has_fenced):
                assert counts.num_failed_jobs == 0, counts
            assert counts.num_invalid_messages == 0, counts.last_invalid_reason
        manager = self.coordinator.manager
        statistics = manager.statistics()
        assert statistics.num_running_requests == statistics.num_preempted_requests == 0
        core = statistics.core
        assert core.num_free_blocks == core.num_blocks == self.scenario.num_blocks - 1, core
        for worker in self.workers.values():
            # An epoch that has only just begun may not have reset every rank yet.
            if worker.epoch == self.coordinator.epoch and worker.applied_seq > 0:
                assert len(worker.labels) == core.num_sealed_blocks, (len(worker.labels), core)
        is_undisturbed = not (self.lost_workers or self.num_coordinators > 1)
        if self.scenario.is_content_checking and is_undisturbed:
            all_workers = (*self.workers.values(), *self.lost_workers)
            assert sum(w.statistics().num_bytes_compared for w in all_workers) > 0

    def _check_files(self) -> None:
        """Check that every file belongs to a known block and is good, and that there are no others.

        After disk faults, that holds once the disk works and another coordinator has read it.
        """
        for disk in self.disks.values():
            disk.cure()
        self._settle()
        if not self.are_copies_failing:
            self._compare_files()
        self.coordinator = self._make_coordinator()
        self._send_all(self.coordinator.start())
        for worker in self.workers.values():
            worker.introduce()
        self._settle()
        self._compare_files()

    def _settle(self) -> None:
        """Continue until nothing is left to do."""
        num_quiet = 0
        for _ in range(600):
            is_over = self.coordinator.phase is Phase.RUNNING and self._tiers is not None
            is_over = is_over and self._is_idle() and not self._are_tiers_busy()
            num_quiet = num_quiet + 1 if is_over else 0
            if num_quiet > 10:  # the last job may not have been an audit
                return
            self._step_on()
        raise AssertionError(f"it is not quiet: {self._describe()}")

    def _are_tiers_busy(self) -> bool:
        epoch_state, tiers = self.coordinator._epoch_state, self._tiers
        assert tiers is not None
        is_adopting = epoch_state._offloading._adoption is not None
        num_waiting = sum(disk.num_waiting for disk in self.disks.values())
        return bool(
            is_adopting or num_waiting or len(tiers.transfers) or epoch_state._offloading.has_work
        )

    def _compare_files(self) -> None:
        tiers = self._tiers
        expected = set(tiers.disk.slots.present_keys())
        for rank, disk in self.disks.items():
            pool = self.workers[rank]._executor.tiers.files
            assert pool is not None
            found = disk.keys()
            assert found == expected, (rank, len(found), len(expected))
            assert disk.unfinished() == []
            assert disk.files[-1].open_descriptors == set()
            assert pool.store.statistics().used_bytes == disk.num_bytes()
            num_aside = len(list(disk.directory.glob("set-aside/*")))
            assert num_aside <= MAX_SET_ASIDE

    def _describe(self) -> str:
        sessions = [
            (e.session.state, e.session.reason, e.session.next_step, e.session.finished_step)
            for e in self.engines.values()
        ]
        states = [[s.state for s in e.sequences] for e in self.engines.values()]
        return f"{self.coordinator.statistics()} {sessions} {states}"


def simulate(scenario: Scenario) -> Cluster:
    """Play one schedule to its end; raises AssertionError with the seed if anything is wrong."""
    with tempfile.TemporaryDirectory(prefix="kvc-simulated-") as directory:
        cluster = Cluster(scenario, Path(directory))
        try:
            cluster.play()
        except Exception as error:
            raise AssertionError(f"seed {scenario.seed}: {error} ({scenario})") from error
        finally:
            cluster.close()
    return cluster


def any_is_red(scenarios: Iterable[Scenario]) -> bool:
    """Return whether some schedule fails."""
    for scenario in scenarios:
        try:
            simulate(scenario)
        except AssertionError:
            return True
    return False


def supports_eagle(config: KVCacheConfig) -> bool:
    """Return whether hits are valid without their last block for every kind of the model."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return all(spec.supports_eagle for spec in specs)
