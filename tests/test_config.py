"""Configuration files: the packaged ones, and all ways to be invalid."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import Any

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.config import (
    ClusterConfig,
    DeadlinesConfig,
    FullLayer,
    MambaLayer,
    layer_specs,
    load_config,
    parse_bytes,
    parse_config,
)
from kvcache.config.deadlines import ENDING_S
from kvcache.config.loading import prepared_names
from kvcache.config.sections import Location
from kvcache.planner import plan_cluster
from kvcache.policies import EVICTION_POLICIES
from kvcache.requests.hashing import DEFAULT_HASH_SEED, get_hash_fn
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

CONFIGS = Path(__file__).parent.parent / "configs"


def plain(**sections: Any) -> dict[str, Any]:
    layer = {"kind": "full", "count": 3, "num_kv_heads": 4, "head_size": 8}
    return {"model": {"name": "m", "max_model_len": 64, "layers": [layer]}, **sections}


def complaint(data: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse_config(data, "c.yaml")
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_that_comes_along_can_be_planned(path: Path) -> None:
    config = load_config(path)
    plan = plan_cluster(config)
    assert len(plan.configs) == config.parallel.num_ranks
    assert plan.max_concurrency >= 1
    if path.stem.startswith("cpu"):  # these are for tests of every byte, and waste none
        assert config.content_check.enabled
        assert plan.warnings == ()


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("cpu_chunked_local", [("chunked_local", 16)] * 3 + [("full", 16)]),
        ("cpu_mla", [("mla", 16)]),
        ("cpu_mamba_hybrid", [("mamba", 64)] * 3 + [("full", 64)]),
        ("cpu_mamba_none", [("mamba", 16)] * 3 + [("full", 64)]),
        ("cpu_cross_attention", [("full", 16), ("cross", 16)]),
        ("cpu_three_kinds", [("sliding_window", 32), ("chunked_local", 64), ("full", 16)]),
    ],
)
def test_the_small_configurations_have_every_kind(name: str, groups: list[tuple[str, int]]) -> None:
    plan = plan_cluster(load_config(CONFIGS / f"{name}.yaml"))
    specs = [group.kv_cache_spec for group in plan.model_groups]
    assert [(spec.kind, spec.block_size) for spec in specs] == groups
    assert plan.can_prefix_cache == (name not in ("cpu_mamba_none", "cpu_cross_attention"))


def test_the_main_configuration_holds_an_hour_of_conversations() -> None:
    plan = plan_cluster(load_config(CONFIGS / "cpu_tp2.yaml"))
    assert plan.num_blocks >= 110_000
    assert all(config.total_size_bytes <= 128 << 20 for config in plan.configs)


def test_defaults_serve_a_model_alone() -> None:
    config = parse_config(plain())
    assert config.name == "kvcache"
    assert config.cache.block_size == 16
    assert config.cache.hash_seed == DEFAULT_HASH_SEED
    assert config.transport.max_message_bytes == 64 << 20
    assert parse_config(plain(cache=None)) == config  # a section with all its keys commented out


@pytest.mark.parametrize("name", ["sha256", "sha256_cbor", "xxh3_128"])
def test_configurable_hash_algorithms_exist(name: str) -> None:
    config = parse_config(plain(cache={"hash_algorithm": name}))
    assert get_hash_fn(config.cache.hash_algorithm).name == name


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_every_eviction_policy_can_be_configured(name: str) -> None:
    assert parse_config(plain(cache={"eviction_policy": name})).cache.eviction_policy == name


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MiB", 256 << 20), ("1.5 GiB", 3 << 29), ("12B", 12), ("2 KiB", 2048), (7, 7)],
)
def test_amounts_of_memory_have_units(text: object, size: int) -> None:
    assert parse_bytes(text) == size


# ---------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------


def test_stages_share_layers_evenly_and_earlier_ones_take_the_rest() -> None:
    data = plain(parallel={"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    names = [list(specs) for specs in layer_specs(parse_config(data))]
    assert names == [["layers.0", "layers.1"]] * 2 + [["layers.2"]] * 2


@pytest.mark.parametrize(("tensor_parallel_size", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_heads_are_divided_over_ranks_or_kept_by_several(
    tensor_parallel_size: int, heads: int
) -> None:
    data = plain(parallel={"tensor_parallel_size": tensor_parallel_size})
    by_rank = layer_specs(parse_config(data))
    assert len(by_rank) == tensor_parallel_size
    assert {spec for specs in by_rank for spec in specs.values()} == {
        FullAttentionSpec(16, heads, 8)
    }


def test_layers_keep_the_order_of_the_model() -> None:
    specs = layer_specs(load_config(CONFIGS / "cpu_hybrid_window.yaml"))[0]
    windowed = SlidingWindowSpec(16, 1, 8, sliding_window=1024)
    pattern = [windowed] * 3 + [FullAttentionSpec(16, 1, 8)]
    assert list(specs.values()) == pattern * 2
    assert list(specs) == [f"layers.{index}" for index in range(8)]


HEADS = {"num_kv_heads": 4, "head_size": 8}
STATES = {"kind": "mamba", "state_shapes": [[64, 3], [64, 16]]}


def one_layer(layer: dict[str, Any], tensor_parallel_size: int = 2) -> list[KVCacheSpec]:
    """The specs that each rank has of a model with one such layer."""
    data = plain(parallel={"tensor_parallel_size": tensor_parallel_size})
    data["model"]["layers"] = [layer]
    return [specs["layers.0"] for specs in layer_specs(parse_config(data))]


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        ({"kind": "full", **HEADS}, FullAttentionSpec(16, 2, 8)),
        (
            {"kind": "sliding_window", **HEADS, "window_tokens": 5},
            SlidingWindowSpec(16, 2, 8, sliding_window=5),
        ),
        (
            {"kind": "chunked_local", **HEADS, "chunk_tokens": 32},
            ChunkedLocalAttentionSpec(16, 2, 8, attention_chunk_size=32),
        ),
        ({"kind": "mla", "head_size": 8}, MLAAttentionSpec(16, 1, 8)),  # the whole of it
        (
            {"kind": "cross", **HEADS, "max_encoder_tokens": 9},
            CrossAttentionSpec(16, 2, 8, max_encoder_tokens=9),
        ),
        (
            STATES,  # the first size of each shape is halved
            MambaSpec(16, shapes=((32, 3), (32, 16)), dtypes=("float16", "float16")),
        ),
        (
            {
                **STATES,
                "state_dtypes": ["float16", "float32"],
                "cache_mode": "align",
                "num_speculative_blocks": 2,
                "block_size": 64,
            },
            MambaSpec(
                64,
                shapes=((32, 3), (32, 16)),
                dtypes=("float16", "float32"),
                mamba_cache_mode="align",
                num_speculative_blocks=2,
            ),
        ),
    ],
)
def test_each_kind_is_divided_over_two_ranks_in_its_way(
    layer: dict[str, Any], spec: KVCacheSpec
) -> None:
    assert one_layer(layer) == [spec, spec]


def test_a_layer_may_have_blocks_of_its_own_size() -> None:
    assert (
        one_layer({"kind": "full", **HEADS, "block_size": 32}) == [FullAttentionSpec(32, 2, 8)] * 2
    )


def test_layers_that_keep_nothing_count_for_names_and_stages() -> None:
    data = plain(parallel={"pipeline_parallel_size": 2})
    full, nothing = {"kind": "full", **HEADS}, {"kind": "stateless", "count": 2}
    data["model"]["layers"] = [full, nothing, full]
    config = parse_config(data)
    assert config.model.num_layers == 4
    assert [list(specs) for specs in layer_specs(config)] == [["layers.0"], ["layers.3"]]


def test_cross_attention_may_extend_the_layers_before_it() -> None:
    data = plain(parallel={"pipeline_parallel_size": 3})
    cross = {"kind": "cross", **HEADS, "max_encoder_tokens": 9}
    data["model"]["layers"] = [
        {"kind": "full", "count": 3, **HEADS},
        {**cross, "count": 2, "beside_previous": True},
    ]
    config = parse_config(data)
    assert config.model.num_layers == 3
    assert [list(specs) for specs in layer_specs(config)] == [
        ["layers.0"],
        ["layers.1", "layers.1.cross"],
        ["layers.2", "layers.2.cross"],
    ]
    data["model"]["layers"][1]["beside_previous"] = False
    assert parse_config(data).model.num_layers == 5


def test_layers_may_be_written_in_code_as_well_as_in_files() -> None:
    config = parse_config(plain())
    layers = (FullLayer(count=3, num_kv_heads=4, head_size=8),)
    assert config.model.layers == layers
    assert config.model.model_copy(update={"layers": layers}) == config.model
    with pytest.raises(ValueError, match="one dtype per shape"):
        MambaLayer(state_shapes=((4, 2),), state_dtypes=("int8", "int8"))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_kind_of_layer_survives_being_plain(path: Path) -> None:
    config = load_config(path)
    assert ClusterConfig.model_validate_json(config.model_dump_json()) == config
    assert parse_config(config.model_dump(mode="json")) == config


# ---------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"cache": {"blok_size": 16}},
            "cache.blok_size: 16: there is no such key: did you mean block_size?",
        ),
        (
            {"content_check": {"sampling": 0.1}},
            "content_check.sampling: 0.1: there is no such key: known here are enabled",
        ),
        ({"cahce": {}}, "cahce: {}: there is no such key: did you mean cache?"),
        ({"cache": {"block_size": 0}}, "cache.block_size: 0: must be at least 1"),
        ({"cache": {"block_size": "16"}}, "cache.block_size: '16': write a whole number"),
        ({"cache": {"block_size": True}}, "cache.block_size: True: write a whole number"),
        ({"content_check": {"enabled": 1}}, "content_check.enabled: 1: write true or false"),
        ({"cache": {"watermark": 1.0}}, "cache.watermark: 1.0: must be less than 1.0"),
        (
            {"cache": {"num_blocks": 2**31}},
            "cache.num_blocks: 2147483648: must be at most 2147483647",
        ),
        ({"cache": {3: 4}}, "cache[3]: 3: is not a text: put the key in quotes, or remove it"),
        (
            {"cache": {"hash_seed": "\ud800"}},
            "cache.hash_seed: '\\ud800': use text that UTF-8 can encode",
        ),
        (
            {"parallel": {"tensor_parallel_size": 8192}},
            "parallel.tensor_parallel_size: 8192: must be at most 4096",
        ),
        ({"cache": {"max_pin_share": 1.1}}, "cache.max_pin_share: 1.1: must be at most 1.0"),
        ({"deadlines": {"step_s": 0}}, "deadlines.step_s: 0: must be more than 0.0"),
        ({"deadlines": {"step_s": float("inf")}}, "deadlines.step_s: inf: write a finite number"),
        (
            {"deadlines": {"worker_kill_s": -1.0}},
            "deadlines.worker_kill_s: -1.0: must be at least 0.0",
        ),
        (
            {"deadlines": {"worker_silence_s": 20.0, "worker_kill_s": 20.0}},
            "deadlines: worker_kill_s is 20.0, not more than worker_silence_s (20.0), so that a "
            "worker would be ended before a client hears that it is silent: raise it, or set it to "
            "0 to end none",
        ),
        (
            {"cache": {"memory_per_rank": "3Mb"}},
            "cache.memory_per_rank: '3Mb' is not an amount of memory: write a number and one of B, "
            "KiB, MiB, GiB, TiB",
        ),
        *(
            (
                {"cache": {"memory_per_rank": amount}},
                f"cache.memory_per_rank: {amount!r} is too little memory: write a number and a "
                "unit, such as 8GiB",
            )
            for amount in (0, 5, 5.5, 1023)
        ),
        (
            {"cache": {"hash_algorithm": "md5"}},
            "cache.hash_algorithm: 'md5': use 'sha256', 'sha256_cbor' or 'xxh3_128'",
        ),
        (
            {"cache": {"eviction_policy": "mru"}},
            "cache.eviction_policy: unknown eviction policy 'mru': choose one of "
            "adaptive, arc, lru, lru2, s3fifo",
        ),
        (
            {"name": "two words"},
            "name: 'two words': use letters, digits, '.', '_' and '-', a letter or digit first",
        ),
        (
            {"name": "n" * 129},
            f"name: '{'n' * 27}...{'n' * 28}': write at most 128 characters",
        ),
        (
            {"name": "chat\n"},
            "name: 'chat\\n': use letters, digits, '.', '_' and '-', a letter or digit first",
        ),
        (
            {"recorder": {"directory": "records"}},
            "recorder: directory 'records' is relative, and the coordinator may run anywhere: "
            "write it from / on, or from ~/ on for one in the home directory",
        ),
        (
            {"recorder": {"directory": "/var/records", "max_bytes": "100MiB"}},
            "recorder: max_bytes is 104857600, less than two segments of segment_bytes "
            "(67108864): raise it, or lower segment_bytes",
        ),
        ({"parallel": 2}, "parallel: 2: write a section of keys and values"),
        (
            {"parallel": {"tensor_parallel_size": 3}},
            "parallel.tensor_parallel_size is 3, but model.layers[0] has 4 num_kv_heads: heads "
            "must divide evenly over ranks, or ranks over heads",
        ),
        (
            {"parallel": {"pipeline_parallel_size": 4}},
            "parallel.pipeline_parallel_size is 4, but model.layers has only 3 layers: use at "
            "most one stage per layer",
        ),
        (
            {"workers": {"device": "cuda"}},
            "workers: device is cuda, but num_gpus_per_rank is 0: set it to 1, or to a share of a "
            "GPU",
        ),
        (
            {"scheduler": {"max_num_batched_tokens": 8, "max_num_seqs": 9}},
            "scheduler: max_num_batched_tokens is 8, less than max_num_seqs (9), so that some "
            "requests would get no token: raise it",
        ),
        (
            {"deadlines": {"worker_silence_s": 1.0}},
            "deadlines.worker_silence_s is 1.0, not more than transport.heartbeat_s (1.0), so "
            "that the living would seem dead: raise it",
        ),
        (
            {"transport": {"resend_s": 10.0, "heartbeat_s": 1.0}},
            "deadlines.worker_silence_s is 10.0, not more than transport.resend_s (10.0), so that "
            "one lost message would make a rank seem dead: raise it",
        ),
        (
            {"deadlines": {"forward_s": 30.0}},
            "deadlines: forward_s is 30.0, not more than worker_kill_s and the 30 s that ending a "
            "process may take (60.0), so that a client would give up before a worker that hangs is "
            "ended and replaced: raise it, or lower worker_kill_s, or set it to 0 to end none, or "
            "leave forward_s out",
        ),
        (
            {"deadlines": {"step_s": 10.0}},
            "deadlines: step_s is 10.0, not more than worker_silence_s (10.0), so that a client "
            "would give up a step before it hears that a rank is silent: raise it, or leave step_s "
            "out",
        ),
        (
            {"deadlines": {"step_s": 30.0, "reattach_s": 30.0}},
            "deadlines: step_s is 30.0, not more than reattach_s (30.0), so that a client that "
            "came back would give up before the others are waited for: raise it, or leave step_s "
            "out",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_value_and_remedy(
    sections: dict[str, Any], message: str
) -> None:
    assert complaint(plain(**sections)) == f"c.yaml: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 0}, ".max_model_len: 0 is no length: write a number of tokens from "),
        ({"name": 7}, ".name: 7: write text; put it in quotes if it looks like a number"),
        ({"layers": []}, ": layers is empty: write at least one entry"),
        ({"layers": 3}, ".layers: 3: write a list, one '- ' per entry"),
        ({"layers": [{"kind": "full", "head_size": 8}]}, ".layers[0].num_kv_heads: is missing: "),
        (
            {"layers": [{"kind": "full", "num_kv_heads": 1, "head_siz": 8, "head_size": 8}]},
            ".layers[0].head_siz: 8: there is no such key: did you mean head_size?",
        ),
        (
            {"layers": [{"kind": "sliding_window", "num_kv_heads": 1, "head_size": 8}]},
            ".layers[0].window_tokens: is missing: add it",
        ),
        ({"dtype": "f16"}, ": dtype 'f16' is not known: use one of float32, float16, "),
    ],
)
def test_a_model_that_cannot_be_meant_is_refused(changes: dict[str, Any], message: str) -> None:
    data = plain()
    data["model"].update(changes)
    assert complaint(data).startswith(f"c.yaml: model{message}")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (3, "model.layers[0]: 3: write a section of keys and values"),
        (HEADS, "model.layers[0].kind: is missing: add it"),
        (
            {"kind": "fulll", **HEADS},
            "model.layers[0].kind: 'fulll': use 'full', 'sliding_window', 'chunked_local', 'mla', "
            "'mamba', 'cross' or 'stateless'",
        ),
        (
            {"kind": "full", **HEADS, "window_tokens": 5},
            "model.layers[0].window_tokens: 5: there is no such key: known in a layer of kind full "
            "are kind, count, block_size, num_kv_heads, head_size",
        ),
        (
            {"kind": "sliding_window", **HEADS, "window_tokens": 0},
            "model.layers[0].window_tokens: 0: must be at least 1",
        ),
        (
            {"kind": "chunked_local", **HEADS},
            "model.layers[0].chunk_tokens: is missing: add it",
        ),
        (
            {"kind": "chunked_local", **HEADS, "chunk_tokens": 40},
            "model.layers[0]: chunk_tokens is 40, no multiple of the block size 16, so that a "
            "chunk would begin inside a block: choose a block size that divides it",
        ),
        (
            {"kind": "chunked_local", **HEADS, "chunk_tokens": 32, "block_size": 64},
            "model.layers[0]: chunk_tokens is 32, no multiple of the block size 64, so that a "
            "chunk would begin inside a block: choose a block size that divides it",
        ),
        (
            {"kind": "cross", **HEADS, "max_encoder_tokens": 1, "beside_previous": True},
            "model: layers[0] extends the 1 layers before it, but there are not that many "
            "without cross attention: lower its count, or write beside_previous: false",
        ),
        (
            {"kind": "mla", "head_size": 8, "num_kv_heads": 1},
            "model.layers[0].num_kv_heads: 1: there is no such key: known in a layer of kind mla "
            "are kind, count, block_size, head_size",
        ),
        (
            {"kind": "mamba", "state_shapes": []},
            "model.layers[0].state_shapes: [] lacks a size: write a list of sizes for each tensor "
            "of the state, as in [[4096, 3], [4096, 16]]",
        ),
        (
            {"kind": "mamba", "state_shapes": [[4], []]},
            "model.layers[0].state_shapes: [[4], []] lacks a size: write a list of sizes for each "
            "tensor of the state, as in [[4096, 3], [4096, 16]]",
        ),
        (
            {"kind": "mamba", "state_shapes": [4, 2]},
            "2 settings are wrong:\n"
            "  model.layers[0].state_shapes[0]: 4: write a list, one '- ' per entry\n"
            "  model.layers[0].state_shapes[1]: 2: write a list, one '- ' per entry",
        ),
        (
            {**STATES, "state_dtypes": ["float16"]},
            "model.layers[0]: state_dtypes has 1 entries and state_shapes 2: write one dtype per "
            "shape, or none at all",
        ),
        (
            {**STATES, "cache_mode": "all"},
            "model.layers[0].cache_mode: 'all': use 'none' or 'align'",
        ),
        (
            {"kind": "mamba", "state_shapes": [[64, 3], [31, 16]]},
            "parallel.tensor_parallel_size is 2, but model.layers[0] has a state of shape [31, 16] "
            "in state_shapes: its first size must divide evenly over ranks",
        ),
    ],
)
def test_a_layer_that_cannot_be_meant_is_refused(layer: Any, message: str) -> None:
    data = plain(parallel={"tensor_parallel_size": 2})
    data["model"]["layers"] = [layer]
    assert complaint(data) == f"c.yaml: {message}"


def test_all_problems_are_named_at_once() -> None:
    data = plain(cache={"blok_size": 8, "log_stats": "yes"}, parallel={"tensor_parallel_size": 0})
    assert complaint(data) == (
        "c.yaml: 3 settings are wrong:\n"
        "  cache.log_stats: 'yes': write true or false\n"
        "  cache.blok_size: 8: there is no such key: did you mean block_size?\n"
        "  parallel.tensor_parallel_size: 0: must be at least 1"
    )


def test_an_empty_file_is_called_so() -> None:
    assert complaint(None) == "c.yaml: is empty: start with a section such as model:"


@pytest.mark.parametrize("data", [[], "model", 3])
def test_a_file_without_sections_is_refused(data: object) -> None:
    assert complaint(data) == (
        f"c.yaml: holds {type(data).__name__}, not sections: start with a section such as model:"
    )


def test_a_missing_model_is_named() -> None:
    assert complaint({}) == "c.yaml: model: is missing: add it"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    message = f"{path}: cannot be read (No such file or directory): check the path"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        load_config(path)


def test_a_bare_name_is_a_configuration_that_comes_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepared_names() == sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    assert load_config("cpu_tp2") == load_config(CONFIGS / "cpu_tp2.yaml")
    (tmp_path / "cpu_tp2").write_text("name: 7", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"^cpu_tp2: "):
        load_config("cpu_tp2")  # a file goes first
    named = ": check the path, or use one of the package: "
    with pytest.raises(ConfigurationError, match=f"{named}cpu_chunked_local, cpu_cross_attention"):
        load_config("cpu_tp3")
    with pytest.raises(ConfigurationError, match=f"{named}cpu_mla$"):
        load_config("configs/cpu_mla.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"cache:\n  block_size: 1\n  block_size: 2\n", ":3: is not valid YAML: key 'block_size' "),
        (b"cache: [1,\n", ":2: is not valid YAML: "),
        (b"cache: !!python/object:os.system {}\n", ":1: is not valid YAML: could not determine"),
        (b"\xff\xfe\x00", ": cannot be read (not UTF-8 text)"),
        (
            b"name: 2020-99-99\n",
            ": holds a value that cannot be read (month must be in 1..12): put",
        ),
        (b"name: !!int abc\n", ": holds a value that cannot be read (invalid literal for int() "),
        (
            b"name: !!bool maybe\n",
            ": holds a value that cannot be read ('maybe'): put it in quotes",
        ),
        (b"name: " + b"9" * 5000, ": holds a value that cannot be read (Exceeds the limit "),
        (b"name: " + b"[" * 3000 + b"]" * 3000, ": is nested too deeply: no setting stands that"),
    ],
)
def test_a_file_that_is_no_yaml_is_refused_by_line(
    tmp_path: Path, text: bytes, message: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match=f"^{re.escape(str(path) + message)}"):
        load_config(path)


def test_anchors_may_be_merged_and_overridden(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(
        "model:\n  name: m\n  max_model_len: auto\n  layers:\n"
        "    - &one {kind: full, num_kv_heads: 1, head_size: 8}\n"
        "    - {<<: *one, head_size: 16}\n"
    )
    assert [layer.head_size for layer in load_config(path).model.layers] == [8, 16]


def test_a_configuration_cannot_be_changed_after_the_fact() -> None:
    config = parse_config(plain())
    with pytest.raises(ValueError, match="frozen"):
        config.name = "other"


def test_an_anchor_that_merges_another_may_stand_deeper_than_its_use(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(
        "model:\n  name: m\n  max_model_len: auto\n"
        "  layers: [{num_kv_heads: 1, head_size: 8, kind: full, count: 2}]\n"
        "cache: &one {block_size: 4}\n"
        "unknown: {deep: {deeper: &two {<<: *one, block_size: 8}}}\n"
        "workers: {<<: *two}\n"
    )
    with pytest.raises(ConfigurationError) as caught:
        load_config(path)
    assert "is in line" not in str(caught.value)
    assert "workers.block_size: 8: there is no such key" in str(caught.value)


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config("a\0b")


def test_amounts_of_memory_are_exact_and_bounded() -> None:
    assert parse_bytes("9007199254740993B") == 9007199254740993
    assert parse_bytes("0.1KiB") == 102
    for text in ("9" * 400 + "B", "\u0663KiB", "1e3B", "-1B"):
        with pytest.raises(ConfigurationError, match="is not an amount of memory"):
            parse_bytes(text)
    assert complaint(plain(cache={"memory_per_rank": "8388608TiB"})).endswith(
        ": must be at most 9223372036854775807"
    )


def test_a_value_is_shown_short_however_large_it_is() -> None:
    layers: list[Any] = ["x"]
    for _ in range(40):  # each a list of the one before, nine times over
        layers = [layers] * 9
    assert len(complaint(plain(cahce=layers))) < 400
    assert complaint(plain(cache={"block_size": 10**5000})).startswith("c.yaml: cache.block_size: ")


def test_more_layers_than_a_model_can_have_are_refused() -> None:
    data = plain()
    data["model"]["layers"][0]["count"] = 10**9
    assert complaint(data) == "c.yaml: model.layers[0].count: 1000000000: must be at most 4096"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"disk": {"directory": "/x", "capacity_per_rank": "1MiB"}}, "host_memory_per_rank is not"),
        (
            {"host_memory_per_rank": 4096, "disk": {"directory": "x", "capacity_per_rank": "1MiB"}},
            "directory 'x' is relative",
        ),
        ({"host_memory_per_rank": 4096, "policy": "newest"}, "newest"),
        ({"host_memory_per_rank": 4096, "tier": "tape"}, "tier"),
        ({"host_memory_per_rank": 4096, "swap": "sometimes"}, "'never', 'auto' or 'always'"),
        ({"host_memory_per_rank": 4096, "prefill_tokens_per_s": 0}, "prefill_tokens_per_s"),
    ],
)
def test_tiers_that_cannot_be_meant_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_config(plain(offload=changes))


def test_a_cluster_with_tiers_can_be_recorded() -> None:
    tiers = {"host_memory_per_rank": "1MiB"}
    config = parse_config(plain(offload=tiers, recorder={"directory": "/x"}))
    assert (config.recorder.directory, config.offload.host_memory_per_rank) == ("/x", 1 << 20)


def test_no_configuration_that_comes_with_the_package_keeps_files_where_they_are_cleaned() -> None:
    for name in prepared_names():
        config = load_config(name)
        disk = config.offload.disk
        for directory in (config.recorder.directory, None if disk is None else disk.directory):
            assert directory is None or directory.startswith("~/.cache/kvcache")


def test_a_directory_in_the_home_directory_is_found_without_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/elsewhere")
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert Location.of("~/.cache/kvcache") == Location(home, ".cache/kvcache")
    assert Location.of("~/.cache/kvcache").path == home / ".cache/kvcache"
    assert Location.of("/mnt/a b").path == Path("/mnt/a b")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 3)
    with pytest.raises(ConfigurationError, match="user 2147483645 has none: write it from / on"):
        Location.of("~/.cache")


@pytest.mark.parametrize("silence_s", [0.5, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("kill_s", [None, 0.0, 150.0])
@pytest.mark.parametrize("reattach_s", [0.1, 5.0, 60.0])
@pytest.mark.parametrize("replacement_s", [0.0, 1.0, 600.0])
def test_waits_that_depend_on_each_other_follow_from_a_few(
    silence_s: float, kill_s: float | None, reattach_s: float, replacement_s: float
) -> None:
    set_values = {
        "worker_silence_s": silence_s,
        "reattach_s": reattach_s,
        "replacement_s": replacement_s,
        **({} if kill_s is None else {"worker_kill_s": kill_s}),
    }
    deadlines = DeadlinesConfig(**set_values)
    assert deadlines.step_s > max(deadlines.worker_silence_s, deadlines.reattach_s)
    assert deadlines.forward_s > deadlines.held_up_s
    assert deadlines.return_s > max(deadlines.startup_s, deadlines.replacement_s)
    assert deadlines.labels_s > deadlines.worker_silence_s
    if deadlines.worker_kill_s:
        assert deadlines.worker_silence_s < deadlines.worker_kill_s
        assert deadlines.lost_s == deadlines.worker_kill_s + ENDING_S
        assert deadlines.worker_kill_s < deadlines.held_up_s <= deadlines.lost_s
        assert deadlines.forward_s > deadlines.lost_s
        assert deadlines.labels_s > deadlines.worker_kill_s
    # Derived values count as written ones: a copy has the same.
    assert DeadlinesConfig(**deadlines.model_dump()) == deadlines


def test_a_replay_waits_longer_than_its_requests_wait_for_tiers() -> None:
    config = parse_config(plain(offload={"host_memory_per_rank": "1MiB", "wait_s": 100.0}))
    assert config.stall_s > config.offload.wait_s


def test_a_choice_of_core_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = parse_config(plain(cache={"core": "extents", "block_size": 32}))
    assert config.cache == parse_config(plain(cache={"block_size": 32})).cache
    assert caplog.messages == [
        "cache.core, 'extents' here, is ignored: there is one core now; take it out of the "
        "configuration, the next version refuses it"
    ]
