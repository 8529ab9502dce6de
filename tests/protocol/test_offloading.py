"""The tiers' coordination under unusual orders of events."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError
from kvcache.config.tenants import TenantsConfig
from kvcache.coordinator import prefix_loading
from kvcache.coordinator.job_table import Job, JobTable
from kvcache.coordinator.label_collection import LabelQuestion
from kvcache.coordinator.offloading import Offloading
from kvcache.coordinator.parts import OffloadParts
from kvcache.coordinator.settings import OffloadSettings
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.core import OffloadAnswer
from kvcache.manager.step_plan import make_request
from kvcache.offload.contents import LabelShape
from kvcache.offload.hierarchy import Place, PlaceArray, TierHierarchy
from kvcache.offload.keys import OffloadKey, label_keys
from kvcache.offload.options import TierOptions
from kvcache.offload.registry import make_tier
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import Discard, Label, Load, Reset, Spill, Store
from kvcache.protocol.label_agreement import NO_LABELS
from kvcache.protocol.labels import LABEL_VERSION, join_labels, label_rows
from kvcache.protocol.messages import FailedForward, LabelReport
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import Request
from kvcache.requests.request_content import DEFAULT_NAMESPACE, Namespace, namespace_name
from tests.manager.managers_under_test import (
    ENCODER,
    FULL,
    ONE_STATE,
    Shape,
    make_config,
    make_manager,
)
from tests.offload.label_chains import chain_label

TOKENS = list(range(100, 113))


class Bench:
    """A manager, a host tier, and their connection."""

    def __init__(
        self,
        num_requests: int = 8,
        tenants: TenantsConfig | None = None,
        *,
        has_files: bool = False,
    ) -> None:
        self.clock = VirtualClock()
        num_blocks = 8 * num_requests
        self.manager = make_manager(FULL, num_blocks, max_num_seqs=num_requests, tenants=tenants)
        config = make_config(FULL, num_blocks)
        shape = LabelShape(32, 4)
        host = TierOptions(HOST_MEDIUM, 2 * num_requests, labels=shape, tenants=tenants)
        disk = TierOptions(FILE_MEDIUM, 64, labels=shape, tenants=tenants)
        parts = OffloadParts(
            OffloadSettings(adoption_s=5.0),
            TierHitFinder(config, 4),
            lambda new_job_id: TierHierarchy(
                make_tier(host), make_tier(disk) if has_files else None, new_job_id
            ),
        )
        self.offloading = Offloading(parts, self.manager, JobTable(1), self.clock)

    def computed(self, tokens: Sequence[int] = TOKENS) -> list[Label]:
        """Compute a prompt by a call, and return the result."""
        request = Request("r", tokens)
        self.manager.allocate_slots(request, len(tokens))
        commands = self.manager.take_commands()
        self.manager.free(request)
        return [command for command in commands if isinstance(command, Label)]

    def look_up(self) -> OffloadAnswer:
        request = Request("again", TOKENS)
        self.manager.get_computed_blocks(request)  # it has a hasher now
        return self.offloading.look_up(request, 0).answer

    def discarded_files(self) -> int:
        """Number of keys whose files ranks must remove."""
        told = self.offloading.commands([])
        return sum(len(c.keys) for c in told if isinstance(c, Discard)) // 36

    def report(
        self,
        labels: Label,
        medium: str = HOST_MEDIUM,
        model_epoch: int = 0,
        generations: Sequence[int] | None = None,
    ) -> LabelReport:
        slots = np.arange(len(labels.block_ids), dtype=np.int32)
        held = Label(
            slots,
            labels.groups,
            labels.slots,
            labels.digests,
            labels.parent_digests,
            labels.token_counts,
            labels.token_ids,
            labels.namespaces,
            labels.namespace_names,
        )
        checksums = np.full(len(slots), 7, dtype="<i8").tobytes()
        first, end, total = 0, 16, 16
        written = np.array(slots if generations is None else generations, "<u4").tobytes()
        if medium == FILE_MEDIUM:
            end = total = 256
            written = b""
        return LabelReport(
            "n",
            "p",
            0,
            1,
            first,
            end,
            total,
            model_epoch,
            LABEL_VERSION,
            "",
            32,
            held,
            checksums,
            (),
            medium,
            written,
        )


def test_what_a_call_labels_on_its_callers_word_is_not_stored() -> None:
    bench = Bench()
    labels = bench.computed()
    assert labels
    told = bench.offloading.commands(labels, is_confirmed=False)
    assert not [command for command in told if isinstance(command, Store)]
    confirmed = Bench()
    told = confirmed.offloading.commands(confirmed.computed())
    assert [command for command in told if isinstance(command, Store)]


def test_blocks_that_found_no_room_are_stored_later_from_the_beginning_of_their_prefix() -> None:
    bench = Bench()
    storing, tiers = bench.offloading.storing, bench.offloading.tiers
    first = chain_label(16, first_token=1000)
    storing.on_labelled(first, is_confirmed=True)
    (store,) = storing.store(first.block_ids, 0.0)  # all of host memory
    late = replace(chain_label(12), block_ids=int32_array(range(28, 16, -1)))
    storing.on_labelled(late, is_confirmed=True)
    assert storing.store(late.block_ids, 0.0) == []
    tiers.end(store.job_id, ok=True)
    storing.on_room()
    assert storing.may_store_more
    (store,) = storing.store_more(0.0)
    assert store.sources.tolist() == late.block_ids.tolist()
    storing.on_room()
    assert not storing.may_store_more
    assert storing.store_more(0.0) == []


@pytest.mark.parametrize("by", ["tenant", "salt"])
def test_a_step_may_seal_blocks_of_more_salts_than_python_calls_nest(by: str) -> None:
    num_salts = sys.getrecursionlimit() + 100
    tenants = TenantsConfig.model_validate({"by": by})
    bench = Bench(num_salts, tenants)
    new = tuple(
        NewRequest(f"r{i}", int32_array(TOKENS[:5]), 5, cache_salt=f"salt {i}", tenant=f"t{i % 3}")
        for i in range(num_salts)
    )
    for step in (StepRequest("c", 1, 1, new=new), StepRequest("c", 2, 1, completed_step=1)):
        result = bench.manager.step(step)
        told = bench.offloading.commands(bench.manager.take_commands(), step, result)
    stores = [command for command in told if isinstance(command, Store)]
    assert len(stores) == {"tenant": 3, "salt": num_salts}[by]
    assert len({b for store in stores for b in store.sources.tolist()}) == num_salts
    told_of = bench.offloading.tiers.host.statistics().tenants
    assert sum(one.num_held_blocks for one in told_of) == num_salts
    bench.offloading.check()


def test_hints_of_a_finished_request_order_the_tiers() -> None:
    bench = Bench()
    hosts = bench.offloading.tiers.host
    first, last = CacheHint(priority=0), CacheHint(8, priority=100)
    new = tuple(
        NewRequest(name, int32_array(range(start, start + 13)), 13, hints=(hint,))
        for name, start, hint in (("a", 100, last), ("b", 200, first))
    )
    stores: list[Store] = []
    for step in (
        StepRequest("c", 1, 1, new=new),
        StepRequest("c", 2, 1, completed_step=1),
        StepRequest("c", 3, 1, completed_step=2, finished=("a", "b")),
    ):
        result = bench.manager.step(step)
        told = bench.offloading.commands(bench.manager.take_commands(), step, result)
        stores += [command for command in told if isinstance(command, Store)]
    for store in stores:  # the blocks are stored after the requests have finished
        bench.offloading.on_ended(Job(store.job_id))
    keys = [hosts.slots.keys[slot] for slot in hosts.eviction.order()]
    chains = []
    for each in new:
        request = make_request(each, 0, bench.manager._hasher)
        chains.append(TierHitFinder(make_config(FULL, 64), 4).keys_of(request, 0, range(3)))
    of_a, of_b = chains
    assert set(keys[:3]) == set(of_b)
    assert keys[3:] == [of_a[1], of_a[0], of_a[2]]
    bench.offloading.check()


class Prefetching(Bench):
    """A bench whose host memory, or files, hold `TOKENS`, and whose device does not."""

    def __init__(self) -> None:
        super().__init__()
        new = (NewRequest("r", int32_array(TOKENS), 13),)
        told = []
        for step in (
            StepRequest("c", 1, 1, new=new),
            StepRequest("c", 2, 1, completed_step=1),
            StepRequest("c", 3, 1, completed_step=2, finished=("r",)),
        ):
            result = self.manager.step(step)
            told += self.offloading.commands(self.manager.take_commands(), step, result)
        self.step = 3
        self.end(*[command for command in told if isinstance(command, Store)])
        self.manager.evict_blocks(range(1, 64))
        self.offloading.commands(self.manager.take_commands())
        assert self.num_cached() == 0

    def end(self, *jobs: Store | Load, is_ok: bool = True) -> None:
        for job in jobs:
            failures = [] if is_ok else [FailedForward(0, 0, "broken")]
            ended = Job(job.job_id, failures=failures, is_wholly_failed=not is_ok)
            self.offloading.on_ended(ended)

    def loads(self) -> list[Load]:
        """Send an idle engine's step; return the loads that begin."""
        self.step += 1
        step = StepRequest("c", self.step, 1, completed_step=self.step - 1)
        result = self.manager.step(step)
        told = self.offloading.commands(self.manager.take_commands(), step, result)
        told += self.offloading.commands([])
        return [command for command in told if isinstance(command, Load)]

    def prefetch(self, **more: Any) -> int:
        """Call it as a client does; nothing begins before the client's last step is complete."""
        count = self.manager.prefetch_prefix(TOKENS, **more)
        assert not [c for c in self.offloading.commands([]) if isinstance(c, Load)]
        return count

    def num_cached(self) -> int:
        return self.manager.get_computed_blocks(Request("probe", [*TOKENS, 1]))[1]


def test_a_prefetched_prefix_is_cached_unused_and_evictable() -> None:
    bench = Prefetching()
    assert bench.prefetch(cache_salt="another") == 0
    assert bench.prefetch() == 12
    (load,) = bench.loads()
    assert bench.prefetch() == 12  # the same load
    assert bench.loads() == []
    assert bench.num_cached() == 0
    bench.end(load)
    assert (bench.num_cached(), bench.manager.usage) == (12, 0.0)
    assert bench.prefetch() == 0
    assert not bench.offloading.statistics().num_waiting_requests
    bench.manager.evict_blocks(range(1, 64))
    assert bench.num_cached() == 0
    bench.manager.check()
    bench.offloading.check()


def test_a_prefetch_counts_no_tokens_that_a_request_has_computed_meanwhile() -> None:
    bench = Prefetching()
    longer = [*TOKENS[:12], *range(5)]
    assert bench.manager.prefetch_prefix(longer) == 12
    request = NewRequest("q", int32_array(longer), 17, skip_reading_prefix_cache=True)
    bench.manager.step(StepRequest("c", 4, 1, new=(request,)))
    bench.manager.step(StepRequest("c", 5, 1, completed_step=4))
    assert bench.manager.prefetch_prefix(longer) == 0


def test_a_request_that_comes_during_its_prefetch_waits_for_the_same_load() -> None:
    bench = Prefetching()
    assert bench.prefetch() == 12
    (load,) = bench.loads()
    assert bench.look_up() is OffloadAnswer.HIT_PENDING
    assert bench.loads() == []
    bench.end(load)
    assert bench.loads() == []
    assert bench.look_up() is OffloadAnswer.MISS  # it is on the device
    assert bench.num_cached() == 12


def test_a_prefetch_that_fails_or_takes_too_long_leaves_nothing() -> None:
    bench = Prefetching()
    assert bench.prefetch() == 12
    (load,) = bench.loads()
    bench.end(load, is_ok=False)
    assert (bench.prefetch(), bench.num_cached(), bench.manager.usage) == (0, 0, 0.0)
    bench = Prefetching()
    assert bench.prefetch() == 12
    (load,) = bench.loads()
    bench.clock.advance(1e4)
    bench.offloading.on_tick()
    assert bench.prefetch() == 0
    bench.end(load)
    bench.clock.advance(1e4)
    bench.offloading.on_tick()
    assert (bench.num_cached(), bench.manager.usage) == (0, 0.0)
    bench.manager.check()
    bench.offloading.check()


def test_prefetches_are_few_and_without_tiers_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_loading, "MAX_PREFETCHES", 1)
    bench = Prefetching()
    assert bench.prefetch() == 12
    assert bench.manager.prefetch_prefix(TOKENS[:8]) == 0
    assert bench.prefetch() == 12
    assert make_manager(FULL, 8).prefetch_prefix(TOKENS) == 0


def test_host_memory_from_before_is_found_once_it_was_told() -> None:
    bench = Bench()
    (labels,) = Bench().computed()
    bench.offloading.begin(LabelQuestion(1, "n", 1, 0, 0.1))
    assert bench.look_up() is OffloadAnswer.RETRY
    bench.offloading.on_labels(bench.report(labels))
    assert bench.look_up() is OffloadAnswer.HIT_PENDING


def test_a_cache_that_is_emptied_meanwhile_takes_nothing_over() -> None:
    bench = Bench()
    (labels,) = Bench().computed()
    bench.offloading.begin(LabelQuestion(1, "n", 1, 0, 0.1))
    bench.offloading.commands([Reset(0)])
    bench.offloading.on_labels(bench.report(labels))
    assert bench.look_up() is OffloadAnswer.MISS
    assert bench.offloading.has_work  # ranks are told to forget it


def test_no_request_waits_forever_for_a_rank_that_does_not_report() -> None:
    bench = Bench()
    bench.offloading.begin(LabelQuestion(1, "n", 1, 0, 0.1))
    bench.clock.advance(6.0)
    bench.offloading.on_tick()
    assert bench.look_up() is OffloadAnswer.MISS


@pytest.mark.parametrize("shape", [ENCODER, ONE_STATE], ids=lambda shape: shape.name)
def test_kinds_whose_blocks_are_not_their_tokens_are_refused(shape: Shape) -> None:
    with pytest.raises(ConfigurationError, match="tiers below the device cannot serve"):
        TierHitFinder(make_config(shape, 64), 4)


def test_of_a_long_prompt_that_no_tier_knows_one_key_is_looked_at() -> None:
    manager = make_manager(FULL)
    request = Request("r", list(range(4000)))
    manager.get_computed_blocks(request)  # it has a hasher now
    finder, asked = TierHitFinder(make_config(FULL, 64), 4), []

    def locate(keys: Sequence[OffloadKey]) -> PlaceArray:
        asked.append(len(keys))
        return np.full(len(keys), places.pop(0), np.uint8)

    def is_host(found: PlaceArray) -> npt.NDArray[np.bool_]:
        return np.asarray(found == Place.HOST)

    places = [Place.NOWHERE]
    assert finder.find(request, 8, locate, is_host) is None
    assert asked == [1]
    places = [Place.HOST, Place.HOST]
    hit = finder.find(request, 8, locate, is_host)
    assert hit.num_tokens == 3996


def test_files_that_are_read_for_long_are_not_waited_for_and_found_later() -> None:
    bench = Bench(has_files=True)
    (labels,) = Bench().computed()
    offloading = bench.offloading
    offloading.begin(LabelQuestion(1, "n", 1, 0, 0.1))
    offloading.on_labels(bench.report(NO_LABELS))
    assert bench.look_up() is OffloadAnswer.RETRY
    for _ in range(12):
        bench.clock.advance(0.5)
        reading = replace(bench.report(NO_LABELS, FILE_MEDIUM), end_block=0, checksums=b"")
        offloading.on_labels(reading)
        offloading.on_tick()
    assert bench.look_up() is OffloadAnswer.MISS
    assert offloading.statistics().tiers.disk_problem.startswith(
        "ranks still read their directories"
    )
    assert [c for c in offloading.commands([labels]) if isinstance(c, (Store, Spill))]
    assert not offloading.tiers.has_spills  # it may have the very file
    offloading.tiers.reset()
    offloading.on_labels(bench.report(labels, FILE_MEDIUM))
    assert offloading.statistics().tiers.disk_problem == ""
    assert offloading.statistics().num_adopted_blocks == 0  # counted with the next tick
    offloading.on_tick()
    assert offloading.statistics().num_adopted_blocks == 3
    assert bench.look_up() is OffloadAnswer.HIT_PENDING
    offloading.check()


@pytest.mark.parametrize("model_epoch", [0, 1])
def test_files_of_a_cache_that_is_emptied_meanwhile_are_removed(model_epoch: int) -> None:
    bench = Bench(has_files=True)
    (labels,) = Bench().computed()
    offloading = bench.offloading
    offloading.begin(LabelQuestion(1, "n", 1, 0, 0.1))
    offloading.commands([Reset(model_epoch)])
    offloading.on_labels(bench.report(NO_LABELS, HOST_MEDIUM, model_epoch))
    offloading.on_labels(bench.report(labels, FILE_MEDIUM, model_epoch))
    assert bench.look_up() is OffloadAnswer.MISS
    assert bench.discarded_files() == 3


@pytest.mark.parametrize("model_epoch", [0, 1, 2])
@pytest.mark.parametrize("medium", [HOST_MEDIUM, FILE_MEDIUM])
def test_contents_that_outlived_a_change_of_weights_are_removed(
    medium: str, model_epoch: int
) -> None:
    """The process that should have removed them was killed first, or wrote them afterwards."""
    bench = Bench(has_files=True)
    (labels,) = Bench().computed()
    old, new = namespace_name(DEFAULT_NAMESPACE), namespace_name(Namespace(1, None, None, None))
    mixed = replace(labels, namespaces=int32_array([1, 1, 0]), namespace_names=(old, new))
    offloading = bench.offloading
    offloading.begin(LabelQuestion(1, "n", 1, model_epoch, 0.1))
    for each in (HOST_MEDIUM, FILE_MEDIUM):
        told = mixed if each == medium else NO_LABELS
        offloading.on_labels(bench.report(told, each, model_epoch))
    keys = label_keys(mixed)
    is_here = (offloading.tiers.locate(keys) != Place.NOWHERE).tolist()
    assert is_here == [model_epoch == 1, model_epoch == 1, model_epoch == 0]
    dropped = [c for c in offloading.commands([]) if isinstance(c, Discard)]
    if medium == FILE_MEDIUM:
        gone = [key for key, here in zip(keys, is_here, strict=True) if not here]
        assert dropped[0].keys == b"".join(sorted(gone))
    else:
        assert dropped[0].slots.tolist() == [i for i in range(3) if not is_here[i]]


def prompts_in_slots(seed: int) -> tuple[Label, list[int]]:
    """Return the labels of two prompts of three blocks in drawn slots, and the place of each."""
    one, other = (Bench().computed([*range(start, start + 13)])[0] for start in (100, 200))
    places = np.random.default_rng(seed).permutation(6)
    return label_rows(join_labels([one, other]), places), places.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_adopted_host_memory_is_evicted_by_age_and_from_the_end_of_a_prompt(seed: int) -> None:
    labels, places = prompts_in_slots(seed)
    # The second prompt was written first, and the head of the first one before everything else.
    generations = [[2, 6, 7, 3, 3, 4][place] for place in places]
    bench = Bench()
    bench.offloading.begin(LabelQuestion(1, "n", 1, 0, 0.1))
    bench.offloading.on_labels(bench.report(labels, generations=generations))
    victims = [places[slot] for slot in bench.offloading.tiers.host.eviction.order()]
    assert victims == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("seed", range(6))
def test_adopted_files_are_evicted_from_the_end_of_a_prompt(seed: int) -> None:
    labels, places = prompts_in_slots(seed)
    bench = Bench(has_files=True)
    bench.offloading.begin(LabelQuestion(1, "n", 1, 0, 0.1))
    bench.offloading.on_labels(bench.report(labels, FILE_MEDIUM))
    disk = bench.offloading.tiers.disk
    assert disk is not None
    keys = label_keys(labels)
    victims = [places[keys.index(disk.slots.keys[slot])] for slot in disk.eviction.order()]
    assert [each for each in victims if each < 3] == [2, 1, 0]
    assert [each for each in victims if each >= 3] == [5, 4, 3]


def test_a_report_without_the_age_of_each_slot_is_not_adopted() -> None:
    bench = Bench()
    (labels,) = Bench().computed()
    bench.offloading.begin(LabelQuestion(1, "n", 1, 0, 0.1))
    bench.offloading.on_labels(replace(bench.report(labels), generations=b"1234"))
    assert bench.look_up() is OffloadAnswer.MISS


def test_adopted_contents_are_published_without_a_step() -> None:
    bench, told = Bench(has_files=True), []
    bench.manager.tiers.emit = told.append  # type: ignore[method-assign]
    (labels,) = Bench().computed()
    bench.offloading.begin(LabelQuestion(1, "n", 1, 0, 0.1))
    for medium in (HOST_MEDIUM, FILE_MEDIUM):
        bench.offloading.on_labels(bench.report(labels, medium))
    assert [(event.medium, len(event.digests)) for event in told] == [("host", 3), ("storage", 3)]
