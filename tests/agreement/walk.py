"""A seeded random walk of operations over one or two cores, compared after every one of them.

Chooses an operation from the engine's state; applies it to every side; compares all answers and
observations; then runs the scheduled forwards. The second core is the slow one
(`tests/core/slow_core.py`): nothing may differ.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.protocol.step import NO_STEP, StepRequest
from kvcache.requests.hints import CacheHint
from tests.agreement import operations as ops
from tests.agreement.call_choice import CallChoice
from tests.agreement.configurations import Configuration, Family, Operation
from tests.agreement.content import Forward
from tests.agreement.engine import CALLER, Engine, Live
from tests.agreement.prompts import Prompts
from tests.agreement.side import Action, Facts, Side, Sizes
from tests.agreement.step_choice import StepChoice
from tests.audits import ONE_IN, Audits
from tests.core.slow_core import make_slow_core
from tests.walks import random_walk

FACTORIES: Mapping[str, CoreFactory] = {"flat": FlatCore, "slow": make_slow_core}
BOTH, FLAT_ALONE = ("flat", "slow"), ("flat",)

LARGE_POOL = 640
RESERVE = 200
"""Blocks of a large pool that no operation uses up."""

MOST_OFTEN = 0.6
"""Upper bound of a probability, whatever the factor of a configuration."""

NUM_OPERATIONS = 90


class Walk:
    """One walk. All `cores` are compared with the first of them; one core walks alone."""

    def __init__(  # noqa: PLR0917 - what a walk is
        self,
        configuration: Configuration,
        family: Family,
        seed: int,
        cores: Sequence[str] = BOTH,
        factories: Mapping[str, CoreFactory] = FACTORIES,
        audit_one_in: int = ONE_IN,
    ) -> None:
        self.rng = random.Random(f"{configuration.name} {family.name} {seed}")
        self.configuration = configuration
        self.has_pressure = family is Family.PRESSURE
        self.title = f"{configuration.name!r} {family.name} {seed} {' '.join(cores)}"
        sizes = self._sizes()
        self.sides = [Side(configuration, core, sizes, factories) for core in cores]
        self.audits = Audits(self.title, self._audit, audit_one_in)
        self.engine = Engine(keeps_states=configuration.keeps_states)
        self.prompts = Prompts(configuration, self.rng)
        self.steps = StepChoice(self)
        self.calls = CallChoice(self)
        self.log: list[str] = []
        self.num_made = 0
        self.num_hit_tokens = 0
        self.num_no_room = 0
        self.num_compared = 0

    def _sizes(self) -> Sizes:
        rng, num_blocks = self.rng, LARGE_POOL
        if self.has_pressure:
            num_blocks = rng.choice(self.configuration.pools)
        return Sizes(
            num_blocks,
            rng.choice([4, 10, 16]),
            zeroes=rng.random() < 0.3,
            watermark=rng.choice([0.0, 0.0, 0.05]) if self.has_pressure else 0.0,
        )

    # --- one walk ---

    def go(self, num_operations: int = NUM_OPERATIONS) -> None:
        """Apply `num_operations`, then end all requests; prints seed and log on failure."""
        try:
            random_walk(
                self.title, self.rng, self.operations(), num_operations, self.stay_within_pool
            )
            self.start_over()
            self.audits.make()
        except BaseException:
            print(f"walk {self.title}, the log of its {len(self.log)} operations:")
            print("\n".join(self.log))
            raise

    def operations(self) -> dict[Callable[[], object], float]:
        """Return the operations of this configuration, and their weights."""
        allowed, calls = self.configuration.operations, self.calls
        table: list[tuple[float, Operation | None, Callable[[], object]]] = [
            (9, Operation.STEPS, self.steps.step),
            (2, Operation.STEPS, self.steps.decode),
            (4, Operation.CALLS, calls.admit),
            (5, Operation.CALLS, calls.extend),
            (3, Operation.CALLS, calls.free),
            (2, None, calls.look_up),
            (0.5, Operation.DELAYED_CACHING, calls.cache_blocks),
            (0.3, Operation.FORGET_HASHES, calls.forget_hashes),
            (0.8, Operation.FORKS, calls.fork),
            (0.2, Operation.DELAYED_FORKS, calls.delay_and_fork),
            (0.8, Operation.PINS, calls.pin),
            (0.6, Operation.PINS, calls.unpin),
            (0.6, Operation.PINS, calls.wait),
            (0.7, Operation.EVICTIONS, calls.evict),
            (0.2, Operation.RESETS, calls.reset),
            (0.1, Operation.DRAINS, calls.drain),
            (0.2, Operation.NEW_WEIGHTS, calls.change_weights),
            (0.3, Operation.MISTAKES, calls.mistake),
        ]
        return {
            act: weight * self.configuration.factor(operation)
            for weight, operation, act in table
            if operation is None or operation in allowed
        }

    def stay_within_pool(self) -> None:
        """Start over before the blocks of a large pool are used up."""
        if not self.has_pressure and self._is_used_up():
            self.start_over()

    def start_over(self) -> None:
        """End all requests and pins and empty the cache: nothing must be left."""
        for left in self.engine.of(CALLER, running=True):
            self.do(ops.Free(left.name))
            del self.engine.live[left.name]
            self.finish([])
        for client in self.engine.clients:
            gone = [r.name for r in self.engine.live.values() if r.owner == client.name]
            completed = client.unfinished[-1].step if client.unfinished else NO_STEP
            self.engine.complete(client, completed)
            request = StepRequest(
                client.name, client.last_step + 1, completed_step=completed, finished=tuple(gone)
            )
            self.do(ops.Step(request, f"{client.name} leaves"))
            for name in gone:
                del self.engine.live[name]
            client.last_step += 1
            self.finish([])
        for name in list(self.sides[0].pins):
            self.do(ops.Unpin(name))
        self.do(ops.ResetPrefixCache(drain=False))
        self.finish([])
        for side in self.sides:
            side.pins.clear()
            core = side.manager.statistics().core
            assert core.num_free_blocks == core.num_blocks, f"{side.core} leaks blocks"
            assert core.num_cached_blocks == 0
            assert not any(core.references.values())
            assert self.has_pressure or not core.num_evictions
            assert not side.truth.labels.blocks()

    def _is_used_up(self) -> bool:
        core = self.sides[0].manager.statistics().core
        used = core.num_cached_blocks + core.num_blocks - core.num_free_blocks
        return used > core.num_blocks - RESERVE

    # --- applying and comparing ---

    def do(self, operation: Action, *, may_fail: bool = False) -> Facts:
        """Apply an operation to every side, compare the answers, return the first."""
        self.log.append(repr(operation))
        answers = [side.do(operation) for side in self.sides]
        self._compare(answers)
        first = answers[0]
        assert may_fail or "error" not in first, first["error"]
        hits = first.get("hit tokens", 0)
        self.num_hit_tokens += sum(hits) if isinstance(hits, list) else int(str(hits))
        self.num_no_room += first.get("has room") is False or bool(first.get("no room"))
        return first

    def finish(self, forwards: Sequence[Forward]) -> None:
        """Run the scheduled forwards on every side, then compare all observations."""
        names = sorted(self.engine.live)
        seen = []
        for side in self.sides:
            side.settle(forwards)
            seen.append(side.observe(names))
        self._compare(seen)
        self.audits.perhaps()
        self.num_compared += 1

    def _audit(self) -> None:
        for side in self.sides:
            side.manager.check()

    def _compare(self, facts: Sequence[Facts]) -> None:
        for other in facts[1:]:
            found = differences(facts[0], other)
            cores = " and ".join(side.core for side in self.sides)
            assert not found, f"{cores} disagree:\n" + "\n".join(found)

    # --- prompts ---

    def name(self) -> str:
        self.num_made += 1
        return f"r{self.num_made}"

    def remember(self, request: Live) -> None:
        """Let other prompts share the computed tokens of a request."""
        computed = min(request.computed, len(request.tokens))
        if computed and not request.origin.crosses_image(computed):
            self.prompts.remember(request.origin.cut(computed), request.tokens[:computed])

    # --- chances ---

    def allows(self, operation: Operation, probability: float) -> bool:
        """Return by chance whether to do something that the configuration allows."""
        configuration = self.configuration
        if operation not in configuration.operations:
            return False
        factor = configuration.factor(operation)
        if factor != 1:  # never always: some walks must do without
            probability = min(probability * factor, MOST_OFTEN)
        return self.rng.random() < probability

    def hints(self) -> tuple[CacheHint, ...]:
        """Draw hints for a request."""
        if not self.allows(Operation.HINTS, 0.5):
            return ()
        start, seconds = self.rng.choice([0, 5]), self.rng.choice([1.0, 5.0])
        kinds = (
            CacheHint(start, is_over=True),
            CacheHint(start, returns_in_s=seconds),
            CacheHint(start, priority=self.rng.choice([0, 80]), duration_s=seconds),
        )
        return (self.rng.choice(kinds),)

    def num_encoder(self) -> int:
        return self.rng.choice([0, 4, 9, 24]) if self.allows(Operation.ENCODER, 1) else 0

    def num_lookahead(self) -> int:
        return self.rng.choice([3, 7]) if self.allows(Operation.LOOKAHEAD, 0.2) else 0

    def max_new(self) -> int:
        """Return how much of a prompt to compute: chunks often end with a block."""
        largest = max(spec.block_size for spec in self.configuration.specs)
        return self.rng.choice([self.rng.randint(1, 40), largest * self.rng.randint(1, 4), 80])


def replay(
    configuration: Configuration,
    family: Family,
    seed: int,
    num_operations: int = NUM_OPERATIONS,
    *,
    audit_one_in: int = ONE_IN,
) -> Walk:
    """Repeat the walk of one seed; prints the log of a failure. The slow core has no tenants and
    no hints: with them, the core is compared only with the truth."""
    is_alone = configuration.tenants or Operation.HINTS in configuration.operations
    cores = FLAT_ALONE if is_alone else BOTH
    walk = Walk(configuration, family, seed, cores, audit_one_in=audit_one_in)
    walk.go(num_operations)
    return walk


def differences(one: Facts, two: Facts) -> list[str]:
    """Return the differences between two cores, a line each."""
    if one.keys() != two.keys():
        return [f"facts {sorted(one.keys() ^ two.keys())} on one side only"]
    return [
        f"{name}:\n    {_short(one[name], two[name])}" for name in one if one[name] != two[name]
    ]


def _short(one: object, two: object) -> str:
    """Return a short description of values that only one side has."""
    if isinstance(one, Counter) and isinstance(two, Counter):
        return f"first only {one - two}\n    second only {two - one}"
    if isinstance(one, set) and isinstance(two, set):
        return f"first only {one - two}\n    second only {two - one}"
    if isinstance(one, dict) and isinstance(two, dict):
        keys = [key for key in one | two if one.get(key) != two.get(key)]
        return "\n    ".join(f"{key}: {one.get(key)} and {two.get(key)}" for key in keys)
    return f"{one} and {two}"
