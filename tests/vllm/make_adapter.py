"""Makes a LoRA adapter of the tiny Llama: `make_adapter.py DIRECTORY SEED`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, HIDDEN = 8, 256
WIDTHS = {"q_proj": 256, "k_proj": 128, "v_proj": 128}


def main(directory: str, seed: str) -> None:
    random = torch.Generator().manual_seed(int(seed))
    tensors = {}
    for layer in range(2):
        for name, width in WIDTHS.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (width, RANK))):
                tensors[f"{module}.{part}.weight"] = torch.randn(shape, generator=random)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(WIDTHS),
    }
    Path(directory, "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, Path(directory, "adapter_model.safetensors"))


if __name__ == "__main__":
    main(*sys.argv[1:])
