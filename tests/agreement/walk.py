"""A seeded random walk of operations over one or two cores, compared after every one of them.

Chooses, from what the engine knows; applies to every side; compares what is answered and what can
be seen, by the allowances of the family; then lets the workers run what was scheduled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from kvcache.manager.core_registry import CORES, CoreFactory
from kvcache.step import NO_STEP, StepRequest
from tests.agreement import operations as ops
from tests.agreement.allowances import differences
from tests.agreement.call_choice import CallChoice
from tests.agreement.configurations import Configuration, Family, Operation
from tests.agreement.content import Forward, Origin
from tests.agreement.engine import CALLER, Engine, Live, Newcomer
from tests.agreement.prompts import Prompts
from tests.agreement.side import Action, Facts, Side, Sizes
from tests.agreement.step_choice import StepChoice
from tests.audits import ONE_IN, Audits

LARGE_POOL = 640
RESERVE = 200
"""Blocks of a large pool that no operation uses up."""

MOST_OFTEN = 0.6
"""No factor of a configuration makes more of a chance."""

NUM_OPERATIONS = 90


class Walk:
    """One walk. `cores` are compared with the first of them; one core walks alone."""

    def __init__(  # noqa: PLR0917 - what a walk is
        self,
        configuration: Configuration,
        family: Family,
        seed: int,
        cores: Sequence[str],
        factories: Mapping[str, CoreFactory] = CORES,
        audit_one_in: int = ONE_IN,
    ) -> None:
        self.rng = random.Random(f"{configuration.name} {family.name} {seed}")
        self.configuration = configuration
        self.family = family
        self.title = f"{configuration.name!r} {family.name} {seed} {' '.join(cores)}"
        sizes = self._sizes()
        self.sides = [Side(configuration, core, sizes, factories) for core in cores]
        self.audits = Audits(self.title, self._audit, audit_one_in)
        self.engine = Engine(keeps_states=configuration.keeps_states)
        self.prompts = Prompts(configuration, family, self.rng)
        self.steps = StepChoice(self)
        self.calls = CallChoice(self)
        self.log: list[str] = []
        self.num_made = 0
        self.num_hit_tokens = 0
        self.num_no_room = 0
        self.num_compared = 0

    def _sizes(self) -> Sizes:
        rng, num_blocks = self.rng, LARGE_POOL
        if self.family.has_pressure:
            num_blocks = rng.choice(self.configuration.pools)
        return Sizes(
            num_blocks,
            rng.choice([4, 10, 16]),
            zeroes=rng.random() < 0.3,
            watermark=rng.choice([0.0, 0.0, 0.05]) if self.family.has_pressure else 0.0,
        )

    # --- one walk ---

    def go(self, num_operations: int = NUM_OPERATIONS) -> None:
        """Do so many operations, then let everybody go; prints seed and log if that fails."""
        try:
            for _ in range(num_operations):
                self.operate()
                if not self.family.has_pressure and self._is_used_up():
                    self.start_over()
            self.start_over()
            self.audits.make()
        except BaseException:
            print(f"walk {self.title}, the log of its {len(self.log)} operations:")
            print("\n".join(self.log))
            raise

    def operate(self) -> None:
        """Do one random operation."""
        allowed, calls = self.configuration.operations_in(self.family), self.calls
        table: list[tuple[float, Operation | None, Callable[[], None]]] = [
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
            (0.3, Operation.MISTAKES, calls.mistake),
        ]
        table = [row for row in table if row[1] is None or row[1] in allowed]
        weights = [row[0] * self.configuration.factor(row[1]) for row in table]
        self.rng.choices([row[2] for row in table], weights)[0]()

    def start_over(self) -> None:
        """Let all requests and pins go and empty the cache: nothing must be left."""
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
            assert self.family.has_pressure or not core.num_evictions
            assert not side.truth.labels.blocks()

    def _is_used_up(self) -> bool:
        core = self.sides[0].manager.statistics().core
        used = core.num_cached_blocks + core.num_blocks - core.num_free_blocks
        return used > core.num_blocks - RESERVE

    # --- doing and comparing ---

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
        """Run what the last operation scheduled on every side, then compare all that is seen."""
        names = sorted(self.engine.live)
        seen = []
        for side in self.sides:
            side.settle(forwards)
            seen.append(side.observe(names))
        self._compare(seen)
        self.audits.perhaps()
        if self.family.is_unique:
            known = self.held_blocks() | {*self.sides[0].truth.labels.blocks()}
            surplus = self.sides[0].truth.num_surplus(known)
            assert not surplus, f"the walk lets {surplus} contents be computed again"
        self.num_compared += 1

    def _audit(self) -> None:
        for side in self.sides:
            side.manager.check()

    def _compare(self, facts: Sequence[Facts]) -> None:
        if len(facts) < 2:
            return
        surplus = 0
        if not self.family.is_unique and facts[0] != facts[1]:
            surplus = self.sides[0].truth.num_surplus(self.present_blocks())
        found = differences(self.family, facts[0], facts[1], surplus)
        cores = " and ".join(side.core for side in self.sides)
        assert not found, f"{cores} disagree ({surplus=}):\n" + "\n".join(found)

    def present_blocks(self) -> set[int]:
        """Return the blocks of the first side that are held or cached."""
        steps = self.engine.unfinished_steps()
        return self.sides[0].truth.blocks_with_content(self.held_blocks(), steps)

    def held_blocks(self) -> set[int]:
        """Return the blocks of the first side that requests hold, full of tokens of their own."""
        manager, held = self.sides[0].manager, {0}
        for request in self.engine.live.values():
            computed = min(request.computed, len(request.tokens))
            tables = manager.get_block_ids(request.name)
            for spec, table in zip(self.configuration.specs, tables, strict=True):
                if spec.num_state_blocks is None:  # states are contents where they are cached only
                    held.update(table[: computed // spec.block_size])
        return held - {0}

    # --- prompts ---

    def name(self) -> str:
        self.num_made += 1
        return f"r{self.num_made}"

    def choose_prompt(
        self, owner: str, *, may_share: bool = True, newcomers: Sequence[Newcomer] = ()
    ) -> tuple[Origin, tuple[int, ...]]:
        """Return a prompt of the family; of unique ones, one that computes nothing again, nor
        what the `newcomers` before it in a step will compute."""
        if not self.family.is_unique:
            return self.prompts.prompt(owner)
        found = self.prompts.continued() if may_share and self.rng.random() < 0.7 else None
        while found is not None:
            origin, shared = found
            tokens = shared + self.prompts.fresh(self.rng.randint(1, 12))
            hit = self.probe(origin, tokens)
            if not self.computes_again(Newcomer(origin, tokens, hit), len(shared), newcomers):
                return origin, tokens
            smallest = min(spec.block_size for spec in self.configuration.specs)
            end = min(len(shared) - 1, hit + self.rng.randrange(smallest))
            found = (
                None if end < 1 or origin.crosses_image(end) else (origin.cut(end), shared[:end])
            )
        return self.prompts.prompt()

    def remember(self, request: Live) -> None:
        """Let others share what is computed of a request."""
        computed = min(request.computed, len(request.tokens))
        if computed and not request.origin.crosses_image(computed):
            self.prompts.remember(request.origin.cut(computed), request.tokens[:computed])

    def probe(self, origin: Origin, tokens: Sequence[int]) -> int:
        """Look a prompt up; return the tokens it hits."""
        hit = self.do(ops.LookUp(origin, tuple(tokens)))["hit tokens"]
        assert isinstance(hit, int)
        return hit

    def computes_again(
        self, newcomer: Newcomer, num_shared: int, newcomers: Sequence[Newcomer] = ()
    ) -> bool:
        """Whether blocks between a hit and the end of what is shared are somewhere already, or
        will be soon."""
        side, origin, tokens = self.sides[0], newcomer.origin, newcomer.tokens
        if self.engine.will_compute(origin, tokens, newcomers):
            return True
        numbers = side.truth.chains.of(origin, side.manager.model_epoch, tokens)
        present = self.present_blocks() | self.engine.blocks_of_unfinished_steps()
        return any(
            side.truth.is_present(group, int(numbers[end - 1]), present)
            for group, spec in enumerate(self.configuration.specs)
            for end in range(spec.block_size, num_shared + 1, spec.block_size)
            if end > newcomer.hit
        )

    # --- chances ---

    def allows(self, operation: Operation, probability: float) -> bool:
        """Say whether to do something, by chance, if the configuration allows it."""
        configuration = self.configuration
        if operation not in configuration.operations_in(self.family):
            return False
        factor = configuration.factor(operation)
        if factor != 1:  # what is always done leaves no walk where it is not
            probability = min(probability * factor, MOST_OFTEN)
        return self.rng.random() < probability

    def num_encoder(self) -> int:
        return self.rng.choice([0, 4, 9, 24]) if self.allows(Operation.ENCODER, 1) else 0

    def num_lookahead(self) -> int:
        return self.rng.choice([3, 7]) if self.allows(Operation.LOOKAHEAD, 0.2) else 0

    def max_new(self) -> int:
        """How much of a prompt to compute: chunks often end with a block."""
        largest = max(spec.block_size for spec in self.configuration.specs)
        return self.rng.choice([self.rng.randint(1, 40), largest * self.rng.randint(1, 4), 80])


def walk_both(
    configuration: Configuration, family: Family, seed: int, audit_one_in: int = ONE_IN
) -> list[Walk]:
    """Make the walks of a configuration: both cores in lock step, or each alone."""
    together: tuple[str, ...] = ("blocks", configuration.second_core)
    each = [together]
    if family is Family.DUPLICATES_PRESSURE:
        each = [(core,) for core in dict.fromkeys(together)]
    return [Walk(configuration, family, seed, c, audit_one_in=audit_one_in) for c in each]


def replay(
    configuration: Configuration,
    family: Family,
    seed: int,
    num_operations: int = NUM_OPERATIONS,
    *,
    audit_one_in: int = ONE_IN,
) -> None:
    """Do the walks of one seed again; prints the log of one that fails."""
    for walk in walk_both(configuration, family, seed, audit_one_in):
        walk.go(num_operations)
