"""A vLLM engine in a process of its own, controlled line by line; runs in vLLM's environment.

    python -m tests.vllm.engine_process '{"model": DIRECTORY, "kv_transfer_config": {...}, ...}'

Each line of standard input is a command, each answer a line that begins with `MARK`; all other
output is vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

MARK = "@@ "

IMAGE_PIXELS = 32
"""Height and width of an image."""

IMAGE_TOKENS = 40
"""So many stand for an image, before the text."""


def say(answer: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)


def main(arguments: str) -> None:
    options = json.loads(arguments)
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.v1.metrics.reader import Counter

    if "kv_events_config" in options:
        options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
    begun_s = time.monotonic()
    chosen = {"enforce_eager": True, "dtype": "float32", "block_size": 32, "seed": 0, **options}
    if options.get("data_parallel_size", 1) > 1:
        asyncio.run(serve_replicas(chosen))
        return
    engine = LLM(disable_log_stats=False, **chosen)
    say({"ready_s": time.monotonic() - begun_s})
    for line in sys.stdin:
        command = json.loads(line)
        begun_s = time.monotonic()
        if command["do"] == "generate":
            transfer = command.get("transfer")
            sampling = SamplingParams(
                temperature=0,
                max_tokens=command["max_tokens"],
                ignore_eos=True,
                extra_args={"kv_transfer_params": transfer} if transfer else None,
            )
            salts = command.get("salts") or [None] * len(command["prompts"])
            prompts = [
                TokensPrompt(prompt_token_ids=ids, **({} if salt is None else {"cache_salt": salt}))
                for ids, salt in zip(command["prompts"], salts, strict=True)
            ]
            for prompt, seed in zip(prompts, command.get("images") or (), strict=False):
                prompt["multi_modal_data"] = {"image": noise(seed)}
            adapter = command.get("adapter")
            outputs = engine.generate(
                prompts,
                sampling,
                use_tqdm=False,
                lora_request=LoRARequest("adapter", 1, adapter) if adapter else None,
            )
            say(
                {
                    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                    "cached": [output.num_cached_tokens for output in outputs],
                    "first_token_s": [
                        output.metrics.first_token_latency if output.metrics else None
                        for output in outputs
                    ],
                    "wall_s": time.monotonic() - begun_s,
                }
            )
        elif command["do"] == "abort":
            say({"tokens": tokens_during_aborts(engine.llm_engine, command)})
        elif command["do"] == "count":
            metrics = engine.get_metrics()
            say({m.name.removeprefix("vllm:"): m.value for m in metrics if isinstance(m, Counter)})
        elif command["do"] == "reset":
            say({"reset": engine.reset_prefix_cache(reset_connector=command["connector"])})
        elif command["do"] == "reload":
            say({"reloaded": len(engine.collective_rpc("reload_weights"))})
        elif command["do"] == "sleep":
            engine.sleep(command["level"])
            say({"awake": engine.wake_up()})
        elif command["do"] == "stop":
            break
        else:
            say({"unknown": command})


async def serve_replicas(options: dict[str, Any]) -> None:
    """Serve data-parallel replicas, as `vllm serve` does; `replicas` names one for each prompt."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    begun_s = time.monotonic()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    say({"ready_s": time.monotonic() - begun_s})
    num_requests = 0

    async def output_of(request: str, ids: list[int], max_tokens: int, replica: int) -> Any:
        prompt = TokensPrompt(prompt_token_ids=ids)
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = engine.generate(prompt, sampling, request, data_parallel_rank=replica)
        return [output async for output in outputs][-1]

    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if command["do"] != "generate":
            say({"unknown": command})
            continue
        prompts, replicas = command["prompts"], command["replicas"]
        names = [str(num_requests + i) for i in range(len(prompts))]
        num_requests += len(prompts)
        outputs = await asyncio.gather(
            *(
                output_of(name, ids, command["max_tokens"], replica)
                for name, ids, replica in zip(names, prompts, replicas, strict=True)
            )
        )
        say(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "first_token_s": [],
            }
        )


def noise(seed: int) -> Any:
    """Return an image of noise."""
    import numpy as np
    from PIL import Image

    shape = (IMAGE_PIXELS, IMAGE_PIXELS, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def tokens_during_aborts(engine: Any, command: dict[str, Any]) -> list[list[int]]:
    """Abort every other request after some steps; return the tokens of the rest."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(temperature=0, max_tokens=command["max_tokens"], ignore_eos=True)
    names = [str(i) for i in range(len(command["prompts"]))]
    for name, ids in zip(names, command["prompts"], strict=True):
        engine.add_request(name, TokensPrompt(prompt_token_ids=ids), sampling)
    tokens: dict[str, list[int]] = {}
    num_steps = 0
    while engine.has_unfinished_requests():
        if num_steps == command["num_steps"]:
            engine.abort_request(names[::2])
        num_steps += 1
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return [tokens[name] for name in names[1::2]]


if __name__ == "__main__":
    main(*sys.argv[1:])
