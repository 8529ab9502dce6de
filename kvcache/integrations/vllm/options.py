"""The options of the connector, and what it asks of the engine that it runs in.

`kv_connector_extra_config` becomes `ConnectorOptions`; vLLM's own configuration becomes an
`EngineSetting`. Both are checked when the connector is made, so that what cannot be served ends
the engine at start, with one sentence. Imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, ValidationError, model_validator

from kvcache.base.errors import ConfigurationError, shown
from kvcache.config.events import EventsConfig
from kvcache.config.offload import OffloadConfig
from kvcache.config.problems import refusal
from kvcache.config.sections import Seconds, Section, require_directory
from kvcache.integrations.vllm.kv_groups import KVGroups, kv_groups
from kvcache.sharing.access import require_guarded, require_name

SUPPORTED_VLLM = "0.32."
LABELS = "3"
"""Which labels slots and files have. Those of another number are not read."""


SERVED_OFFLOAD_KEYS = frozenset(
    {
        "host_memory_per_rank",
        "policy",
        "store_after",
        "spare_share",
        "min_load_tokens",
        "wait_s",
        "job_s",
        "keeps_memory",
        "verify",
        "copy_priority",
        "copy_threads",
        "disk",
    }
)
"""Of the section `offload`, what the connector obeys. Any other key that is set is refused."""

MODEL_CONFIG = "hf_config"
MAX_REPLICA = 9999
_LENGTH_ROPES = frozenset({"dynamic", "longrope", "su", "yarn", "deepseek_yarn"})
_HASHES = ("sha256", "sha256_cbor")
_NAME = Field(min_length=1, max_length=40, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


def _absolute(path: str) -> str:
    require_directory(path, "engines")
    return path


_Place = Annotated[str, Field(min_length=1), AfterValidator(_absolute)]


class CoordinatorOptions(Section):
    """The coordinator of several nodes, and how to reach it.

    `address`: where it listens. `keys`: a file of keys, the same on every node; without it, all
    must be on one machine. `ray`: instead of both, its name on the Ray cluster. `answer_s`: how
    long a request waits for its answer. `silence_s`: how long a rank waits for each block of
    another node. `host`: the address of this node for others; by default the one from which it
    reaches the coordinator. `events`: the coordinator publishes what this engine's memory and files
    hold.
    """

    address: Annotated[str, Field(max_length=200)] | None = None
    keys: _Place | None = None
    ray: Annotated[str, AfterValidator(require_name)] | None = None
    answer_s: Seconds = 0.2
    silence_s: Seconds = 2.0
    host: Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+)$")] | None = None
    events: bool = False

    @model_validator(mode="after")
    def _is_guarded(self) -> CoordinatorOptions:
        if (self.address is None) == (self.ray is None):
            raise ValueError(
                "set address, where the coordinator listens, or ray, its name on the Ray cluster: "
                "one of them"
            )
        if self.ray is not None and self.keys is not None:
            raise ValueError("keys: Ray hands out those of a coordinator on Ray: remove it")
        if self.address is not None:
            require_guarded(self.address, self.keys is not None)
        if self.host is not None:
            if self.host == "0.0.0.0" or self.host.strip("[]0:") == "":
                raise ValueError(
                    f"host {self.host!r} is every address of this node: other nodes connect to it, "
                    "so set one that they can reach"
                )
            require_guarded(f"tcp://{self.host}:1", self.ray is not None or self.keys is not None)
        return self


class ConnectorOptions(Section):
    """What stands in `kv_connector_extra_config`.

    `name`: of the engine on its node; the next engine of that name adopts the memory. `replica`:
    which of the engines of that name it is; without one, vLLM's data parallel index.
    `weight_revision`: change it whenever weights change under the same model name.
    `adopt_after_reset`: weights never change in a running engine, so the next one may use what was
    stored after a reset. `offload`: as in a cluster's configuration; without
    `host_memory_per_rank`, the ranks of an engine take an eighth of the node's memory together.
    `idle_memory_s`: how long the memory is kept when no engine uses it. `is_asynchronous`: loads
    and stores run in another thread while steps go on; otherwise in the steps. `events`: a
    publisher of what the tiers hold, as in a cluster's configuration. `record`: a directory for
    traces of the requests that the engine serves. `coordinator`: engines on several nodes share
    what their memories hold.
    """

    name: Annotated[str, _NAME] = "vllm"
    replica: Annotated[int, Field(ge=0, le=MAX_REPLICA)] | None = None
    weight_revision: Annotated[str, Field(max_length=200)] = ""
    adopt_after_reset: bool = False
    offload: OffloadConfig = OffloadConfig()
    idle_memory_s: Seconds = 3600.0
    is_asynchronous: bool = True
    events: EventsConfig = EventsConfig()
    record: _Place | None = None
    coordinator: CoordinatorOptions | None = None

    @staticmethod
    def parse(values: object) -> ConnectorOptions:
        """Return the options in plain `values`; raises ConfigurationError that names every wrong
        key, its value and the remedy."""
        source = "kv_connector_extra_config"
        if not isinstance(values, dict):
            raise ConfigurationError(f"{source} is {shown(values)}: write an object of options")
        try:
            options = ConnectorOptions.model_validate(values)
        except ValidationError as error:
            raise refusal(source, ConnectorOptions, error) from error
        if options.events.curve != "never":
            raise ConfigurationError(
                f"{source}: events.curve: {shown(options.events.curve)}: an engine has no keys for "
                "followers: set it to never"
            )
        if options.coordinator is not None:
            if options.coordinator.events and options.events.enabled:
                raise ConfigurationError(
                    f"{source}: events.enabled: true: coordinator.events has the same published by "
                    "the coordinator: remove one of them"
                )
            if options.coordinator.events and options.events.topic is not None:
                raise ConfigurationError(
                    f"{source}: events.topic: {shown(options.events.topic)}: engines with the same "
                    "options need different topics, and the coordinator tells engines apart by "
                    "them: remove it"
                )
            for key, value in (("keeps_memory", False), ("verify", "never")):
                if getattr(options.offload, key) == value:
                    raise ConfigurationError(
                        f"{source}: offload.{key}: {shown(value)}: other nodes could not use this "
                        f"memory: remove it, or remove coordinator"
                    )
        unserved = sorted(options.offload.model_fields_set - SERVED_OFFLOAD_KEYS)
        if unserved:
            key = unserved[0]
            raise ConfigurationError(
                f"{source}: offload.{key}: {shown(getattr(options.offload, key))}: the vLLM "
                f"connector does not serve it: remove it, served are "
                f"{', '.join(sorted(SERVED_OFFLOAD_KEYS))}"
            )
        return options


@dataclass(frozen=True)
class EngineSetting:
    """What the connector needs of vLLM's configuration.

    `model_identity` is all that decides which bytes a block holds, but for the tensors' shapes;
    `named_identity` is the same by name, and what it was derived from. Keys of the model's
    configuration begin with `MODEL_CONFIG`.
    """

    options: ConnectorOptions
    model_identity: str
    groups: KVGroups
    num_blocks: int
    num_ranks: int
    replica: int = 0
    model: str = ""
    named_identity: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def about(self) -> str:
        """What decides which bytes a block holds, in words: not all of it."""
        return (
            f"model {self.model!r}, weight_revision {self.options.weight_revision!r}, "
            f"{self.num_ranks} {'rank' if self.num_ranks == 1 else 'ranks'}"
        )

    @property
    def block_tokens(self) -> int:
        """Tokens of one of vLLM's block hashes."""
        return self.groups.hash_tokens

    @property
    def details(self) -> dict[str, str]:
        """By name, all that `fingerprint` covers but layers."""
        return {
            **self.named_identity,
            "labels": LABELS,
            "KV cache groups": str(self.groups),
            "ranks": str(self.num_ranks),
        }

    def fingerprint(self, layers: str) -> str:
        """Return the hex digest under which a rank's memory is believed: of another model, weight
        revision or layout it differs. `layers` says names, shapes and types of the tensors, and how
        the processor has them laid out."""
        told = f"{LABELS}|{self.model_identity}|{self.groups}|{self.num_ranks}|{layers}"
        return hashlib.sha256(told.encode()).hexdigest()


def require_version(version: str) -> None:
    """Raise ConfigurationError unless this vLLM is one whose connector interface was tried."""
    if not version.startswith(SUPPORTED_VLLM):
        raise ConfigurationError(
            f"vLLM is version {version}, kvcache's connector serves {SUPPORTED_VLLM}x: install "
            f"vllm=={SUPPORTED_VLLM}0, or remove --kv-transfer-config"
        )


def engine_setting(vllm_config: Any, kv_cache_config: Any) -> EngineSetting:
    """Return what matters of vLLM's configuration.

    Raises ConfigurationError for an option that is wrong and for what the connector cannot serve
    yet; the message says what, the value and the remedy.
    """
    transfer = vllm_config.kv_transfer_config
    options = ConnectorOptions.parse(transfer.kv_connector_extra_config)
    if transfer.kv_role != "kv_both":
        raise ConfigurationError(f'kv_role is {transfer.kv_role!r}: set it to "kv_both"')
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigurationError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, and a load may fail: "
            'set it to "recompute"'
        )
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    groups = kv_groups(kv_cache_config, getattr(cache, "prefix_match_unit", None))
    if not cache.enable_prefix_caching:  # vLLM's default for models whose groups are not served
        raise ConfigurationError(
            "prefix caching is off, and blocks are found by its hashes: remove "
            "--no-enable-prefix-caching"
        )
    if cache.prefix_caching_hash_algo not in _HASHES:
        raise ConfigurationError(
            f"prefix_caching_hash_algo is {cache.prefix_caching_hash_algo!r}, whose hashes differ "
            f"from process to process: use {' or '.join(_HASHES)}"
        )
    for flag in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, flag, 1)
        if size != 1:
            raise ConfigurationError(f"{flag} is {size}, the connector serves 1: set it to 1")
    _require_device(str(vllm_config.device_config.device_type), vllm_config.model_config)
    if vllm_config.speculative_config is not None and parallel.pipeline_parallel_size > 1:
        raise ConfigurationError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, and vLLM lets only the "
            "last stage store blocks under speculative decoding: remove --speculative-config, or "
            "set it to 1"
        )
    identity = _model_identity(vllm_config, options.weight_revision)
    return EngineSetting(
        options=options,
        model_identity="|".join(identity.values()),
        groups=groups,
        num_blocks=int(kv_cache_config.num_blocks),
        num_ranks=int(parallel.world_size),
        replica=_replica(options, parallel),
        model=str(vllm_config.model_config.model),
        named_identity=_named(identity, vllm_config.model_config.hf_overrides),
    )


def _require_device(device: str, model: Any) -> None:
    """Raise ConfigurationError for a device whose memory the connector cannot copy.

    vLLM says "cuda" of ROCm, too. A sleep takes the memory of blocks away, and vLLM does not wait
    for the connector's copies.
    """
    named = "rocm" if device == "cuda" and torch.version.hip is not None else device
    if named not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"device is {named!r}, the connector serves cpu and cuda: remove --kv-transfer-config"
        )
    if device == "cuda" and model.enable_sleep_mode:
        raise ConfigurationError(
            "enable_sleep_mode is true, and a sleep would take device memory away during a copy: "
            "remove --enable-sleep-mode, or remove --kv-transfer-config"
        )


def _model_identity(vllm_config: Any, weight_revision: str) -> dict[str, str]:
    """Return, by name, all that decides which bytes the blocks of a prompt hold, but for the
    layout.

    vLLM's own hash of its configuration is for compiled graphs: it changes with limits that decide
    no byte, and leaves out how weights are loaded and images are processed.

    The model's configuration has all keys, those with default values, too. Which values are
    defaults, the version of transformers decides, and the model's code in vLLM may read a key that
    is there otherwise than one that is not.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_config.to_dict()
    config.pop("transformers_version", None)
    parts = {
        "model": model.model,
        "revision": model.revision,
        "code_revision": model.code_revision,
        "weight_revision": weight_revision,
        "quantization": model.quantization,
        "quantization_config": model.quantization_config,
        "dtype": model.dtype,
        "model_impl": model.model_impl,
        "disable_sliding_window": model.disable_sliding_window,
        "cache_dtype": cache.cache_dtype,
        "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
        "load_format": vllm_config.load_config.load_format,
        "machine": platform.machine(),
        MODEL_CONFIG: json.dumps(config, sort_keys=True, default=str),
    }
    if _depends_on_length(config):
        parts["max_model_len"] = model.max_model_len
    images = model.multimodal_config
    if images is not None:
        for name in ("mm_processor_kwargs", "language_model_only", "video_pruning_rate"):
            parts[name] = getattr(images, name)
    if vllm_config.lora_config is not None:
        parts["lora_dtype"] = vllm_config.lora_config.lora_dtype
    return {name: str(part) for name, part in parts.items()}


def _named(identity: Mapping[str, str], overrides: object) -> dict[str, str]:
    """Return an identity with a name for each key of the model's configuration, and with the
    overrides in it."""
    named = {**identity, "hf_overrides": "a function" if callable(overrides) else str(overrides)}

    def add(name: str, value: object) -> None:
        named[name] = json.dumps(value) if not isinstance(value, dict) else "an object"
        for key, each in value.items() if isinstance(value, dict) else ():
            add(f"{name}.{key}", each)

    add(MODEL_CONFIG, json.loads(named.pop(MODEL_CONFIG)))
    return named


def _depends_on_length(config: Any) -> bool:
    """Say whether a RoPE of a model's plain configuration may depend on the model's length."""
    if not isinstance(config, dict):
        return False
    kinds = {str(config.get("rope_type")), str(config.get("type"))}
    return bool(kinds & _LENGTH_ROPES) or any(map(_depends_on_length, config.values()))


def _replica(options: ConnectorOptions, parallel: Any) -> int:
    """Return the replica that is set, or vLLM's number of this engine under data parallelism.

    That is `data_parallel_index`: vLLM sets `data_parallel_rank` to 0 in replicas that compute
    independently.
    """
    return options.replica if options.replica is not None else int(parallel.data_parallel_index)
