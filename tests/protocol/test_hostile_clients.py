"""Invalid steps and calls, mixed with valid ones: refused or served, never fatal.

Whatever a client sends, it gets an answer, the state stays consistent, and no rank refuses the
resulting commands: a message that a rank refuses would be repeated forever.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import MalformedMessageError
from kvcache.coordinator import Coordinator
from kvcache.coordinator.parts import CoordinatorParts
from kvcache.coordinator.remote_calls import METHODS, pack_values
from kvcache.coordinator.settings import CoordinatorSettings
from kvcache.manager import KVCacheManager
from kvcache.protocol.messages import (
    Attach,
    Call,
    CallResult,
    ClientAddress,
    Hello,
    Outgoing,
    WorkerAddress,
)
from kvcache.protocol.state_store import MemoryStateStore
from kvcache.protocol.step import (
    EMPTY_RUNNING,
    NO_STEP,
    NewRequest,
    ResumedRequest,
    RunningRequests,
    StepRequest,
    StepResult,
)
from kvcache.protocol.wire import decode, encode
from kvcache.worker import KVCacheWorker, WorkerSettings
from tests.protocol.loose_sender import unchecked
from tests.protocol.scenario import MAX_MODEL_LEN, MODELS, config_of

NUM_SEQS = 4
NUM_STEPS = 50
EXTREMES = (-1, 0, 63, 64, 65, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
NAMES = ("a", "b", "c", "d")
WORDS: tuple[Any, ...] = (
    *EXTREMES, None, True, 1.5, float("nan"), float("inf"), "x", b"123", b"1234", [], [[1]], {},
)  # fmt: skip


class Cluster:
    """A coordinator and one rank without a network; every message is encoded and decoded."""

    def __init__(self, rng: random.Random) -> None:
        self.clock = VirtualClock()
        is_checking = rng.random() < 0.6
        model = rng.choice(list(MODELS))
        config = config_of(model, 24 * len(MODELS[model]))
        parts = CoordinatorParts(
            lambda model_epoch: KVCacheManager(
                config,
                MAX_MODEL_LEN,
                max_num_seqs=NUM_SEQS,
                clock=self.clock,
                has_workers=True,
                model_epoch=model_epoch,
            ),
            self.clock,
            MemoryStateStore(),
        )
        coordinator_settings = CoordinatorSettings(1, "plan", is_content_checking=is_checking)
        self.coordinator = Coordinator(coordinator_settings, parts, "n")
        settings = WorkerSettings(
            rank=0,
            kv_cache_config=config,
            fingerprint="plan",
            layout_fingerprint="layout",
            incarnation="p",
            max_num_seqs=NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            is_content_checking=is_checking,
        )
        self.worker = KVCacheWorker(settings, clock=self.clock)
        self.answers: list[StepResult | CallResult] = []
        self.coordinator.start()
        self._carry(self.coordinator.on_worker_message(0, Hello("p", 0, 0, "plan")))
        self.tell(Attach("c"))

    @property
    def manager(self) -> KVCacheManager:
        manager = self.coordinator.manager
        assert manager is not None
        return manager

    def tell(self, message: Any) -> None:
        """Take messages of a client that checks nothing."""
        payload = unchecked(message)
        try:
            told = self.coordinator.on_client_message(cast(Any, decode(payload)))
        except MalformedMessageError as error:
            told = self.coordinator.on_unreadable(ClientAddress("c"), payload, str(error))
        self._carry(told)

    def _carry(self, outgoing: list[Outgoing]) -> None:
        for item in outgoing:
            message = decode(encode(item.message))
            if isinstance(message, StepResult | CallResult):
                self.answers.append(message)
            if isinstance(item.to[0], WorkerAddress):
                for reply in self.worker.on_message(message) + self.worker.run_due_forwards():
                    self._carry(self.coordinator.on_worker_message(0, reply))

    def check(self) -> None:
        self.coordinator.check()
        self.worker.check()
        statistics = self.worker.statistics()
        assert statistics.num_invalid_messages == 0, statistics.last_invalid_reason
        assert statistics.applied_seq == self.coordinator.statistics().last_seq


class Hostile:
    """Makes steps and calls; `share` of their numbers are extreme."""

    def __init__(self, rng: random.Random, cluster: Cluster, share: float) -> None:
        self.rng, self.cluster, self.share = rng, cluster, share
        self.encoder_share = rng.choice((0.02, 0.9))

    def is_bad(self) -> bool:
        return self.rng.random() < self.share

    def number(self, low: int, high: int) -> int:
        return self.rng.choice(EXTREMES) if self.is_bad() else self.rng.randint(low, high)

    def array(self, values: list[int]) -> Int32Array:
        """The values, or others, more or fewer of them."""
        if self.is_bad():
            values = [self.rng.choice(EXTREMES) for _ in range(self.rng.randint(0, 4))]
        return int32_array([max(-(2**31), min(v, 2**31 - 1)) for v in values])

    def tokens(self) -> Int32Array:
        return self.array([self.rng.randint(0, 9) for _ in range(self.rng.choice((1, 5, 9, 20)))])

    def rows(self, slots: list[int]) -> RunningRequests:
        if not slots and not self.is_bad():
            return EMPTY_RUNNING
        counts = [self.rng.randint(1, 2) for _ in slots]
        offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
        has_drafts = self.rng.random() < 0.2
        drafts = [self.rng.randint(0, 2) * has_drafts for _ in slots]
        return RunningRequests(
            self.array(slots),
            self.array([d + self.rng.randint(0, 2) for d in drafts]),
            self.array(drafts),
            self.array([0] * len(slots)),
            self.array(offsets),
            self.array([self.rng.randint(0, 9) for _ in range(offsets[-1])]),
            self.array([self.rng.randint(0, 9) for _ in range(sum(drafts))]),
        )

    def new(self, name: str) -> NewRequest:
        return NewRequest(
            name,
            self.tokens(),
            self.number(1, 12),
            self.number(0, 3) if self.rng.random() < 0.2 else 0,
            self.number(0, 3) if self.rng.random() < 0.2 else 0,
            num_encoder_tokens=self.number(0, 6) if self.rng.random() < self.encoder_share else 0,
            lora_name=self.rng.choice((None, None, "lora", "")),
            lora_path="path" if self.is_bad() else None,
            mm_hashes=("image",) if self.is_bad() else (),
            mm_offsets=self.array([]),
            cache_salt=self.rng.choice((None, "salt", "")),
            tenant=self.rng.choice((None, "tenant", "")),
        )

    def step(self, number: int) -> StepRequest:
        rng, manager = self.rng, self.cluster.manager
        running = {n: s for n in NAMES if (s := manager.slot_of(n)) is not None}
        waiting = [n for n in NAMES if manager.get_request(n) and n not in running]
        unknown = [n for n in NAMES if manager.get_request(n) is None]
        gone = [n for n in running if rng.random() < 0.15]
        if self.is_bad():
            running, waiting, unknown, gone = {"a": 9}, unknown, waiting, ["ghost"]
        step = StepRequest(
            "c",
            number,
            1,
            rng.choice((NO_STEP, number - 1, max(number - 3, NO_STEP))),
            rng.choice((NO_STEP,) * 20 + (number - 1, number - 2)),
            finished=tuple(gone[:1]),
            preempted_recompute=tuple(gone[1:]),
            running=self.rows([s for n, s in running.items() if n not in gone]),
            num_lookahead_tokens=self.number(0, 2),
            resumed=tuple(ResumedRequest(n, self.number(1, 9)) for n in waiting),
            new=tuple(self.new(n) for n in unknown if rng.random() < 0.3),
        )
        if self.is_bad():
            name = rng.choice(("completed_step", "failed_step", "num_lookahead_tokens"))
            return replace(step, **{name: rng.choice(EXTREMES)})
        return step

    def call(self, number: int) -> Call:
        rng = self.rng
        request: dict[str, Any] = {"request_id": rng.choice(NAMES), "token_ids": self.tokens()}
        words = {name: rng.choice(WORDS) for name in REQUEST_KEYS if self.is_bad()}
        arguments: dict[str, Any] = {
            name: rng.choice(WORDS) if self.is_bad() else value
            for name, value in {
                "request": {**request, **words},
                "num_new_tokens": rng.randint(1, 9),
                "num_new_computed_tokens": 0,
                "num_draft_tokens": 0,
                "num_lookahead_tokens": rng.randint(0, 2),
                "num_external_computed_tokens": 0,
                "new_computed_blocks": [],
                "num_computed_tokens": 3,
                "num_running_requests": 1,
                "request_id": rng.choice(NAMES),
                "drain": rng.random() < 0.1,
                "block_ids": self.array([3, 4]),
                "token_ids": self.tokens(),
                "ttl_s": 5.0,
                "pin_id": 1,
            }.items()
        }
        method = rng.choice(sorted(METHODS))
        wanted = WANTED.get(method, ())
        packed = pack_values({name: arguments[name] for name in wanted if not self.is_bad()})
        return Call("c", number, 1, rng.choice((NO_STEP, number - 1)), method, packed)


REQUEST_KEYS = (
    "start", "num_computed_tokens", "num_prompt_tokens", "mm_hashes", "mm_offsets", "mm_lengths",
    "skip_reading_prefix_cache", "lora_name", "cache_salt", "tenant",
)  # fmt: skip

WANTED = {
    "get_computed_blocks": ("request",),
    "allocate_slots": (
        "request", "num_new_tokens", "num_new_computed_tokens", "num_draft_tokens",
        "num_lookahead_tokens", "num_external_computed_tokens", "new_computed_blocks",
    ),
    "cache_blocks": ("request", "num_computed_tokens"),
    "free": ("request_id",),
    "free_block_hashes": ("request_id",),
    "get_block_ids": ("request_id",),
    "get_num_common_prefix_blocks": ("request", "num_running_requests"),
    "reset_prefix_cache": ("drain",),
    "begin_model_epoch": (),
    "evict_blocks": ("block_ids",),
    "pin_prefix": ("token_ids", "ttl_s"),
    "prefetch_prefix": ("token_ids",),
    "unpin_prefix": ("pin_id",),
}  # fmt: skip


def play(seed: int, call_share: float) -> tuple[int, int]:
    """Play one hostile client; return how many of its steps were served and refused."""
    rng = random.Random(seed)
    cluster = Cluster(rng)
    hostile = Hostile(rng, cluster, rng.choice((0.01, 0.04, 0.15)))
    for number in range(1, NUM_STEPS + 1):
        is_call = rng.random() < call_share
        message = hostile.call(number) if is_call else hostile.step(number)
        if hostile.is_bad():
            wrong = rng.choice((2**63, 2**64 - 1, "x" * 5000, 1.5, [[1]], {1: 2}))
            message = replace(message, completed_step=wrong)
        cluster.tell(message)
        assert len(cluster.answers) == number, f"seed {seed}: no answer to {message}"
        cluster.check()
        cluster.clock.advance(rng.choice((0.0, 1.0)))
    errors = [bool(answer.error) for answer in cluster.answers]
    return errors.count(False), errors.count(True)


@pytest.mark.parametrize("call_share", [0.0, 0.5])
def test_whatever_a_client_sends_is_answered_and_harms_no_other(call_share: float) -> None:
    totals = [play(seed, call_share) for seed in range(25)]
    assert sum(served for served, _ in totals) > 250
    assert sum(refused for _, refused in totals) > 250
