"""A stock vLLM is killed with SIGKILL, starts again, and loads its prompts instead of computing.

vLLM runs in its own environment, with a tiny model of random weights: nothing is downloaded. Each
of four prompts of 4,000 tokens is answered three times: cold; again by the same engine, from its
own prefix cache; and after the kill by the next engine, which loads the blocks that the memory
service has kept.

    make test-vllm                                        makes the environment, .venv-vllm
    .venv/bin/python examples/11_vllm_restart.py          or name its interpreter:
    .venv/bin/python examples/11_vllm_restart.py ENVIRONMENT/bin/python
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "@@ "
NUM_TOKENS = 4000
PROMPTS = [[(7 * i * i + 3 * i + k) % 500 + 4 for i in range(NUM_TOKENS)] for k in range(5)]
"""The first one only warms an engine up."""

NAME = f"example-{os.getpid()}"
TRANSFER = {
    "kv_connector": "KVCacheConnector",
    "kv_connector_module_path": "kvcache.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "name": NAME,
        "idle_memory_s": 600,
        "offload": {"host_memory_per_rank": "512MiB"},
    },
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> int:
    """Start, kill, start again; return the exit status."""
    named = sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-vllm" / "bin" / "python"
    python = Path(named).absolute()
    if not python.exists():
        print(f"No vLLM at {python}: run `make test-vllm`, or name the interpreter of another one.")
        return 0
    with tempfile.TemporaryDirectory() as model:
        try:
            engine = Engine(python, model)
            rows = {"cold": engine.ask(), "vLLM's own prefix cache": engine.ask()}
            engine.kill()
            print(f"killed with SIGKILL after {engine.age_s:.0f} s")
            engine = Engine(python, model)
            rows["after SIGKILL and restart"] = engine.ask()
            engine.stop()
        finally:
            end_memory_service()
    for what, answer in rows.items():
        first_token_ms = 1000 * statistics.median(answer["first_token_s"])
        print(f"{what:<26} cached tokens {answer['cached']}  first token {first_token_ms:7.1f} ms")
    cold, _, restarted = rows.values()
    is_right = restarted["tokens"] == cold["tokens"] and min(restarted["cached"]) > 0
    print("the same tokens" if is_right else "wrong: not loaded, or other tokens")
    return 0 if is_right else 1


class Engine:
    """A vLLM in its own processes."""

    def __init__(self, python: Path, model: str) -> None:
        self._begun_s = time.monotonic()
        self._log = Path(model, "engine.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, __file__, "--engine", model, json.dumps(TRANSFER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
                text=True,
            )
        print(f"engine ready after {self._read()['ready_s']:.0f} s", flush=True)

    @property
    def age_s(self) -> float:
        """How long ago it was started."""
        return time.monotonic() - self._begun_s

    def ask(self) -> dict[str, Any]:
        """Let it answer all prompts; return tokens, cached tokens and times."""
        assert self._process.stdin is not None
        print("ask", file=self._process.stdin, flush=True)
        return self._read()

    def kill(self) -> None:
        """End all its processes as a crash would, and remove vLLM's files in /dev/shm."""
        shared = [path for process in self._group() for path in shared_files(process)]
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        while self._group():
            time.sleep(0.05)
        for path in shared:
            path.unlink(missing_ok=True)

    def stop(self) -> None:
        """End it as usual."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith(MARK)), "")
        if not line:
            status = self._process.wait()
            raise SystemExit(f"{self._log.read_text()[-4000:]}\nthe engine has ended with {status}")
        answer: dict[str, Any] = json.loads(line[len(MARK) :])
        return answer

    def _group(self) -> list[int]:
        """Return its living processes."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[2]) == self._process.pid and fields[0] != "Z":
                found.append(int(entry.name))
        return found


def shared_files(process: int) -> list[Path]:
    """Return the files in /dev/shm that a process maps, by inode: vLLM renames some."""
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    inodes = {int(line.split()[4]) for line in maps if "/dev/shm/" in line}
    return [path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in inodes]


def end_memory_service() -> None:
    """Free the memory; without this the service would keep it for `idle_memory_s`."""
    # Imported here: vLLM's workers import this file, and start only before numba is loaded.
    from kvcache.base.errors import ClusterError
    from kvcache.memory_service.process import end

    try:
        end(f"unix:@kvcache-vllm-{os.getuid()}-{NAME}")
    except ClusterError:  # no engine has started it
        return


def serve(model: str, transfer: str) -> None:
    """Answer the prompts whenever asked, in vLLM's environment."""
    make_model(model)
    begun_s = time.monotonic()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model,
        enforce_eager=True,
        block_size=32,
        dtype="float32",
        max_model_len=4096,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        kv_transfer_config=json.loads(transfer),
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False)

    def answer(ids: list[int]) -> Any:
        (output,) = engine.generate(TokensPrompt(prompt_token_ids=ids), sampling, use_tqdm=False)
        return output

    def say(told: dict[str, Any]) -> None:
        print(f"\n{MARK}{json.dumps(told)}", flush=True)

    answer(PROMPTS[0])
    say({"ready_s": time.monotonic() - begun_s})
    for _ in sys.stdin:
        outputs = [answer(ids) for ids in PROMPTS[1:]]
        time.sleep(1)  # the last blocks are stored after the last token
        say(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "first_token_s": [output.metrics.first_token_latency for output in outputs],
            }
        )


def make_model(directory: str) -> None:
    """Write a Llama of four layers; the same every time, because the seed is."""
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(*sys.argv[2:])
    else:
        sys.exit(main())
