"""From a model's published `config.json` to a configuration that can be planned and launched.

An alternative to YAML files; both make a `ClusterConfig`. Reads only the file: no weights, no
network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcache.base.arguments import as_int, check_fields, check_kind
from kvcache.base.errors import ConfigurationError, shown
from kvcache.config import ClusterConfig, ModelConfig, parse_config
from kvcache.planner.hf_config.architectures import ARCHITECTURES, STATED, Architecture
from kvcache.planner.hf_config.blocks import CacheMode, Deployment, in_runs
from kvcache.planner.hf_config.fields import HFFields
from kvcache.specs import MAMBA_CACHE_MODES
from kvcache.specs.units import dtype_name


@dataclass(frozen=True)
class HFChoices:
    """Settings that a `config.json` does not have.

    `max_model_len` "auto": as long as memory allows, up to the model's longest length. `dtype`
    None: keys and values have the model's. `mamba_cache_mode` "align": requests can start from
    cached states. Raises ConfigurationError for choices that are invalid for every model.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int | str = "auto"
    dtype: str | None = None
    mamba_cache_mode: str = "none"

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            check_fields(self, as_int, name, at_least=1)
        if not isinstance(self.max_model_len, str):  # the section `model` checks texts
            check_fields(self, as_int, "max_model_len", at_least=1)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        mode: object = self.mamba_cache_mode
        if not isinstance(mode, str) or mode not in MAMBA_CACHE_MODES:
            raise ConfigurationError(
                f"mamba_cache_mode is {shown(mode)}: use one of {', '.join(MAMBA_CACHE_MODES)}"
            )


def model_from_hf_config(
    source: str | Path | Mapping[str, object], choices: HFChoices | None = None
) -> ModelConfig:
    """Return the layers and lengths of a `config.json`: its path, or its parsed contents.

    Sizes are those of the whole model, and can be divided over `choices.tensor_parallel_size`
    ranks. Raises ConfigurationError that names fields which are missing, contradict each other, or
    contradict the choices.
    """
    return cluster_from_hf_config(source, choices).model


def cluster_from_hf_config(
    source: str | Path | Mapping[str, object],
    choices: HFChoices | None = None,
    **sections: Mapping[str, object],
) -> ClusterConfig:
    """Return the configuration of a cluster that serves the model of a `config.json`.

    `sections`: sections other than `model` and `parallel`, as in a YAML file. Raises the errors of
    `model_from_hf_config`, and ConfigurationError for invalid settings.
    """
    chosen = HFChoices() if choices is None else choices
    check_kind("choices", chosen, HFChoices, ConfigurationError)
    fields = HFFields.read(source)
    data: dict[str, object] = {
        "model": _model(fields, chosen),
        "parallel": {
            "tensor_parallel_size": chosen.tensor_parallel_size,
            "pipeline_parallel_size": chosen.pipeline_parallel_size,
        },
    }
    return parse_config({**data, **sections}, fields.source)


def _model(fields: HFFields, choices: HFChoices) -> dict[str, object]:
    """Return the section `model`, in plain values."""
    architecture = _architecture_of(fields)
    fields = fields.with_defaults(architecture.defaults)
    dtype = _model_dtype(fields, choices)
    cache_mode: CacheMode = "align" if choices.mamba_cache_mode == "align" else "none"
    deployment = Deployment(choices.tensor_parallel_size, cache_mode, dtype)
    layers = in_runs(architecture.read_layers(fields, deployment))
    return {
        "name": _name_of(fields),
        "max_model_len": choices.max_model_len,
        "max_position_embeddings": fields.count(architecture.max_len_field),
        "dtype": choices.dtype or dtype,
        "layers": [layer.model_dump() for layer in layers],
    }


def _architecture_of(fields: HFFields) -> Architecture:
    """Return the file's architecture; raises ConfigurationError that names missing fields."""
    if not fields.has("model_type"):
        raise fields.wrong("model_type is missing, so that it is not known which fields matter")
    model_type = fields.text("model_type")
    known = ARCHITECTURES.get(model_type)
    architecture = known or STATED
    required = (*architecture.required, architecture.max_len_field)
    missing = fields.with_defaults(architecture.defaults).missing(dict.fromkeys(required))
    if not missing:
        return architecture
    if known is None:
        raise ConfigurationError(
            f"{fields.source}: model_type {model_type} is not known, and of the fields that would "
            f"say what its layers keep {', '.join(missing)} are missing: add them, or describe the "
            f"layers in a configuration of your own (known are {', '.join(ARCHITECTURES)})"
        )
    raise fields.wrong(f"of the fields of {model_type} {', '.join(missing)} are missing")


def _model_dtype(fields: HFFields, choices: HFChoices) -> str:
    """Return the dtype of the model's tensors, of its states and, by default, of K and V."""
    stated = {fields.dtype(name) for name in ("dtype", "torch_dtype") if fields.has(name)}
    if len(stated) > 1:
        raise fields.wrong(f"dtype and torch_dtype contradict each other: {sorted(stated)}")
    if not stated and choices.dtype is None:
        raise fields.refused(
            "neither dtype nor torch_dtype is in it: choose a dtype, such as bfloat16"
        )
    return next(iter(stated), choices.dtype or "")


def _name_of(fields: HFFields) -> str:
    name = "_name_or_path" if fields.values.get("_name_or_path") else "model_type"
    return fields.text(name)
