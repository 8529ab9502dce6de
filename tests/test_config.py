"""Configuration files: the ones that come along, and every way in which one can be wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvcache.config import ClusterConfig, layer_specs, load_config, parse_bytes, parse_config
from kvcache.errors import ConfigurationError
from kvcache.hashing import DEFAULT_HASH_SEED, get_hash_fn
from kvcache.planner import plan_cluster
from kvcache.specs import FullAttentionSpec, SlidingWindowSpec

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
    assert config.content_check.enabled
    assert len(plan.configs) == config.parallel.num_ranks
    assert plan.max_concurrency >= 1
    assert plan.warnings == ()


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


def test_a_configuration_survives_being_plain() -> None:
    config = load_config(CONFIGS / "cpu_hybrid_window.yaml")
    assert parse_config(config.model_dump(mode="json")) == config
    assert ClusterConfig.model_validate_json(config.model_dump_json()) == config


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
        ({"cache": {3: 4}}, "cache[3]: 3: is no text: put the key in quotes, or remove it"),
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
            {"cache": {"memory_per_rank": "3Mb"}},
            "cache.memory_per_rank: '3Mb' is no amount of memory: write a number and one of B, "
            "KiB, MiB, GiB, TiB",
        ),
        (
            {"cache": {"hash_algorithm": "md5"}},
            "cache.hash_algorithm: 'md5': use 'sha256', 'sha256_cbor' or 'xxh3_128'",
        ),
        (
            {"name": "two words"},
            "name: 'two words': use letters, digits, '.', '_' and '-', a letter or digit first",
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
            {"workers": {"copy_engine": "cuda"}},
            "workers: copy_engine is cuda, but device is cpu: set copy_engine to auto",
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
            ".layers[0]: window_tokens is None in a layer of kind sliding_window: say how many "
            "tokens it reads",
        ),
        ({"dtype": "f16"}, ": dtype 'f16' is not known: use one of float32, float16, "),
    ],
)
def test_a_model_that_cannot_be_meant_is_refused(changes: dict[str, Any], message: str) -> None:
    data = plain()
    data["model"].update(changes)
    assert complaint(data).startswith(f"c.yaml: model{message}")


def test_all_problems_are_named_at_once() -> None:
    data = plain(cache={"blok_size": 8, "events": "yes"}, parallel={"tensor_parallel_size": 0})
    assert complaint(data) == (
        "c.yaml: 3 settings are wrong:\n"
        "  cache.events: 'yes': write true or false\n"
        "  cache.blok_size: 8: there is no such key: did you mean block_size?\n"
        "  parallel.tensor_parallel_size: 0: must be at least 1"
    )


@pytest.mark.parametrize("data", [None, [], "model", 3])
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"cache:\n  block_size: 1\n  block_size: 2\n", ":3: is no valid YAML: key 'block_size' "),
        (b"cache: [1,\n", ":2: is no valid YAML: "),
        (b"cache: !!python/object:os.system {}\n", ":1: is no valid YAML: could not determine"),
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
    assert "stands in line" not in str(caught.value)
    assert "workers.block_size: 8: there is no such key" in str(caught.value)


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config("a\0b")


def test_amounts_of_memory_are_exact_and_bounded() -> None:
    assert parse_bytes("9007199254740993B") == 9007199254740993
    assert parse_bytes("0.1KiB") == 102
    for text in ("9" * 400 + "B", "\u0663KiB", "1e3B", "-1B"):
        with pytest.raises(ConfigurationError, match="is no amount of memory"):
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
