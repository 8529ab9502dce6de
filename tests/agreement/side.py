"""One core in the agreement suite: its manager, its workers, and all that can be observed.

Applies operations one at a time. Answers and observations are facts: plain values without block
ids, to be compared with those of another core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import KVCacheError
from kvcache.core import CoreSettings
from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.manager import KVCacheManager
from kvcache.manager.pins import Pin
from kvcache.protocol.commands import BlockTablePatch
from kvcache.requests.request import Request
from kvcache.specs import KVCacheConfig, KVCacheGroupSpec
from tests.agreement.configurations import Configuration
from tests.agreement.content import Forward
from tests.agreement.event_stream import EventStream
from tests.agreement.truth import Obeyed, Tables, Truth

Facts = dict[str, object]
Shapes = dict[str, list[list[bool]]]
"""For each running request, per group and column: whether there is a block."""

_OF_CORE = ("num_cached_blocks", "num_sealed_blocks", "num_evictions", "references")


@dataclass(frozen=True)
class Sizes:
    """Numbers of blocks and slots."""

    num_blocks: int
    num_slots: int
    zeroes: bool = False
    watermark: float = 0.0


class Action(Protocol):
    """An operation on a side."""

    def apply(self, side: Side) -> Facts:
        """Apply it and return its answer."""


class Side:
    """A manager with one core, and the workers below it."""

    def __init__(
        self,
        configuration: Configuration,
        core: str,
        sizes: Sizes,
        factories: Mapping[str, CoreFactory],
    ) -> None:
        """Make a manager with an empty cache."""
        specs = configuration.specs
        groups = tuple(KVCacheGroupSpec((f"layer.{i}",), spec) for i, spec in enumerate(specs))
        self.core = core
        self.clock = VirtualClock()

        def make(settings: CoreSettings) -> FlatCore:
            self.made = factories[core](settings)
            return self.made

        self.manager = KVCacheManager(
            KVCacheConfig(sizes.num_blocks, (), groups),
            configuration.max_model_len,
            enable_caching=configuration.enable_caching,
            use_eagle=configuration.use_eagle,
            log_stats=True,
            enable_kv_cache_events=True,
            watermark=sizes.watermark,
            max_num_seqs=sizes.num_slots,
            clock=self.clock,
            zero_new_blocks=sizes.zeroes,
            has_workers=True,
            tenants=configuration.tenants,
            core_factory=make,
        )
        self.truth = Truth(specs, sizes.num_blocks)
        self.stream = EventStream(specs)
        self.requests: dict[str, Request] = {}
        self.pins: dict[str, Pin] = {}
        self.patches: BlockTablePatch | None = None
        self._obeyed = Obeyed()

    def do(self, operation: Action) -> Facts:
        """Apply an operation and its commands; a refused one must change nothing."""
        self.patches = None
        before = self._state() if getattr(operation, "is_mistake", False) else None
        try:
            facts = operation.apply(self)
        except KVCacheError as error:
            facts = {"error": f"{type(error).__name__}: {error}"}
            assert before is None or before == self.manager.dump_state(), "refused, but changed"
        self._obeyed = self.truth.obey(self.manager.take_commands(), self.patches)
        return facts

    def _state(self) -> Facts:
        """The manager's state after expired pins have been dropped."""
        probe = Request("probe", [0], model_epoch=self.manager.model_epoch)
        self.manager.get_computed_blocks(probe)
        return self.manager.dump_state()

    def settle(self, forwards: Sequence[Forward]) -> None:
        """Let the workers run the forwards that the last operation scheduled."""
        self.truth.run(forwards, self.manager.get_block_ids, self.epoch_of, self._obeyed)

    def epoch_of(self, name: str) -> int:
        """Return the model epoch of a known request's content."""
        request = self.manager.get_request(name)
        assert request is not None, f"{name} is not known"
        return request.namespace.model_epoch

    def observe(self, names: Sequence[str]) -> Facts:
        """Return all observations after an operation; `names` are the known requests."""
        manager = self.manager
        statistics = asdict(manager.statistics())
        core = statistics.pop("core")
        stats = manager.make_prefix_cache_stats()
        events = manager.take_events()
        facts: Facts = {
            "free blocks": core.pop("num_free_blocks"),
            "usage": round(manager.usage, 9),
            **{f"core.{name}": core.pop(name) for name in _OF_CORE},
            "core": core,
            "blocks in use when reset": statistics.pop("num_blocks_refusing_reset"),
            "tenants": statistics.pop("tenants"),
            "manager": statistics,
            "prefix statistics": None if stats is None else asdict(stats),
            "events": self.stream.take(events) if events else {},
            "stored": {key for key, count in self.stream.stored.items() if count},
            "labels": self.truth.labels.counts,
            "zeroed blocks": self._obeyed.num_zeroed,
            "copied blocks": self._obeyed.num_copied,
        }
        return facts | self._observe_requests(names)

    def _observe_requests(self, names: Sequence[str]) -> Facts:
        manager = self.manager
        running: dict[str, Tables] = {}
        figures: Facts = {}
        for name in names:
            request, slot = manager.get_request(name), manager.slot_of(name)
            assert request is not None, f"{name} is not known"
            computed, preemptions = request.num_computed_tokens, request.num_preemptions
            figures[name] = (slot, request.num_tokens, computed, preemptions)
            if slot is not None:
                running[name] = manager.get_block_ids(name)
                self.truth.compare_tables(slot, running[name])
        numbers: dict[int, int] = {0: 0}
        common: list[int] = []
        for name in list(running)[:1]:
            request = manager.get_request(name)
            assert request is not None
            common = manager.get_num_common_prefix_blocks(request, len(running))
        return {
            "requests": figures,
            "table shapes": self._shapes(running, of_states=False),
            "state tables": self._shapes(running, of_states=True),
            # Blocks by order of first appearance: equal exactly if the same places are shared.
            "sharing": {
                name: [[numbers.setdefault(block, len(numbers)) for block in ids] for ids in tables]
                for name, tables in running.items()
            },
            "common prefix": common,
        }

    def _shapes(self, running: Mapping[str, Tables], *, of_states: bool) -> Shapes:
        """Return where tables are null, of the groups that keep states or of the others."""
        keeps = [spec.num_state_blocks is not None for spec in self.truth.specs]
        return {
            name: [
                [bool(block) for block in ids]
                for ids, is_of_states in zip(tables, keeps, strict=True)
                if is_of_states == of_states
            ]
            for name, tables in running.items()
        }
