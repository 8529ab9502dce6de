"""What the vLLM connector costs and gains, in one run with a vLLM without it.

    python -m bench.bench_vllm [--python .venv-vllm/bin/python] [--rounds 9] [--host-memory 2GiB]
                               [--smoke]

Prints the throughput of a load that never hits, of both engines in turn; the time to the first
token of a prompt of 4,000 tokens, cold, from vLLM's own prefix cache, and after SIGKILL and a
restart; and the connector's part of a scheduler step with 256 running requests, without vLLM.
Machines should be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "@@ "
NAME = f"bench-{os.getpid()}"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
TRANSFER: dict[str, Any] = {
    "kv_connector": "KVCacheConnector",
    "kv_connector_module_path": "kvcache.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "name": NAME,
        "idle_memory_s": 600,
        "offload": {},
    },
}

# numba must not be loaded before vLLM's CPU worker starts, and workers import this module: what
# loads it is imported in functions.


def main() -> int:
    """Measure, print; return the exit status."""
    parser = argparse.ArgumentParser("python -m bench.bench_vllm", description=__doc__)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--rounds", type=int, default=9, help="of each engine")
    parser.add_argument("--host-memory", default="2GiB", help="of the engine with the connector")
    parser.add_argument("--smoke", action="store_true", help="the scheduler's part alone")
    options = parser.parse_args()
    for what, figure in scheduler_ms().items():
        print(f"scheduler, 256 running requests, {what}: {figure:.3f} ms per step")
    if options.smoke:
        return 0
    python = options.python.absolute()
    offload = TRANSFER["kv_connector_extra_config"]["offload"]
    offload["host_memory_per_rank"] = options.host_memory
    with tempfile.TemporaryDirectory() as scratch:
        try:
            measure_engines(python, scratch, options.rounds)
        finally:
            end_memory_service()
    return 0


# --- the scheduler's part


def scheduler_ms(num_requests: int = 256, num_steps: int = 2000) -> dict[str, float]:
    """Return median and 99th percentile of what the connector does in a step of decodes."""
    from kvcache.integrations.vllm.block_store import BlockStore
    from kvcache.integrations.vllm.kv_groups import KVGroups, NewTable
    from kvcache.integrations.vllm.options import ConnectorOptions, EngineSetting
    from kvcache.integrations.vllm.step_messages import Inventory, RankReports
    from kvcache.protocol.messages import JobReport
    from kvcache.specs import FullAttentionSpec

    block_tokens, prompt_blocks = 32, 16
    groups = KVGroups((FullAttentionSpec(block_tokens, 1, 1),), block_tokens)
    setting = EngineSetting(ConnectorOptions(), "model", groups, 1 << 20, 1)
    store = BlockStore(setting, time.monotonic)
    store.adopt({0: Inventory(1 << 16, {})})
    tables = [list(range(1, prompt_blocks + num_steps // block_tokens + 2))]
    requests = []
    for i in range(num_requests):
        num_tokens = prompt_blocks * block_tokens + i % block_tokens
        hashes = [sha256(f"{i} {j}".encode()).digest() for j in range(num_tokens // block_tokens)]
        request = SimpleNamespace(
            request_id=str(i),
            num_tokens=num_tokens,
            num_computed_tokens=num_tokens,
            block_hashes=hashes,
            lora_request=None,
            skip_reading_prefix_cache=False,
        )
        requests.append(request)
        store.num_matched(request, 0)
        store.allocated(request, tables, 0)
    scheduled = {request.request_id: 1 for request in requests}
    taken_ms = []
    for step in range(num_steps):
        new_tables = []
        for request in requests:
            request.num_tokens += 1
            if request.num_tokens % block_tokens == 1:
                new_tables.append(NewTable(request.request_id, ([1 << 16],), is_whole=False))
            if request.num_tokens % block_tokens == 0:
                request.block_hashes.append(
                    sha256(f"{request.request_id} {step}".encode()).digest()
                )
        begun_s = time.perf_counter()
        commands = store.commands(scheduled, lambda _: tables, new_tables)
        between_s = time.perf_counter()
        jobs = () if commands.store is None else ((0, JobReport(commands.store.job_id, True)),)
        again_s = time.perf_counter()
        store.reported(RankReports(jobs))
        store.received(())
        _ = store.has_unsent_commands
        taken_ms.append(1000 * (time.perf_counter() - again_s + between_s - begun_s))
        for request in requests:
            request.num_computed_tokens += 1
    taken_ms = sorted(taken_ms[num_steps // 10 :])
    return {"median": statistics.median(taken_ms), "p99": taken_ms[len(taken_ms) * 99 // 100]}


# --- whole engines


def measure_engines(python: Path, scratch: str, num_rounds: int) -> None:
    """Run both engines in turn, then kill the one with the connector and start it again."""
    without = Engine(python, scratch, None)
    engine = Engine(python, scratch, TRANSFER)
    try:
        seconds: dict[str, list[float]] = {"without": [], "with": []}
        for number in range(num_rounds + 1):
            turn = [("without", without), ("with", engine)]
            for what, each in turn if number % 2 else turn[::-1]:
                answer = each.ask(load(number), max_tokens=64)
                assert not sum(answer["cached"])
                if number:  # the first one warms up
                    seconds[what].append(answer["wall_s"])
        print_throughput(seconds)
        prompts = [drawn(4000, f"long {i}") for i in range(8)]
        cold, own = engine.ask(prompts, 8, one_by_one=True), engine.ask(prompts, 8, one_by_one=True)
        engine.kill()
        engine = Engine(python, scratch, TRANSFER)
        engine.ask([drawn(4000, "warm-up")], 8)
        restarted = engine.ask(prompts, 8, one_by_one=True)
        assert restarted["tokens"] == cold["tokens"]
        for what, answer in (
            ("cold", cold),
            ("own prefix cache", own),
            ("after restart", restarted),
        ):
            first_ms = [1000 * each for each in answer["first_token_s"]]
            print(
                f"first token, {what}: median {statistics.median(first_ms):.1f} ms, "
                f"largest {max(first_ms):.1f} ms, cached {min(answer['cached'])} of 4000 tokens"
            )
    finally:
        without.kill()
        engine.kill()


def print_throughput(seconds: dict[str, list[float]]) -> None:
    """Print the rounds' times and the ratio of their medians."""
    for what, times in seconds.items():
        print(f"load that never hits, {what}: {', '.join(f'{each:.2f}' for each in times)} s")
    plain, ours = (statistics.median(seconds[what]) for what in ("without", "with"))
    pairs = [a / b for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    print(
        f"throughput with / without: {plain / ours:.3f} of medians, "
        f"{statistics.median(pairs):.3f} median of rounds"
    )


def drawn(num_tokens: int, seed: str) -> list[int]:
    """Return tokens that no other seed has."""
    draw = random.Random(seed)
    return [draw.randrange(4, 500) for _ in range(num_tokens)]


def load(number: int) -> list[list[int]]:
    """Return the prompts of a round."""
    return [drawn(400, f"round {number} {i}") for i in range(32)]


class Engine:
    """A vLLM in a process group of its own."""

    def __init__(self, python: Path, scratch: str, transfer: dict[str, Any] | None) -> None:
        log = Path(scratch, "engine.log")
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "bench.bench_vllm", "--engine", scratch, json.dumps(transfer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
                text=True,
            )
        self._log = log
        self._read()

    def ask(
        self, prompts: list[list[int]], max_tokens: int, *, one_by_one: bool = False
    ) -> dict[str, Any]:
        """Have it answer prompts, together or one after another."""
        assert self._process.stdin is not None
        told = {"prompts": prompts, "max_tokens": max_tokens, "one_by_one": one_by_one}
        print(json.dumps(told), file=self._process.stdin, flush=True)
        return self._read()

    def kill(self) -> None:
        """End all its processes like a crash; remove what they leave in /dev/shm."""
        if self._process.poll() is not None:
            return
        members = [
            entry for entry in Path("/proc").glob("[0-9]*") if group_of(entry) == self._process.pid
        ]
        maps = [line for each in members for line in (each / "maps").read_text().splitlines()]
        inodes = {int(line.split()[4]) for line in maps if "/dev/shm/" in line}
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for path in Path("/dev/shm").iterdir():
            if path.stat().st_ino in inodes:
                path.unlink()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith(MARK)), "")
        if not line:
            raise SystemExit(f"{self._log.read_text()[-4000:]}\nthe engine has ended")
        answer: dict[str, Any] = json.loads(line[len(MARK) :])
        return answer


def group_of(process: Path) -> int:
    """Return a process's group, 0 if it has ended."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    except OSError:
        return 0


def end_memory_service() -> None:
    """Free the memory."""
    from kvcache.base.errors import ClusterError
    from kvcache.memory_service.process import end

    try:
        end(f"unix:@kvcache-vllm-{os.getuid()}-{NAME}")
    except ClusterError:  # no engine has started it
        return


def serve(scratch: str, transfer: str) -> None:
    """Answer questions from standard input, in vLLM's environment."""
    model = make_model(scratch)
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model,
        enforce_eager=True,
        block_size=32,
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=16,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        kv_transfer_config=json.loads(transfer),
    )
    print(f"\n{MARK}{{}}", flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        sampling = SamplingParams(
            temperature=0, max_tokens=told["max_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in told["prompts"]]
        batches = [[each] for each in prompts] if told["one_by_one"] else [prompts]
        begun_s = time.perf_counter()
        outputs = []
        for batch in batches:
            outputs += engine.generate(batch, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - begun_s
        time.sleep(1)  # the last blocks are stored behind the last token
        answer = {
            "wall_s": wall_s,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "first_token_s": [output.metrics.first_token_latency for output in outputs],
        }
        print(f"\n{MARK}{json.dumps(answer)}", flush=True)


def make_model(scratch: str) -> str:
    """Write a Llama of four layers, unless it is there; return its directory."""
    directory = Path(scratch, "model")
    if not directory.exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=8192,
            dtype="float32",
        )
        LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(*sys.argv[2:])
    else:
        sys.exit(main())
