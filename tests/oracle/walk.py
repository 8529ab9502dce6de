"""Random operations on a manager and its answers, the same for both sides.

Runs in both environments: imports neither side. One side walks and chooses each operation from the
earlier answers; the other one repeats the operations. Every answer is `[tokens hit or -1, admitted,
free blocks]`, so that a difference shows at the operation that caused it.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Operation = list[Any]
Answer = list[int]

BLOCK_SIZE = 4
COARSE_BLOCK_SIZE = 8
WINDOW_TOKENS = 10
CHUNK_TOKENS = 16
MAX_MODEL_LEN = 160
NOT_LOOKED_UP = -1


@dataclass(frozen=True)
class Scenario:
    """The parameters of a walk. The kind names the groups: `full`, `window`, `full+window`, ..."""

    kind: str
    seed: int
    num_blocks: int
    use_eagle: bool
    watermark: float
    num_operations: int

    @property
    def groups(self) -> list[str]:
        """Kind of each KV cache group; `coarse-` in front of one with larger blocks."""
        return self.kind.split("+")

    @property
    def step_tokens(self) -> int:
        """Least common multiple of the groups' block sizes: hits end at its multiples."""
        return max(map(block_size_of, self.groups))

    @property
    def hash_tokens(self) -> int:
        """Greatest common divisor of the groups' block sizes: tokens per digest."""
        return min(map(block_size_of, self.groups))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def block_size_of(group: str) -> int:
    """Return the block size of a group by its kind."""
    return COARSE_BLOCK_SIZE if group.startswith("coarse-") else BLOCK_SIZE


class Side(Protocol):
    """A manager under comparison, wrapped; requests are its own objects."""

    def new_request(self, name: str, tokens: list[int]) -> Any: ...
    def append(self, request: Any, tokens: list[int]) -> None: ...
    def look_up(self, request: Any) -> tuple[Any, int]: ...
    def allocate(self, request: Any, counts: Counts, hit: Any, is_alone: bool) -> bool: ...
    def cache(self, request: Any, num_tokens: int) -> None: ...
    def set_computed(self, request: Any, num_tokens: int) -> None: ...
    def free(self, request: Any, is_preempted: bool) -> None: ...
    def reset(self) -> bool: ...
    def num_free_blocks(self) -> int: ...


@dataclass(frozen=True)
class Counts:
    """One allocation, in tokens."""

    new: int
    hit: int = 0
    draft: int = 0
    lookahead: int = 0
    external: int = 0
    is_delayed: bool = False


class Replay:
    """Applies operations to one side, in order, and answers each."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.requests: dict[str, Any] = {}
        self.num_tokens: dict[str, int] = {}
        self.num_computed: dict[str, int] = {}
        self.running: list[str] = []

    def run(self, operation: Operation) -> Answer:
        name, *arguments = operation
        hit, admitted = getattr(self, f"_{name}")(*arguments)
        return [hit, int(admitted), self.side.num_free_blocks()]

    def _new(self, name: str, tokens: list[int]) -> tuple[int, bool]:
        self.requests[name] = self.side.new_request(name, tokens)
        self.num_tokens[name] = len(tokens)
        self.num_computed[name] = 0
        return NOT_LOOKED_UP, True

    def _look_up(self, name: str) -> tuple[int, bool]:
        return self.side.look_up(self.requests[name])[1], True

    def _admit(
        self, name: str, budget: int, lookahead: int, external: int, is_delayed: bool
    ) -> tuple[int, bool]:
        request = self.requests[name]
        blocks, num_hit = self.side.look_up(request)
        left = self.num_tokens[name] - num_hit
        external = min(external, (left - 1) // COARSE_BLOCK_SIZE * COARSE_BLOCK_SIZE)
        new = min(budget, left - external)
        counts = Counts(new, num_hit, 0, lookahead, external, is_delayed)
        admitted = self.side.allocate(request, counts, blocks, not self.running)
        if admitted:
            self.running.append(name)
            self._computed(name, num_hit + external + new)
        return num_hit, admitted

    def _advance(self, name: str, budget: int, lookahead: int) -> tuple[int, bool]:
        new = min(budget, self.num_tokens[name] - self.num_computed[name])
        counts = Counts(new, lookahead=lookahead)
        admitted = self.side.allocate(self.requests[name], counts, None, False)
        if admitted:
            self._computed(name, self.num_computed[name] + new)
        return NOT_LOOKED_UP, admitted

    def _decode(
        self, name: str, token: int, drafts: int, accepted: list[int], lookahead: int
    ) -> tuple[int, bool]:
        """One sampled token and `drafts` after it; `accepted` of them will be accepted."""
        request = self.requests[name]
        if self.num_tokens[name] == self.num_computed[name]:
            self.side.append(request, [token])
            self.num_tokens[name] += 1
        counts = Counts(1 + drafts, draft=drafts, lookahead=lookahead)
        admitted = self.side.allocate(request, counts, None, False)
        if admitted:
            self.side.append(request, accepted)
            self.num_tokens[name] += len(accepted)
            self._computed(name, self.num_computed[name] + 1 + len(accepted))
        return NOT_LOOKED_UP, admitted

    def _cache(self, name: str) -> tuple[int, bool]:
        self.side.cache(self.requests[name], self.num_computed[name])
        return NOT_LOOKED_UP, True

    def _free(self, name: str) -> tuple[int, bool]:
        self.side.free(self.requests.pop(name), False)
        if name in self.running:
            self.running.remove(name)
        return NOT_LOOKED_UP, True

    def _preempt(self, name: str) -> tuple[int, bool]:
        self.side.free(self.requests[name], True)
        self.running.remove(name)
        self._computed(name, 0)
        return NOT_LOOKED_UP, True

    def _reset(self) -> tuple[int, bool]:
        return NOT_LOOKED_UP, self.side.reset()

    def _computed(self, name: str, num_tokens: int) -> None:
        self.num_computed[name] = num_tokens
        self.side.set_computed(self.requests[name], num_tokens)


class Walk:
    """Chooses operations: multi-turn prompts over shared prefixes on a pool that is often full."""

    def __init__(self, scenario: Scenario, replay: Replay) -> None:
        self._random = random.Random(f"{scenario.kind}/{scenario.use_eagle}/{scenario.seed}")
        self._scenario = scenario
        self._replay = replay
        self._tokens: dict[str, list[int]] = {}
        self._waiting: list[str] = []
        self._delayed: set[str] = set()
        self._past: list[list[int]] = []
        self._count = 0

    def run(self) -> tuple[list[Operation], list[Answer]]:
        """Return all operations of the walk, and the answers of this side."""
        operations: list[Operation] = []
        answers: list[Answer] = []
        while len(operations) < self._scenario.num_operations:
            operation = self._choose()
            answer = self._replay.run(operation)
            operations.append(operation)
            answers.append(answer)
            self._follow(operation, admitted=bool(answer[1]))
        return operations, answers

    def _choose(self) -> Operation:
        draw = self._random.random()
        running = self._replay.running
        if draw < 0.02:
            return ["reset"]
        if draw < 0.06 and self._waiting:
            return ["look_up", self._random.choice(self._waiting)]
        if draw < 0.16 and len(self._waiting) < 4:
            self._count += 1
            return ["new", f"r{self._count}", self._prompt()]
        if draw < 0.36 and self._waiting:
            return self._admit(self._random.choice(self._waiting))
        if not running:
            if self._waiting:
                return self._admit(self._waiting[0])
            self._count += 1
            return ["new", f"r{self._count}", self._prompt()]
        name = self._random.choice(running)
        if draw < 0.44:
            return ["free", name]
        if draw < 0.49:
            return ["preempt", name]
        if name in self._delayed and draw < 0.7:
            return ["cache", name]
        if len(self._tokens[name]) > MAX_MODEL_LEN - 8:
            return ["free", name]
        left = len(self._tokens[name]) - self._replay.num_computed[name]
        if left > 1:
            return ["advance", name, self._random.randint(1, 24), self._lookahead()]
        drafts = self._random.choice((0, 0, 0, 1, 3))
        accepted = [self._token() for _ in range(self._random.randint(0, drafts))]
        return ["decode", name, self._token(), drafts, accepted, self._lookahead()]

    def _follow(self, operation: Operation, *, admitted: bool) -> None:
        """Keep the walk's own table of the requests' tokens."""
        kind = operation[0]
        name = operation[1] if len(operation) > 1 else ""
        if kind == "new":
            self._tokens[name] = list(operation[2])
            self._waiting.append(name)
        elif kind == "admit" and admitted:
            self._waiting.remove(name)
            if operation[-1]:
                self._delayed.add(name)
        elif kind == "decode":
            if len(self._tokens[name]) < self._replay.num_tokens[name]:
                missing = self._replay.num_tokens[name] - len(self._tokens[name])
                self._tokens[name] += [operation[2], *operation[4]][-missing:]
        elif kind == "preempt":
            self._waiting.append(name)
            self._delayed.discard(name)
        elif kind == "cache":
            self._delayed.discard(name)
        elif kind == "free":
            self._past.append(self._tokens.pop(name))
            self._delayed.discard(name)
            del self._past[:-12]

    def _admit(self, name: str) -> Operation:
        budget = self._random.choice((8, 24, 200))
        external = self._random.choice((0,) * 9 + (8,))
        is_delayed = self._random.random() < 0.08
        return ["admit", name, budget, self._lookahead(), external, is_delayed]

    def _lookahead(self) -> int:
        return self._random.choice((0, 1, 3)) if self._scenario.use_eagle else 0

    def _prompt(self) -> list[int]:
        """A new prompt, or one that continues another request's."""
        known = [*self._past, *self._tokens.values()]
        base: list[int] = []
        if known and self._random.random() < 0.75:
            base = self._random.choice(known)
            if self._random.random() < 0.5:
                base = base[: self._random.randint(0, len(base))]
        fresh = self._random.randint(1, 30)
        return [*base, *(self._token() for _ in range(fresh))][: MAX_MODEL_LEN - 40]

    def _token(self) -> int:
        return self._random.randrange(1000)


def scenario_for(kind: str, seed: int, num_operations: int) -> Scenario:
    """Derive the sizes of a walk from its seed. `+eagle` at the end of the kind turns EAGLE on."""
    groups = kind.removesuffix("+eagle")
    draw = random.Random(seed)
    return Scenario(
        kind=groups,
        seed=seed,
        num_blocks=draw.choice((40, 64, 110)) * (1 + groups.count("+")),
        use_eagle=kind.endswith("+eagle"),
        watermark=draw.choice((0.0, 0.0, 0.1)),
        num_operations=num_operations,
    )
