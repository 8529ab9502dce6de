"""The layers of each architecture, from the fields of its `config.json`.

One function per family of models, found by `model_type`. The rules are those of the published
models, including the defaults of fields that their files leave out. Refuses contradictory fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvcache.base.errors import shown
from kvcache.config import CrossLayer, Layer, MLALayer
from kvcache.planner.hf_config.blocks import (
    Deployment,
    Heads,
    chosen_layers,
    full,
    mamba_layer,
    num_layers,
    read_heads,
    require_divisible,
    stateless,
    typed_layers,
)
from kvcache.planner.hf_config.fields import MAX_LAYERS, HFFields

ReadLayers = Callable[[HFFields, Deployment], Sequence[Layer]]

_HEADS = ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")


@dataclass(frozen=True)
class Architecture:
    """How to read the layers of one family of models.

    `required`: fields that must be present; `max_len_field`: the field with the longest length.
    """

    read_layers: ReadLayers
    required: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    max_len_field: str = "max_position_embeddings"


def _full_attention(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """Llama and similar: every layer reads everything, unless the file says otherwise."""
    return _typed(fields, deployment, lambda index: "full_attention")


def _mistral(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """Every layer reads the window, if there is one."""
    word = "sliding_attention" if fields.has("sliding_window") else "full_attention"
    return _typed(fields, deployment, lambda index: word)


def _qwen(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """The first `max_window_layers` read everything; so do the others if windows are unused."""
    has_window = fields.flag("use_sliding_window")
    total = num_layers(fields)
    if not has_window and "sliding_attention" in _stated_types(fields, total):
        raise fields.wrong("layer_types has sliding_attention, but use_sliding_window is false")
    start = fields.count("max_window_layers", at_least=0) if has_window else total
    return _typed(
        fields,
        deployment,
        lambda index: "sliding_attention" if index >= start else "full_attention",
    )


def _alternating(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """Gemma 2, GPT-OSS: windows and full attention alternate, beginning with a window."""
    return _typed(fields, deployment, lambda index: _every(2, index, "sliding_attention"))


def _gemma3(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """Every `sliding_window_pattern`-th layer reads everything, the others the window."""
    name = "_sliding_window_pattern"
    if not fields.has(name):
        name = "sliding_window_pattern"
    pattern = fields.count(name)
    types = [_every(pattern, index, "sliding_attention") for index in range(num_layers(fields))]
    stated = _stated_types(fields, len(types))
    if stated and name in fields.values and stated != types:
        raise fields.wrong(
            f"{name} is {pattern}, but layer_types does not have full_attention in every layer "
            f"whose number divides by {pattern}, and only there"
        )
    return _typed(fields, deployment, lambda index: types[index])


def _llama4(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """Layers without rotary positions read everything, the others their chunk."""
    if not fields.has("attention_chunk_size"):
        return _typed(fields, deployment, lambda index: "full_attention")
    total = num_layers(fields)
    interval = fields.count("no_rope_layer_interval")
    is_said = bool(fields.values.get("no_rope_layers"))  # an empty list means the interval, too
    if is_said:
        entries = fields.per_layer("no_rope_layers", total)
        if any(entry not in (0, 1) for entry in entries):
            raise fields.wrong("no_rope_layers has entries other than 0 and 1")
        has_rope = [entry == 1 for entry in entries]
    else:
        has_rope = [(index + 1) % interval != 0 for index in range(total)]
    types = ["chunked_attention" if rope else "full_attention" for rope in has_rope]
    if is_said and fields.has("layer_types") and _stated_types(fields, total) != types:
        raise fields.wrong(
            "no_rope_layers and layer_types contradict each other: layers have chunked_attention "
            "where the one says 1, full_attention where it says 0"
        )
    return _typed(fields, deployment, lambda index: types[index])


def _deepseek(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """Every layer keeps a compressed latent vector, and the part of a key that has positions."""
    require_divisible(fields, "num_attention_heads", deployment)
    size = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim")
    fields.require_size("kv_lora_rank + qk_rope_head_dim", size)
    return [MLALayer(head_size=size)] * num_layers(fields)


def _jamba(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """One layer in `attn_layer_period` has attention, the others a state of the first Mamba.

    The state is the convolution's last inputs, `(channels, d_conv - 1)`, and the recurrence's
    state, `(channels, d_state)`; channels are `mamba_expand` times `hidden_size`.
    """
    period = fields.count("attn_layer_period")
    offset = fields.count("attn_layer_offset", at_least=0)
    if offset >= period:
        raise fields.wrong(f"attn_layer_offset is {offset}, not below attn_layer_period ({period})")
    channels = fields.count("mamba_expand") * fields.count("hidden_size")
    fields.require_size("mamba_expand * hidden_size", channels)
    state = mamba_layer(
        fields,
        deployment,
        [
            (channels, fields.count("mamba_d_conv", at_least=2) - 1),
            (channels, fields.count("mamba_d_state")),
        ],
    )
    attention = full(read_heads(fields, deployment))
    return [attention if index % period == offset else state for index in range(num_layers(fields))]


_NEMOTRON_PATTERN = MappingProxyType({"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"})


def _nemotron_h(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """A letter per layer: M a state of Mamba 2, * attention, - and E nothing.

    The state is the convolution's last inputs, `(channels, conv_kernel - 1)`, and the recurrence's
    state, `(heads, head size, state size)`. Channels are those of the heads and twice those of the
    groups.
    """
    name, spelt = "hybrid_override_pattern", "layers_block_type"
    if not fields.has(name):
        name = spelt
    words = fields.per_layer(name, num_layers(fields))
    meant = [_NEMOTRON_PATTERN.get(str(word)) for word in words]
    if name != spelt and fields.has(spelt) and fields.per_layer(spelt, len(words)) != meant:
        raise fields.wrong(f"{name} and {spelt} contradict each other")
    layers: dict[object, Layer] = {
        "mamba": mamba_layer(fields, deployment, _mamba2_shapes(fields, deployment)),
        "attention": full(read_heads(fields, deployment, _head_size_name(fields))),
        "mlp": stateless(),
        "moe": stateless(),
    }
    if name == "hybrid_override_pattern":
        layers = {letter: layers[word] for letter, word in _NEMOTRON_PATTERN.items()}
    return chosen_layers(fields, name, words, layers)


def _head_size_name(fields: HFFields) -> str:
    return "attention_head_dim" if "attention_head_dim" in fields.values else "head_dim"


def _mamba2_shapes(fields: HFFields, deployment: Deployment) -> list[tuple[int, ...]]:
    """Return the shapes of both states; ranks divide the first size of each."""
    heads, head_size = fields.count("mamba_num_heads"), fields.count("mamba_head_dim")
    groups, state_size = fields.count("n_groups"), fields.count("ssm_state_size")
    if heads % groups:
        raise fields.wrong(f"mamba_num_heads is {heads}, which n_groups ({groups}) cannot divide")
    require_divisible(fields, "mamba_num_heads", deployment)
    ranks = deployment.tensor_parallel_size
    if groups % ranks and ranks % groups:
        raise fields.refused(
            f"n_groups is {groups}, which cannot be spread over {ranks} tensor-parallel ranks: "
            "groups must divide evenly over ranks, or ranks over groups"
        )
    # With more ranks than groups, each rank keeps a whole group, as with one group per rank.
    channels = heads * head_size + 2 * max(groups, ranks) * state_size
    fields.require_size(
        "mamba_num_heads * mamba_head_dim + 2 * n_groups * ssm_state_size", channels
    )
    return [(channels, fields.count("conv_kernel", at_least=2) - 1), (heads, head_size, state_size)]


def _whisper(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """The decoder's layers: attention over its own tokens, and over those of the encoder."""
    heads, size = fields.count("decoder_attention_heads"), fields.count("d_model")
    if size % heads:
        raise fields.wrong(
            f"d_model is {size}, which decoder_attention_heads ({heads}) cannot divide"
        )
    require_divisible(fields, "decoder_attention_heads", deployment)
    total = fields.count("decoder_layers", at_most=MAX_LAYERS)
    own = full(Heads(heads, size // heads), total)
    cross = CrossLayer(
        count=total,
        num_kv_heads=heads,
        head_size=size // heads,
        max_encoder_tokens=fields.count("max_source_positions"),
        beside_previous=True,
    )
    return [own, cross]


def _stated(fields: HFFields, deployment: Deployment) -> Sequence[Layer]:
    """A model of any architecture that states the type of every layer.

    Raises ConfigurationError if another field suggests that layers keep something else.
    """
    for name in _BEYOND_TYPES:
        if fields.values.get(name):
            raise fields.refused(
                f"model_type {fields.text('model_type')} is not known, and its {name} "
                f"({shown(fields.values[name])}) may change what its layers keep: describe the "
                "layers in a configuration of your own"
            )
    types = fields.per_layer("layer_types", num_layers(fields))
    return typed_layers(fields, read_heads(fields, deployment), types)


_BEYOND_TYPES = (
    "kv_lora_rank",
    "num_kv_shared_layers",
    "global_head_dim",
    "num_global_key_value_heads",
    "cross_attention_layers",
    "is_encoder_decoder",
)
"""Fields that change the cache of layers in ways that `layer_types` does not say."""


def _typed(
    fields: HFFields, deployment: Deployment, type_of: Callable[[int], str]
) -> Sequence[Layer]:
    """Return layers of the types in the file, or else by the architecture's rule."""
    total = num_layers(fields)
    types = _stated_types(fields, total) or [type_of(index) for index in range(total)]
    return typed_layers(fields, read_heads(fields, deployment), types)


def _stated_types(fields: HFFields, total: int) -> list[object]:
    return fields.per_layer("layer_types", total) if fields.has("layer_types") else []


def _every(period: int, index: int, otherwise: str) -> str:
    """Return full attention for the last of each `period` layers, `otherwise` for the others."""
    return "full_attention" if (index + 1) % period == 0 else otherwise


_LLAMA = Architecture(_full_attention, _HEADS)
_QWEN = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}
_GEMMA3 = Architecture(
    _gemma3,
    ("num_hidden_layers",),
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)
_LLAMA4 = Architecture(
    _llama4,
    _HEADS,
    {"num_key_value_heads": 8, "no_rope_layer_interval": 4, "attention_chunk_size": 8192},
)
_DEEPSEEK = Architecture(_deepseek, (*_HEADS, "kv_lora_rank", "qk_rope_head_dim"))

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen2": Architecture(_qwen, _HEADS, {**_QWEN, "num_key_value_heads": 32}),
        "qwen2_moe": Architecture(_qwen, _HEADS, {**_QWEN, "num_key_value_heads": 16}),
        "qwen3": Architecture(_qwen, _HEADS, {**_QWEN, "num_key_value_heads": 32, "head_dim": 128}),
        "qwen3_moe": Architecture(_qwen, _HEADS, {**_QWEN, "num_key_value_heads": 4}),
        "mistral": Architecture(
            _mistral, _HEADS, {"num_key_value_heads": 8, "sliding_window": 4096}
        ),
        "mixtral": Architecture(_mistral, _HEADS, {"num_key_value_heads": 8}),
        "gemma2": Architecture(
            _alternating, (*_HEADS, "head_dim", "sliding_window"), {"num_key_value_heads": 4}
        ),
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
        "gpt_oss": Architecture(
            _alternating, (*_HEADS, "head_dim", "sliding_window"), {"num_key_value_heads": 8}
        ),
        "llama4": _LLAMA4,
        "llama4_text": _LLAMA4,
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "jamba": Architecture(
            _jamba,
            (
                *_HEADS,
                "hidden_size",
                "attn_layer_period",
                "attn_layer_offset",
                "mamba_d_conv",
                "mamba_d_state",
                "mamba_expand",
            ),
            {"num_key_value_heads": 8},
        ),
        "nemotron_h": Architecture(
            _nemotron_h,
            (
                *_HEADS,
                "mamba_num_heads",
                "mamba_head_dim",
                "n_groups",
                "ssm_state_size",
                "conv_kernel",
            ),
            {"num_key_value_heads": 8, "head_dim": 128},
        ),
        "whisper": Architecture(
            _whisper,
            ("decoder_layers", "decoder_attention_heads", "d_model", "max_source_positions"),
            max_len_field="max_target_positions",
        ),
    }
)
"""How to read a `model_type`."""

STATED = Architecture(_stated, (*_HEADS, "num_key_value_heads", "head_dim", "layer_types"))
"""How to read an unknown `model_type`: only by what the file states, without guessing."""
