"""A config.json that contradicts itself, or the choices made for it, is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.planner import HFChoices, cluster_from_hf_config, model_from_hf_config
from kvcache.planner.hf_config import ARCHITECTURES
from tests.planner import public_models as public


def complaint(config: Any, choices: HFChoices | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        model_from_hf_config(config, choices)
    return str(caught.value).split(": give the config.json as it was published")[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_lora_rank", 512),
        ("num_kv_shared_layers", 10),
        ("global_head_dim", 512),
        ("num_global_key_value_heads", 4),
        ("cross_attention_layers", [1]),
        ("is_encoder_decoder", True),
    ],
)
def test_an_unknown_architecture_that_may_keep_something_else_is_refused(
    name: str, value: object
) -> None:
    config = {**public.GPT_OSS_20B, "model_type": "novel"}
    assert model_from_hf_config({**config, name: None}).num_layers == 24
    message = (
        f"config.json: model_type novel is not known, and its {name} ({value!r}) may change what "
        "its layers keep: describe the layers in a configuration of your own"
    )
    assert complaint({**config, name: value}) == message


def test_an_unknown_architecture_is_refused_with_the_fields_that_are_missing() -> None:
    config = {"model_type": "novel", "num_hidden_layers": 4, "num_attention_heads": 8}
    message = (
        "config.json: model_type novel is not known, and of the fields that would say what its "
        "layers keep max_position_embeddings, num_key_value_heads, head_dim, layer_types are "
        "missing: add them, or describe the layers in a configuration of your own (known are "
        f"{', '.join(ARCHITECTURES)})"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        model_from_hf_config(config)


@pytest.mark.parametrize("name", sorted(public.ALL))
def test_missing_fields_are_all_named(name: str) -> None:
    config = public.ALL[name]
    inner = config.get("text_config", config)
    architecture = ARCHITECTURES[inner["model_type"]]
    kept = {"model_type": inner["model_type"], "torch_dtype": "float16"}
    missing = dict.fromkeys((*architecture.required, architecture.max_len_field))
    expected = [field for field in missing if field not in architecture.defaults]
    assert complaint(kept) == (
        f"config.json: of the fields of {inner['model_type']} {', '.join(expected)} are missing"
    )


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            public.LLAMA_3_8B,
            {"num_attention_heads": 30},
            "num_attention_heads is 30 and num_key_value_heads 8: heads cannot share keys and "
            "values evenly",
        ),
        (
            public.LLAMA_3_8B,
            {"hidden_size": 4097},
            "head_dim is missing, and hidden_size (4097) does not divide by num_attention_heads "
            "(32)",
        ),
        (
            public.LLAMA_3_8B,
            {"num_hidden_layers": "32"},
            "num_hidden_layers is '32', but must be a whole number from 1 to 4096",
        ),
        (
            public.LLAMA_3_8B,
            {"dtype": "float16"},
            "dtype and torch_dtype contradict each other: ['bfloat16', 'float16']",
        ),
        (
            public.GPT_OSS_20B,
            {"num_hidden_layers": 36},
            "layer_types has 24 entries, but num_hidden_layers is 36",
        ),
        (
            public.GPT_OSS_20B,
            {"layer_types": ["full_attention"] * 23 + ["linear_attention"]},
            "layer_types[23] is 'linear_attention': its cache is not known (known "
            "are full_attention)",
        ),
        (
            public.GPT_OSS_20B,
            {"layer_types": 24},
            "layer_types is 24, but must list one entry per layer",
        ),
        (
            public.MISTRAL_7B,
            {"sliding_window": 0},
            "sliding_window is 0, but must be a whole number from 1 to 2147483647",
        ),
        (
            public.MISTRAL_7B,
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 32},
            "there are layers of sliding_attention, but sliding_window is missing",
        ),
        (
            public.QWEN_3_8B,
            {"layer_types": ["sliding_attention"] * 36},
            "layer_types has sliding_attention, but use_sliding_window is false",
        ),
        (
            public.QWEN_3_8B,
            {"use_sliding_window": "no"},
            "use_sliding_window is 'no', but must be true or false",
        ),
        (
            public.JAMBA,
            {"attn_layer_offset": 8},
            "attn_layer_offset is 8, not below attn_layer_period (8)",
        ),
        (
            public.NEMOTRON_NANO_9B,
            {"hybrid_override_pattern": "M*-"},
            "hybrid_override_pattern has 3 entries, but num_hidden_layers is 56",
        ),
        (
            public.NEMOTRON_NANO_9B,
            {"hybrid_override_pattern": "M" * 55 + "X"},
            "hybrid_override_pattern[55] is 'X': its cache is not known (known are *, -, E, M)",
        ),
        (
            public.NEMOTRON_NANO_9B,
            {"n_groups": 7},
            "mamba_num_heads is 128, which n_groups (7) cannot divide",
        ),
        (
            public.WHISPER_LARGE_V3,
            {"decoder_attention_heads": 24},
            "d_model is 1280, which decoder_attention_heads (24) cannot divide",
        ),
        (
            public.NEMOTRON_NANO_9B,
            {"layers_block_type": ["mamba"] * 56},
            "hybrid_override_pattern and layers_block_type contradict each other",
        ),
        (
            public.NEMOTRON_NANO_9B,
            {"mamba_ssm_cache_dtype": "fp32"},
            "mamba_ssm_cache_dtype is 'fp32', which is not known (known are float32, float16, "
            "bfloat16, float8_e4m3fn, float8_e5m2, int8, uint8, float64)",
        ),
        (
            public.LLAMA_3_8B,
            {"torch_dtype": "auto"},
            "torch_dtype is 'auto', which is not known (known are float32, float16, bfloat16, "
            "float8_e4m3fn, float8_e5m2, int8, uint8, float64)",
        ),
        (
            public.QWEN_3_8B,
            {"use_sliding_window": True, "max_window_layers": 0},
            "there are layers of sliding_attention, but sliding_window is missing",
        ),
        (
            public.DEEPSEEK_V3,
            {"kv_lora_rank": 2**31 - 1},
            "kv_lora_rank + qk_rope_head_dim is 2147483711, but must be at most 2147483647",
        ),
        (
            public.JAMBA,
            {"mamba_expand": 2**20},
            "mamba_expand * hidden_size is 4294967296, but must be at most 2147483647",
        ),
        (
            public.NEMOTRON_NANO_9B,
            {"ssm_state_size": 2**30},
            "mamba_num_heads * mamba_head_dim + 2 * n_groups * ssm_state_size is 17179879424, but "
            "must be at most 2147483647",
        ),
        (public.LLAMA_4_SCOUT, {"text_config": 3}, "text_config is 3, not an object"),
        (
            public.LLAMA_3_8B,
            {"model_type": None},
            "model_type is missing, so that it is not known which fields matter",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_named(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    assert complaint({**config, **changes}) == f"config.json: {message}"


def test_a_pattern_and_types_that_contradict_each_other_are_named() -> None:
    text = {
        **public.GEMMA_3_27B["text_config"],
        "sliding_window_pattern": 6,
        "layer_types": ["full_attention"] * 62,
    }
    assert complaint({**public.GEMMA_3_27B, "text_config": text}) == (
        "config.json: sliding_window_pattern is 6, but layer_types does not have full_attention in "
        "every layer whose number divides by 6, and only there"
    )


def test_positions_and_types_that_contradict_each_other_are_named() -> None:
    text = {**public.LLAMA_4_SCOUT["text_config"], "no_rope_layers": [1, 1, 1, 0] * 12}
    types = (["chunked_attention"] * 3 + ["full_attention"]) * 12
    agreed = {**public.LLAMA_4_SCOUT, "text_config": {**text, "layer_types": types}}
    assert model_from_hf_config(agreed) == model_from_hf_config(public.LLAMA_4_SCOUT)
    text = {**text, "layer_types": types[::-1]}
    assert complaint({**public.LLAMA_4_SCOUT, "text_config": text}) == (
        "config.json: no_rope_layers and layer_types contradict each other: layers have "
        "chunked_attention where the one says 1, full_attention where it says 0"
    )


def test_positions_other_than_yes_and_no_are_refused() -> None:
    text = {**public.LLAMA_4_SCOUT["text_config"], "no_rope_layers": [2] * 48}
    assert complaint({**public.LLAMA_4_SCOUT, "text_config": text}) == (
        "config.json: no_rope_layers has entries other than 0 and 1"
    )


@pytest.mark.parametrize(
    ("config", "choices", "message"),
    [
        (
            public.LLAMA_3_8B,
            HFChoices(3),
            "num_attention_heads is 32, which 3 tensor-parallel ranks cannot divide evenly: choose "
            "a tensor-parallel size that divides 32",
        ),
        (
            public.WHISPER_LARGE_V3,
            HFChoices(8),
            "decoder_attention_heads is 20, which 8 tensor-parallel ranks cannot divide evenly: "
            "choose a tensor-parallel size that divides 20",
        ),
        (
            {**public.LLAMA_3_8B, "torch_dtype": None},
            HFChoices(),
            "neither dtype nor torch_dtype is in it: choose a dtype, such as bfloat16",
        ),
        (
            public.LLAMA_3_8B,
            HFChoices(1, 40),
            "parallel.pipeline_parallel_size is 40, but model.layers has only 32 layers: use at "
            "most one stage per layer",
        ),
        (
            public.LLAMA_3_8B,
            HFChoices(max_model_len="long"),
            "model.max_model_len: 'long' is no length: write a number of tokens from 1 to "
            "2147483647, or auto",
        ),
        (
            {**public.NEMOTRON_NANO_9B, "n_groups": 4, "num_attention_heads": 48},
            HFChoices(6),
            "mamba_num_heads is 128, which 6 tensor-parallel ranks cannot divide evenly: choose a "
            "tensor-parallel size that divides 128",
        ),
    ],
)
def test_choices_that_a_model_cannot_be_served_with_are_named(
    config: dict[str, Any], choices: HFChoices, message: str
) -> None:
    assert complaint(config, choices) == f"config.json: {message}"


def test_a_block_size_that_cuts_chunks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="chunk_tokens is 8192, no multiple of the block"):
        cluster_from_hf_config(public.LLAMA_4_SCOUT, cache={"block_size": 48})


def test_choices_of_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^mamba_cache_mode is 'all': use one of none, "):
        model_from_hf_config(public.JAMBA, HFChoices(mamba_cache_mode="all"))
    with pytest.raises(ConfigurationError, match="dtype 'fp8' is not known: use one of float32, "):
        model_from_hf_config(public.LLAMA_3_8B, HFChoices(dtype="fp8"))
    with pytest.raises(ConfigurationError, match=r"^tensor_parallel_size is 0: "):
        model_from_hf_config(public.LLAMA_3_8B, HFChoices(0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds list, not an object: give the config.json of a model"),
        ("{", "is not valid JSON (Expecting property name"),
        ("[" * 100_000, "is not valid JSON ("),
        (
            '{"head_dim": 128, "num_hidden_layers": 3, "head_dim": 64}',
            "'head_dim' is there twice in one object, as 128 and 64: remove one",
        ),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=f"^{re.escape(f'{path}: {message}')}"):
        model_from_hf_config(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    message = f"{path}: cannot be read (No such file or directory): check the path"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        model_from_hf_config(path)
