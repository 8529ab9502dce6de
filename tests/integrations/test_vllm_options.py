"""The options of the vLLM connector, without vLLM."""

from __future__ import annotations

import platform
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.integrations.vllm.kv_groups import KVGroups
from kvcache.integrations.vllm.options import ConnectorOptions, engine_setting, require_version


class FullAttentionSpec:
    """Named as vLLM's."""

    block_size = 32
    num_kv_heads = 2
    head_size = 64


class MambaSpec:
    """Named as vLLM's."""

    block_size = 32


class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """Named as vLLM's."""


class MLAAttentionSpec(FullAttentionSpec):
    """Named as vLLM's."""


class SlidingWindowSpec(FullAttentionSpec):
    """Named as vLLM's."""

    sliding_window = 64
    extra_retained_tokens = 0


def config_of(**values: Any) -> Any:
    """Return a model's configuration as transformers has it."""
    return SimpleNamespace(to_dict=lambda: {"hidden_size": 64, **values})


def setting_of(**changes: Any) -> Any:
    """Return the setting of a vLLM configuration with some values changed, `section__key`."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={}, kv_role="kv_both", kv_load_failure_policy="recompute"
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, prefix_caching_hash_algo="sha256", cache_dtype="auto"
        ),
        parallel_config=SimpleNamespace(
            world_size=2,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            data_parallel_rank=0,
        ),
        model_config=SimpleNamespace(
            model="m",
            revision=None,
            code_revision=None,
            quantization=None,
            quantization_config=None,
            dtype="f",
            model_impl="auto",
            disable_sliding_window=False,
            max_model_len=256,
            multimodal_config=None,
            enable_sleep_mode=False,
            hf_config=config_of(),
            hf_overrides={},
        ),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        lora_config=None,
    )
    specs = changes.pop("specs", [FullAttentionSpec()])
    for path, value in changes.items():
        section, _, key = path.rpartition("__")
        setattr(getattr(config, section) if section else config, key, value)
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return engine_setting(config, SimpleNamespace(kv_cache_groups=groups, num_blocks=9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_transfer_config__kv_role": "kv_producer"}, "kv_role is 'kv_producer': set it to"),
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, 'set it to "recompute"'),
        ({"cache_config__enable_prefix_caching": False}, "remove --no-enable-prefix-caching"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "use sha256 or sha256_cbor"),
        (
            {"parallel_config__decode_context_parallel_size": 2},
            "decode_context_parallel_size is 2, ",
        ),
        (
            {"parallel_config__pipeline_parallel_size": 2, "speculative_config": object()},
            "pipeline_parallel_size is 2, and vLLM lets only the last stage store blocks under "
            "speculative decoding: remove --speculative-config",
        ),
        ({"device_config__device_type": "xpu"}, "device is 'xpu', the connector serves cpu and"),
        (
            {"device_config__device_type": "cuda", "model_config__enable_sleep_mode": True},
            "enable_sleep_mode is true, and a sleep would take device memory away during a copy: ",
        ),
        (
            {"specs": [FullAttentionSpec(), MambaSpec()]},
            "FullAttentionSpec, MambaSpec, the connector serves FullAttentionSpec and "
            "SlidingWindowSpec: remove --kv",
        ),
        (
            {"specs": [MambaSpec()], "cache_config__enable_prefix_caching": False},
            "the model has KV cache groups MambaSpec, ",
        ),
        (
            {"specs": [MLAAttentionSpec()]},
            "MLAAttentionSpec, the connector serves FullAttentionSpec and SlidingWindowSpec: "
            "remove --kv-transfer-config",
        ),
        (
            {"specs": [FullAttentionSpec(), ChunkedLocalAttentionSpec()]},
            "FullAttentionSpec, ChunkedLocalAttentionSpec, the connector serves FullAttentionSpec "
            "and SlidingWindowSpec: add --disable-hybrid-kv-cache-manager, or remove",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_remedy(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        setting_of(**changes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nam": "a"}, "nam: 'a': there is no such key: did you mean name?"),
        ({"name": "a b"}, "name: 'a b': use letters, digits"),
        ({"offload": {"host_memory_per_rank": "8GB"}}, "'8GB' is not an amount of memory"),
        ({"offload": {"policy": "newest"}}, "offload.policy: "),
        ({"offload": {"blocks_per_slot": 4}}, "offload.blocks_per_slot: 4: the vLLM connector"),
        (
            {"offload": {"disk": {"directory": "/d", "capacity_per_rank": "1GiB"}}},
            "offload: disk is set, but host_memory_per_rank is not",
        ),
        ({"replica": -1}, "replica: -1: "),
        ([1], "kv_connector_extra_config is [1]: write an object"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(values: object, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        ConnectorOptions.parse(values)
    assert message in str(refused.value)


def test_another_version_is_refused() -> None:
    require_version("0.32.0")
    with pytest.raises(ConfigurationError, match=r"vLLM is version 0\.33\.0, .* install vllm=="):
        require_version("0.33.0")


def test_weights_models_and_layouts_have_fingerprints_of_their_own() -> None:
    extra = "kv_transfer_config__kv_connector_extra_config"
    settings = [
        setting_of(),
        setting_of(**{extra: {"weight_revision": "2"}}),
        setting_of(model_config__model="other"),
        setting_of(parallel_config__world_size=4),
    ]
    found = [setting.fingerprint("layers") for setting in settings]
    found.append(setting_of().fingerprint("other layers"))
    assert len(set(found)) == len(found)
    assert setting_of(**{extra: {"name": "b"}}).fingerprint("layers") == found[0]
    assert len(found[0]) == 64


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "yarn"])
def test_what_decides_bytes_is_in_the_fingerprint_and_limits_are_not(rope_type: str) -> None:
    images = {
        "mm_processor_kwargs": None,
        "language_model_only": False,
        "video_pruning_rate": None,
    }
    smaller = images | {"mm_processor_kwargs": {"max_pixels": 9}}
    rope = config_of(rope_parameters={"full": {"rope_type": rope_type}})
    settings = [
        setting_of(),
        setting_of(load_config__load_format="dummy"),
        setting_of(model_config__multimodal_config=SimpleNamespace(**images)),
        setting_of(model_config__multimodal_config=SimpleNamespace(**smaller)),
        setting_of(model_config__hf_config=config_of(rope_theta=5e5)),
        setting_of(model_config__hf_config=rope),
        setting_of(model_config__hf_config=rope, model_config__max_model_len=512),
    ]
    found = [setting.fingerprint("layers") for setting in settings]
    assert len(set(found)) == len(found)
    same = (
        {"model_config__max_model_len": 512},
        {"model_config__hf_config": config_of(transformers_version="5.1")},
    )
    for changes in same:
        assert setting_of(**changes).fingerprint("layers") == found[0]


def test_what_fingerprints_cover_has_names() -> None:
    config = config_of(rope={"theta": 5e5, "scaling": None}, layers=["full", "window"])
    details = setting_of(
        model_config__hf_config=config,
        model_config__hf_overrides={"layers": ["full", "window"]},
        lora_config=SimpleNamespace(lora_dtype="f"),
    ).details
    assert details["model"] == "m"
    assert details["ranks"] == "2"
    assert details["lora_dtype"] == "f"
    assert details["hf_overrides"] == "{'layers': ['full', 'window']}"
    found = {name: text for name, text in details.items() if name.startswith("hf_config.")}
    assert found == {
        "hf_config.hidden_size": "64",
        "hf_config.layers": '["full", "window"]',
        "hf_config.rope": "an object",
        "hf_config.rope.theta": "500000.0",
        "hf_config.rope.scaling": "null",
    }
    function = setting_of(model_config__hf_overrides=lambda config: config)
    assert function.details["hf_overrides"] == "a function"


def test_processors_of_another_kind_have_memory_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fingerprint = setting_of().fingerprint("layers")
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert setting_of().fingerprint("layers") != fingerprint


def test_an_engine_is_the_replica_that_is_set_or_vllms_own() -> None:
    extra = "kv_transfer_config__kv_connector_extra_config"
    parallel = {
        "parallel_config__data_parallel_size": 4,
        "parallel_config__data_parallel_index": 3,
    }
    assert setting_of().replica == 0
    assert setting_of(**parallel).replica == 3
    assert setting_of(**{extra: {"replica": 0}}, **parallel).replica == 0
    replicas = [setting_of(**{extra: {"replica": i}}) for i in (1, 2)]
    assert [each.replica for each in replicas] == [1, 2]
    assert len({each.fingerprint("layers") for each in replicas}) == 1


def test_groups_are_those_of_vllm() -> None:
    small, large = FullAttentionSpec(), SlidingWindowSpec()
    large.block_size, large.extra_retained_tokens = 96, 2
    groups = setting_of(specs=[small, large]).groups
    assert groups.hash_tokens == 32
    assert groups.hashes_per_block == (1, 3)
    assert [spec.num_skipped_tokens(200) for spec in groups.specs] == [0, 200 - 66 + 1]
    assert groups.num_blocks_between(32, 192) == 5 + 1
    assert groups.fails_whole_requests
    assert setting_of(specs=[large]).groups.fails_whole_requests
    assert not setting_of().groups.fails_whole_requests
    assert setting_of(specs=[large], cache_config__prefix_match_unit=8).groups.hash_tokens == 96
    assert setting_of(specs=[small, large], cache_config__prefix_match_unit=16).groups == KVGroups(
        groups.specs, 16
    )
