"""The faults of a cluster of processes, drawn by a seed: the model, the games, the faults."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvcache.config import ClusterConfig, parse_config
from tests.chaos.game import Dealt

FULL = {"kind": "full", "num_kv_heads": 2, "head_size": 8}
WINDOW = {"kind": "sliding_window", "num_kv_heads": 2, "head_size": 8, "window_tokens": 10}
CHUNK = {"kind": "chunked_local", "num_kv_heads": 2, "head_size": 8, "chunk_tokens": 16}
STATE = {
    "kind": "mamba",
    "state_shapes": [[16, 4], [16, 6]],
    "state_dtypes": ["float16", "float32"],
    "cache_mode": "align",
}

MODELS: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "full": (FULL,),
        "full, window": (FULL, WINDOW),
        "full, chunk": (FULL, CHUNK),
        "full, state": (FULL, STATE),
    }
)
TENSOR_PARALLEL = 2


@dataclass(frozen=True)
class Strike:
    """A fault of a process at a moment of the first engine's game.

    `kill`: it dies at once. `stop`: it stops for `pause_s`. `usurp`: a coordinator stops while
    another one begins.
    """

    moment: int
    victim: str
    deed: str
    pause_s: float


@dataclass(frozen=True)
class PlannedFault:
    """A fault that a process triggers itself, at its `count`th sent or received message: a stop, or
    death.

    `generation`: 0 for the process that is started first, 1 for its replacement.
    """

    victim: str
    generation: int
    count: int
    signal: str


@dataclass(frozen=True)
class Schedule:
    """One seed's."""

    seed: int
    model: str
    config: ClusterConfig
    game: Dealt
    other_game: Dealt | None
    strikes: tuple[Strike, ...]
    faults: tuple[PlannedFault, ...]

    def __str__(self) -> str:
        deeds = [f"{s.deed} {s.victim} at {s.moment}" for s in self.strikes]
        deeds += [f"{s.signal} in {s.victim}.{s.generation} after {s.count}" for s in self.faults]
        cache = self.config.cache
        what = f"{self.model}, {cache.core}, {cache.num_blocks} blocks"
        return f"{what}{', two engines' if self.other_game else ''}: {'; '.join(deeds)}"

    def fault_for(self, victim: str, generation: int) -> PlannedFault | None:
        """Return the fault of a process."""
        for fault in self.faults:
            if (fault.victim, fault.generation) == (victim, generation):
                return fault
        return None


def random_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(seed * 7919 + 11)
    model = rng.choice(list(MODELS))
    has_other = rng.random() < 0.4
    strikes = tuple(_random_strike(rng) for _ in range(rng.choice((1, 1, 2, 3))))
    return Schedule(
        seed,
        model,
        random_config(rng, seed, model, has_other),
        _random_game(rng, "one", seed),
        _random_game(rng, "two", seed) if has_other else None,
        strikes,
        tuple(_random_faults(rng, strikes, has_other)),
    )


def random_config(rng: random.Random, seed: int, model: str, has_other: bool) -> ClusterConfig:
    """Return a tiny cluster with short deadlines."""
    num_groups = len(MODELS[model])
    return parse_config(
        {
            "name": f"chaos-{seed}",
            "model": {"name": "tiny", "max_model_len": 256, "layers": list(MODELS[model])},
            "cache": {
                "block_size": 4,
                "memory_per_rank": "4MiB",
                # An engine without room waits only for its own requests.
                "num_blocks": rng.choice((400, 800) if has_other else (70, 120, 400)) * num_groups,
                "hash_algorithm": rng.choice(("sha256", "xxh3_128")),
                "merge_duplicates": rng.random() < 0.3,
            },
            "parallel": {"tensor_parallel_size": TENSOR_PARALLEL},
            "scheduler": {
                "max_num_batched_tokens": rng.choice((32, 64, 256)),
                "max_num_seqs": 32,  # of all engines together
            },
            "transport": {
                "resend_s": 0.05,
                "heartbeat_s": 0.1,
                "window": rng.choice((2, 8, 64)),
            },
            "deadlines": {
                "step_s": 20.0,
                "worker_silence_s": 1.0,
                "worker_kill_s": 5.0,
                "client_silence_s": 1.0 if has_other else 5.0,
                "reattach_s": 0.3,
            },
            "content_check": {"enabled": True},
            "audit": {"mode": rng.choice(("off", "off", "sample", "on")), "interval_s": 0.05},
        }
    )


def ray_config(rng: random.Random, seed: int, model: str) -> ClusterConfig:
    """Return a tiny cluster for Ray, with longer deadlines."""
    return parse_config(
        {
            "name": f"chaos-ray-{seed}",
            "model": {"name": "tiny", "max_model_len": 256, "layers": list(MODELS[model])},
            "cache": {
                "block_size": 4,
                "memory_per_rank": "4MiB",
                "num_blocks": 800 * len(MODELS[model]),
            },
            "parallel": {"tensor_parallel_size": TENSOR_PARALLEL},
            "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 32},
            "transport": {"resend_s": 0.2, "heartbeat_s": 0.4},
            "deadlines": {
                "startup_s": 120.0,
                "step_s": 60.0,
                "forward_s": 60.0,
                "worker_silence_s": 1.0,
                "worker_kill_s": 4.0,
                "client_silence_s": 5.0,
                "shutdown_s": 4.0,
            },
            "content_check": {"enabled": True},
            "audit": {"mode": rng.choice(("off", "sample")), "interval_s": 0.2},
        }
    )


def _random_game(rng: random.Random, name: str, seed: int) -> Dealt:
    return Dealt(
        name=name,
        seed=seed,  # the same for both, to share system prompts
        num_conversations=rng.randint(3, 8),
        num_turns=rng.randint(1, 3),
        system_prompt_tokens=random.Random(seed).randint(1, 40),
        question_tokens=rng.randint(4, 24),
        answer_tokens=rng.randint(4, 16),
        pipeline_depth=rng.randint(1, 3),
        max_num_seqs=rng.choice((3, 8, 16)),
    )


def _random_strike(rng: random.Random) -> Strike:
    victim = rng.choice(("coordinator", "coordinator", "worker-0", "worker-1"))
    deeds = ("kill", "kill", "stop", "usurp" if victim == "coordinator" else "kill")
    pause_s = rng.choice((0.01, 0.1, 0.3, 0.3, 1.2))
    return Strike(round(2 ** rng.uniform(0, 6.5)), victim, rng.choice(deeds), pause_s)


def _random_faults(
    rng: random.Random, strikes: Sequence[Strike], has_other: bool
) -> Iterator[PlannedFault]:
    """Yield faults, most of them for the replacements of a victim."""
    struck = [strike.victim for strike in strikes if strike.deed != "stop"]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        is_for_next = bool(struck) and rng.random() < 0.6
        others = ("coordinator", "worker-0", "worker-1", *("engine",) * has_other)
        victim = rng.choice(struck if is_for_next else others)
        # An epoch takes few messages, a game many: each order of magnitude is equally likely.
        count = round(2 ** rng.uniform(0, 8))
        number = rng.choice(("SIGKILL", "SIGKILL", "SIGSTOP"))
        yield PlannedFault(victim, int(is_for_next), count, number)
