"""vLLM's KV connector interface, on our tiers: `--kv-transfer-config` names this class.

vLLM makes one connector in its scheduler and one in each worker:

    scheduler                                         each rank
    BlockStore: which block is where ──commands──▶ RankTiers: jobs between device, memory, files
               ▲                                        │
               └──────────────reports───────────────────┘

Translates only: decisions are in block_store.py, bytes in rank_tiers.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvcache.events.translation import group_kinds
from kvcache.integrations.vllm.block_contents import BlockContents
from kvcache.integrations.vllm.block_store import BlockStore
from kvcache.integrations.vllm.control import EngineControl
from kvcache.integrations.vllm.engine_events import engine_events, extra_keys_of, has_cleared
from kvcache.integrations.vllm.engine_metrics import TierPromMetrics, TierStats
from kvcache.integrations.vllm.engine_recording import EngineRecordings
from kvcache.integrations.vllm.files_owner import FilesOwner
from kvcache.integrations.vllm.index_finder import find_index
from kvcache.integrations.vllm.kv_groups import NewTable
from kvcache.integrations.vllm.node_events import open_node_publisher, stream_of
from kvcache.integrations.vllm.nodes import Nodes
from kvcache.integrations.vllm.observer_errors import ObserverErrors
from kvcache.integrations.vllm.options import EngineSetting, engine_setting, require_version
from kvcache.integrations.vllm.peers import Peers
from kvcache.integrations.vllm.rank_tiers import RankTiers, find_peers
from kvcache.integrations.vllm.step_messages import Inventory, RankCommands, RankReports
from kvcache.integrations.vllm.tier_events import TierEvents, open_publisher
from kvcache.metrics.engine_socket import EngineSocket
from kvcache.sharing.access import IndexPlace

logger = init_logger("vllm.kvcache")

STATISTICS_S = 1.0
"""How often vLLM's metrics get statistics while steps run."""


class KVCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # untyped bases
    """Keeps blocks that vLLM has computed in host memory and files that outlive the engine.

    A request waits for its own loads while others run on; its blocks are kept until they are
    stored. With `is_asynchronous` false, each step does its own copies.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Check what the engine is; raises ConfigurationError for one that cannot be served."""
        require_version(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        self._setting = engine_setting(vllm_config, kv_cache_config)
        self._rank = int(vllm_config.parallel_config.rank)
        self._memory: RankTiers | None = None
        self._store: BlockStore | None = None
        self._events: TierEvents | None = None
        self._peers: Peers | None = None
        self._nodes: Nodes | None = None
        self._block_pool: Any = None
        self._control: EngineControl | None = None
        self._socket: EngineSocket | None = None
        self._recordings: EngineRecordings | None = None
        self._told_s = 0.0
        self._errors = ObserverErrors()
        if role == KVConnectorRole.SCHEDULER:
            sharing = self._setting.options.coordinator
            index = None if sharing is None else find_index(sharing)
            self._events = _tier_events(self._setting, vllm_config, index)
            self._peers = find_peers(self._setting)
            if index is not None:
                model = _model_name(vllm_config)
                stream = stream_of(self._setting, index, model, self._events)
                self._nodes = Nodes(self._setting, index, stream)
            self._store = BlockStore(
                self._setting, time.monotonic, self._events, self._peers, nodes=self._nodes
            )
            model = str(vllm_config.model_config.model)
            self._recordings = EngineRecordings(self._setting, self._store.params)
            self._control = EngineControl(
                self._setting, model, self._store, self._recordings, self._further
            )
            name, replica = self._setting.options.name, self._setting.replica
            self._socket = EngineSocket(name, replica, self._control.answer)
            self._socket.start()

    # --- in the scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """Say that nothing waits for a store: one that is lost is a miss later."""
        return False

    @property
    def store(self) -> BlockStore:
        """Which block is where, in the scheduler's process."""
        assert self._store is not None, "asked of a worker's connector"
        return self._store

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], Inventory]
    ) -> None:
        """Begin with what the ranks have adopted, by pipeline and tensor rank."""
        count, num_files = self.store.adopt(dict(enumerate(metadata.values())))
        logger.info(
            "kvcache %r: adopted %d blocks and %d files",
            self._setting.options.name,
            count,
            num_files,
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether the request waits for them; None if
        files are read first, or another node is asked."""
        self._step()
        count = self.store.num_matched(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note of a request's blocks."""
        if self._recordings is not None:
            self._recordings.admitted(request)
        self.store.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> RankCommands:
        """Return what the ranks do in this step."""
        self._step()
        return self.store.commands(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.kv_connector_block_state.get_block_ids,
            _new_tables(scheduler_output),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Take note of what the ranks have done."""
        self.store.received(connector_output.finished_recving or ())
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, RankReports):
            self.store.reported(reports)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; say whether its blocks are kept until they are stored."""
        if self._recordings is not None:
            self._recordings.finished(request)
        return self.store.finished(request.request_id), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; say whether its blocks are kept until they are stored."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Say whether ranks must be told something although no request is there."""
        return self._store is not None and self._store.has_unsent_commands

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the device's pool: its events say when every medium was cleared, and overdue loads
        hold its blocks."""
        self._block_pool = gpu_block_pool
        self.store.held_blocks.bind(gpu_block_pool)

    def get_kv_connector_stats(self) -> TierStats | None:
        """Return statistics, not in every step; have events follow the step.

        vLLM asks in each step, just before it takes the events of its own pool: a clear among those
        takes the tiers' blocks from its stream, too.
        """
        if self._events is not None:
            pool = self._block_pool
            is_cleared = pool is not None and has_cleared(pool.kv_event_queue)
            self.store.follow_events(is_cleared=is_cleared)
        now_s = time.monotonic()
        if self._nodes is not None:
            self._nodes.look(now_s)
        if self._control is None or now_s - self._told_s < STATISTICS_S:
            return None
        self._told_s = now_s
        statistics = self._control.statistics_if_any()
        return None if statistics is None else TierStats.of(statistics)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierStats:
        """Return statistics as an object, in vLLM's front end."""
        return TierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierPromMetrics:
        """Return what vLLM's `/metrics` shows of the connector, in its front end."""
        return TierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> list[Any]:
        """Return what the tiers have stored and removed since the last call."""
        try:
            return [] if self._events is None else engine_events(self._events.take())
        except Exception as error:
            self._errors.note("events for vLLM", error)
            return []

    def reset_cache(self) -> bool:
        """Forget every block."""
        options = self._setting.options
        if options.offload.disk is not None and not options.adopt_after_reset:
            FilesOwner(self._setting, options.offload.disk).open()
        self.store.reset()
        return True

    def _step(self) -> None:
        """Do what an operator has asked for."""
        assert self._control is not None
        self._control.step()

    def _further(self) -> dict[str, Any]:
        """Return statistics of what watches the tiers."""
        events = self._events
        return {
            "events": None if events is None else events.statistics(),
            "nodes": None if self._nodes is None else self._nodes.statistics(),
        }

    # --- in a worker

    @property
    def memory(self) -> RankTiers:
        """The rank's host memory, in its worker's process, once tensors are registered."""
        assert self._memory is not None, "asked before register_kv_caches"
        return self._memory

    @property
    def _commands(self) -> RankCommands:
        commands = self._get_connector_metadata()
        assert isinstance(commands, RankCommands)
        return commands

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Attach to the rank's host memory, or make it."""
        layers = self._vllm_config.compilation_config.static_forward_context
        backends = sorted({layers[name].get_attn_backend().get_name() for name in kv_caches})
        self._memory = RankTiers(self._setting, self._rank, kv_caches, backends=",".join(backends))
        logger.info("kvcache rank %d: host memory is %s", self._rank, self._memory.origin)

    def get_handshake_metadata(self) -> Inventory:
        """Return what the rank has adopted."""
        return self.memory.inventory()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Wait for stores that read blocks which others are going to use."""
        self.memory.await_stores(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin loads; what the step itself reads is there when this returns."""
        self.memory.obey(self._commands)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: what the step reads is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Return at once: blocks are stored behind the forward."""

    def wait_for_save(self) -> None:
        """Begin to store what the step has filled."""
        self.memory.store(self._commands)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose blocks are stored, those that wait for no load any more, and
        those of them that vLLM has to compute from their start."""
        released, received = self.memory.take_finished()
        return KVConnectorTransferResults(released, received, self.memory.take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that vLLM has to compute again."""
        return self.memory.take_invalid_blocks()

    def build_connector_worker_meta(self) -> RankReports | None:
        """Return what the rank has done."""
        return self.memory.take_reports()

    def shutdown(self) -> None:
        """Give memory and files back; the memory service has the memory still."""
        for part in (
            self._peers,
            self._nodes,
            self._memory,
            self._socket,
            self._events,
            self._recordings,
        ):
            if part is not None:
                part.close()


def _tier_events(
    setting: EngineSetting, vllm_config: Any, index: IndexPlace | None
) -> TierEvents | None:
    """Return what follows the tiers; None unless vLLM or the options ask for events. `index`: of
    the coordinator, if there is one.

    Raises ConfigurationError or ClusterError if the publisher cannot start.
    """
    stream, options = vllm_config.kv_events_config, setting.options
    for_engine = stream is not None and stream.enable_kv_cache_events
    sharing = options.coordinator
    for_nodes = index if sharing is not None and sharing.events else None
    if not for_engine and not options.events.enabled and for_nodes is None:
        return None
    sender, kinds = None, group_kinds(setting.groups.plan.kv_cache_groups)
    if for_nodes is not None:
        sender = open_node_publisher(setting, for_nodes, _model_name(vllm_config), kinds)
    elif options.events.enabled:
        topic = f"kv@{options.name}@{_model_name(vllm_config)}"
        sender = open_publisher(options.events, topic, kinds, setting.replica)
    contents = BlockContents([spec.block_size for spec in setting.groups.specs], extra_keys_of)
    return TierEvents(contents, for_engine=for_engine, sender=sender)


def _model_name(vllm_config: Any) -> str:
    return str(vllm_config.model_config.served_model_name)


def _new_tables(scheduler_output: Any) -> Iterator[NewTable]:
    """Return the blocks that requests have got for this step."""
    for request in scheduler_output.scheduled_new_reqs:
        yield NewTable(request.req_id, request.block_ids, is_whole=True)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, tables in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if tables is not None:
            is_whole = request_id in cached.resumed_req_ids
            yield NewTable(request_id, tables, is_whole=is_whole)
