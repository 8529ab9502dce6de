"""From a published config.json to layers: each architecture, and missing fields."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from kvcache.config import layer_specs
from kvcache.planner import HFChoices, cluster_from_hf_config, model_from_hf_config
from kvcache.planner.hf_config import ARCHITECTURES
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from tests.planner import public_models as public


def specs_of(config: dict[str, Any], tensor_parallel_size: int = 1) -> list[KVCacheSpec]:
    """The specs of the first rank, layer by layer."""
    choices = HFChoices(tensor_parallel_size)
    return list(layer_specs(cluster_from_hf_config(config, choices))[0].values())


def kinds_of(config: dict[str, Any]) -> str:
    """The kinds of layers, as in `3 sliding_window, full`."""
    runs = [(kind, len(list(run))) for kind, run in groupby(spec.kind for spec in specs_of(config))]
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in runs)


# ---------------------------------------------------------------------------------------------
# Architectures
# ---------------------------------------------------------------------------------------------


def test_llama_reads_everything_in_every_layer() -> None:
    # heads of 4096 / 32 = 128 elements
    assert specs_of(public.LLAMA_3_8B, 4) == [FullAttentionSpec(16, 2, 128, "bfloat16")] * 32


def test_qwen_ignores_a_window_that_is_not_used() -> None:
    stated = {**public.QWEN_3_8B, "sliding_window": 4096, "max_window_layers": 3}
    assert kinds_of(stated) == kinds_of(public.QWEN_3_8B) == "36 full"
    used = {**stated, "use_sliding_window": True}
    assert kinds_of(used) == "3 full, 33 sliding_window"


def test_mistral_has_its_window_in_every_layer() -> None:
    window = SlidingWindowSpec(16, 8, 128, "bfloat16", sliding_window=4096)
    assert specs_of(public.MISTRAL_7B) == [window] * 32
    assert kinds_of({**public.MISTRAL_7B, "sliding_window": None}) == "32 full"


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


def test_null_means_none_and_a_missing_field_means_the_architectures_default() -> None:
    silent = without(public.MISTRAL_7B, "sliding_window")
    assert kinds_of(silent) == "32 sliding_window"
    assert kinds_of({**silent, "model_type": "mixtral"}) == "32 full"
    text = without(public.LLAMA_4_SCOUT["text_config"], "attention_chunk_size")
    silent = {**public.LLAMA_4_SCOUT, "text_config": {**text, "num_hidden_layers": 4}}
    assert kinds_of(silent) == "3 chunked_local, full"
    assert (
        kinds_of({**silent, "num_key_value_heads": None, "attention_chunk_size": None}) == "4 full"
    )
    # Outer fields count if the language model's fields are null.
    inner = {**text, "num_hidden_layers": 4, "torch_dtype": None}
    assert kinds_of({**silent, "text_config": inner}) == "3 chunked_local, full"


def test_gemma_2_begins_with_a_window_and_takes_turns() -> None:
    specs = specs_of(public.GEMMA_2_9B, 2)
    window = SlidingWindowSpec(16, 4, 256, "bfloat16", sliding_window=4096)
    assert specs == [window, FullAttentionSpec(16, 4, 256, "bfloat16")] * 21


@pytest.mark.parametrize("pattern_name", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma_3_reads_everything_in_every_sixth_layer(pattern_name: str) -> None:
    specs = specs_of(public.GEMMA_3_27B, 2)
    window = SlidingWindowSpec(16, 8, 128, "bfloat16", sliding_window=1024)
    full = FullAttentionSpec(16, 8, 128, "bfloat16")
    assert specs == ([window] * 5 + [full]) * 10 + [window] * 2
    small = {"num_hidden_layers": 5, pattern_name: 2}
    text = {**public.GEMMA_3_27B["text_config"], **small}
    changed = {**public.GEMMA_3_27B, "text_config": text}
    assert kinds_of(changed) == ("sliding_window, full, sliding_window, full, sliding_window")


def test_what_files_of_gemma_3_leave_out_has_its_known_value() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    model = model_from_hf_config({"model_type": "gemma3", "dtype": "bfloat16", "text_config": text})
    assert model.max_position_embeddings == 131072
    window = model.layers[0].model_dump()
    assert (window["num_kv_heads"], window["head_size"], window["count"]) == (4, 256, 5)


def test_llama_4_reads_everything_only_where_there_are_no_rotary_positions() -> None:
    chunk = ChunkedLocalAttentionSpec(16, 1, 128, "bfloat16", attention_chunk_size=8192)
    full = FullAttentionSpec(16, 1, 128, "bfloat16")
    assert specs_of(public.LLAMA_4_SCOUT, 8) == ([chunk] * 3 + [full]) * 12
    text = {**public.LLAMA_4_SCOUT["text_config"], "num_hidden_layers": 4}
    stated = {**public.LLAMA_4_SCOUT, "text_config": {**text, "no_rope_layers": [0, 1, 1, 0]}}
    assert kinds_of(stated) == "full, 2 chunked_local, full"
    whole = {**public.LLAMA_4_SCOUT, "text_config": {**text, "attention_chunk_size": None}}
    assert kinds_of(whole) == "4 full"


def test_gpt_oss_takes_turns_as_it_says() -> None:
    window = SlidingWindowSpec(16, 8, 64, "bfloat16", sliding_window=128)
    assert specs_of(public.GPT_OSS_20B) == [window, FullAttentionSpec(16, 8, 64, "bfloat16")] * 12
    unsaid = {**public.GPT_OSS_20B, "layer_types": None}
    assert specs_of(unsaid) == specs_of(public.GPT_OSS_20B)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_deepseek_keeps_a_latent_vector_on_every_rank(model_type: str) -> None:
    config = {**public.DEEPSEEK_V3, "model_type": model_type}
    assert specs_of(config, 8) == [MLAAttentionSpec(16, 1, 576, "bfloat16")] * 61


def test_jamba_has_attention_in_one_of_eight_layers() -> None:
    specs = specs_of(public.JAMBA, 2)
    # 2 * 4096 channels, half on each rank
    state = MambaSpec(16, shapes=((4096, 3), (4096, 16)), dtypes=("bfloat16",) * 2)
    full = FullAttentionSpec(16, 4, 128, "bfloat16")
    assert specs == ([state] * 4 + [full] + [state] * 3) * 4


def test_nemotron_says_each_layer_with_a_letter() -> None:
    specs = layer_specs(cluster_from_hf_config(public.NEMOTRON_NANO_9B, HFChoices(2)))[0]
    # 128 heads of 80 are 10240 channels, and twice 8 groups of 128: 12288, half on each rank.
    state = MambaSpec(16, shapes=((6144, 3), (64, 80, 128)), dtypes=("bfloat16", "float32"))
    assert list(specs.values()).count(state) == 27
    attention = [name for name, spec in specs.items() if spec.kind == "full"]
    assert attention == ["layers.14", "layers.21", "layers.30", "layers.39"]
    assert len(specs) == 31  # 25 layers of the 56 keep nothing
    assert specs["layers.14"] == FullAttentionSpec(16, 4, 128, "bfloat16")


def test_nemotron_may_spell_its_layers_out() -> None:
    letters = {"M": "mamba", "*": "attention", "-": "mlp"}
    words = [letters[letter] for letter in public.NEMOTRON_NANO_9B["hybrid_override_pattern"]]
    spelt = {**public.NEMOTRON_NANO_9B, "hybrid_override_pattern": None, "layers_block_type": words}
    assert specs_of(spelt) == specs_of(public.NEMOTRON_NANO_9B)


def test_ranks_beyond_the_groups_of_a_state_keep_a_whole_group() -> None:
    one_group = {**public.NEMOTRON_NANO_9B, "n_groups": 1}
    state = specs_of(one_group, 4)[0]
    # a quarter of 10240 channels, and all of the one group, twice 128
    assert state.to_dict()["shapes"] == ((2816, 3), (32, 80, 128))


def test_whisper_reads_the_encoder_in_addition_to_its_own_tokens() -> None:
    cluster = cluster_from_hf_config(public.WHISPER_LARGE_V3, HFChoices(4, 2))
    first, *_, last = layer_specs(cluster)
    assert list(first)[:2] == ["layers.0", "layers.0.cross"]
    assert list(last)[-1] == "layers.31.cross"
    assert first["layers.0"] == FullAttentionSpec(16, 5, 64, "float16")
    assert first["layers.0.cross"] == CrossAttentionSpec(
        16, 5, 64, "float16", max_encoder_tokens=1500
    )
    assert cluster.model.max_position_embeddings == 448


def test_every_known_architecture_has_been_read_here() -> None:
    seen = {model["model_type"] for model in public.ALL.values()}
    seen |= {model.get("text_config", {}).get("model_type") for model in public.ALL.values()}
    like = {"qwen2", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2"}
    assert set(ARCHITECTURES) == (seen | like) - {None}
    for name in like & {"qwen2", "qwen2_moe", "qwen3_moe"}:
        assert specs_of({**public.QWEN_3_8B, "model_type": name}) == specs_of(public.QWEN_3_8B)


def test_an_unknown_architecture_that_says_everything_is_read_as_it_says() -> None:
    config = {**public.GPT_OSS_20B, "model_type": "novel", "num_hidden_layers": 3}
    config["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    assert kinds_of(config) == "full, sliding_window, full"


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (public.QWEN_3_8B, 32),
        ({**public.QWEN_3_8B, "model_type": "qwen2"}, 32),
        ({**public.QWEN_3_8B, "model_type": "qwen2_moe"}, 16),
        ({**public.QWEN_3_8B, "model_type": "qwen3_moe"}, 4),
        (public.MISTRAL_7B, 8),
        ({**public.MISTRAL_7B, "model_type": "mixtral"}, 8),
        (public.GEMMA_2_9B, 4),
        (public.GPT_OSS_20B, 8),
        (public.JAMBA, 8),
        (public.NEMOTRON_NANO_9B, 8),
        (public.LLAMA_3_8B, 32),  # of Llama nothing is known: as many as num_attention_heads
    ],
)
def test_kv_heads_that_are_not_said_are_those_known_of_the_architecture(
    config: dict[str, Any], known: int
) -> None:
    def kv_heads(config: dict[str, Any]) -> set[object]:
        layers = model_from_hf_config(config).layers
        return {layer.model_dump().get("num_kv_heads") for layer in layers} - {None}

    assert kv_heads(without(config, "num_key_value_heads")) == {known}
    # null: no groups of heads
    assert kv_heads({**config, "num_key_value_heads": None}) == {config["num_attention_heads"]}


def test_head_sizes_that_are_not_said_are_those_known_of_the_architecture() -> None:
    small = {"hidden_size": 1024, "num_attention_heads": 32, "num_key_value_heads": 8}
    for known in (public.QWEN_3_8B, public.NEMOTRON_NANO_9B):
        silent = without({**known, **small}, "head_dim")
        assert specs_of(silent) == specs_of({**silent, "head_dim": 128})
    older = {**public.NEMOTRON_NANO_9B, "attention_head_dim": 64}
    assert specs_of(without(older, "head_dim")) == specs_of({**older, "head_dim": 64})


def test_llama_may_say_what_its_layers_read() -> None:
    types = ["full_attention", "sliding_attention"] * 16
    config = {**public.LLAMA_3_8B, "layer_types": types, "sliding_window": 512}
    assert specs_of(config)[:2] == [
        FullAttentionSpec(16, 8, 128, "bfloat16"),
        SlidingWindowSpec(16, 8, 128, "bfloat16", sliding_window=512),
    ]


# ---------------------------------------------------------------------------------------------
# Configurations from it
# ---------------------------------------------------------------------------------------------


def test_choices_decide_what_a_file_leaves_open() -> None:
    choices = HFChoices(2, 1, max_model_len=1000, dtype="int8", mamba_cache_mode="align")
    cluster = cluster_from_hf_config(public.JAMBA, choices, cache={"block_size": 32})
    assert cluster.model.max_model_len == 1000
    specs = layer_specs(cluster)[0]
    assert specs["layers.4"] == FullAttentionSpec(32, 4, 128, "int8")
    assert specs["layers.0"] == MambaSpec(
        32,
        shapes=((4096, 3), (4096, 16)),
        dtypes=("bfloat16", "bfloat16"),  # of the model: only keys and values are made smaller
        mamba_cache_mode="align",
    )


def test_a_file_is_read_as_what_was_read_from_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**public.LLAMA_3_8B, "_name_or_path": "meta-llama/Llama-3-8B"}))
    model = model_from_hf_config(path)
    assert model.name == "meta-llama/Llama-3-8B"
    assert model.layers == model_from_hf_config(public.LLAMA_3_8B).layers


@pytest.mark.parametrize("name", sorted(public.ALL))
def test_layers_that_are_alike_are_one_entry(name: str) -> None:
    model = model_from_hf_config(public.ALL[name])
    for before, after in zip(model.layers, model.layers[1:], strict=False):
        assert before.model_copy(update={"count": after.count}) != after
    total = public.ALL[name].get("text_config", public.ALL[name])["num_hidden_layers"]
    assert model.num_layers == total
