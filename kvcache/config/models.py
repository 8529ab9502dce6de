"""The configuration of a cluster, as frozen models that refuse invalid values.

Each part of the package gets the section with its settings. Every number has its unit in its name,
every section except the model has defaults, and an unknown key is an error. The package reads no
environment variable for its settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvcache.base.arguments import check_kind
from kvcache.base.errors import ConfigurationError, shown
from kvcache.base.logs import get_logger
from kvcache.config.deadlines import DeadlinesConfig
from kvcache.config.events import EventsConfig
from kvcache.config.layer_kinds import Layer, LayerConfig
from kvcache.config.offload import OffloadConfig
from kvcache.config.sections import (
    MIB,
    Bytes,
    Count,
    EvictionPolicyName,
    FewThousand,
    List,
    Real,
    Seconds,
    SecondsOrNever,
    Section,
    Share,
    require_directory,
    require_model_len,
)
from kvcache.config.tenants import TenantsConfig
from kvcache.specs import KVCacheSpec, Layout, dtype_size_bytes

MAX_BOUNDS = 64


def require_bounds(value: tuple[float, ...]) -> tuple[float, ...]:
    """Return `value`; raises ConfigurationError unless it rises from above 0."""
    if list(value) != sorted(set(value)) or value[0] <= 0:
        raise ConfigurationError(
            f"{list(value)} are no bounds of buckets: write seconds above 0, each above the one "
            "before"
        )
    return value


Bounds = Annotated[
    tuple[Seconds, ...],
    Field(min_length=1, max_length=MAX_BOUNDS),
    List,
    AfterValidator(require_bounds),
]


class MetricsConfig(Section):
    """Statistics for Prometheus through Ray's metrics, lines in the log, spans.

    All metrics are collected every `interval_s`, between steps. `latency_bounds_s` and
    `age_bounds_s` are the upper bounds of the histograms' buckets. At most `max_tenants` tenants
    have a label of their own; the others are "other" together. A summary line is written to the
    coordinator's log once per `log_interval_s` in which steps ran (0: never). `spans`: each step is
    an OpenTelemetry span (extra `otel`).
    """

    enabled: bool = True
    interval_s: Seconds = 5.0
    latency_bounds_s: Bounds = (
        *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
        *(1.0, 2.5, 10.0),
    )
    age_bounds_s: Bounds = (
        *(0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0),
    )
    max_tenants: Annotated[int, Field(ge=0, le=1000)] = 32
    log_interval_s: SecondsOrNever = 60.0
    spans: bool = False


logger = get_logger(__name__)

MAX_NAME_CHARACTERS = 128
"""Longest cluster name: with a replica's number appended, it names actors and directories."""


class ModelConfig(Section):
    """The cached data per token. `layers` are in the order of the model.

    `max_model_len` "auto": as long as memory allows, up to `max_position_embeddings`.
    """

    name: Annotated[str, Field(min_length=1)]
    max_model_len: Annotated[int | Literal["auto"], BeforeValidator(require_model_len)]
    max_position_embeddings: Count = 1 << 20
    dtype: str = "float16"
    layers: Annotated[tuple[LayerConfig, ...], List]

    @model_validator(mode="after")
    def _says_what_is_kept(self) -> ModelConfig:
        dtype_size_bytes(self.dtype)
        if not self.layers:
            raise ConfigurationError("layers is empty: write at least one entry")
        _place_cross_attention(self.layers)
        return self

    @property
    def num_layers(self) -> int:
        """Layers of the whole model, including those without a cache."""
        return sum(layer.count for layer in self.layers if not layer.is_beside_previous)

    def layers_in_order(self) -> list[tuple[Layer, ...]]:
        """Return the parts of each layer of the model: mostly one entry of `layers`.

        A decoder layer with both self attention and cross attention has two.
        """
        return _place_cross_attention(self.layers)


class CacheConfig(Section):
    """The pool of blocks and how prefixes are found in it.

    `memory_per_rank` None: the free memory that each worker reports. `num_blocks` None: as many as
    fit. `watermark`: share of blocks kept free for running requests. `max_pin_share`: share of
    blocks that pins may hold. `merge_duplicates`: requests that filled blocks with equal content
    share one of them once their steps are complete. `use_eagle`: a hit leaves its last block out,
    because a draft head needs the hidden states there.
    """

    block_size: Count = 16
    memory_per_rank: Bytes | None = None
    num_blocks: Count | None = None
    hash_algorithm: Literal["sha256", "sha256_cbor", "xxh3_128"] = "sha256"
    hash_seed: Annotated[str, Field(min_length=1)] = "vllm-none-hash"
    enable_prefix_caching: bool = True
    eviction_policy: EvictionPolicyName = "lru"
    watermark: Annotated[float, Field(ge=0, lt=1), Real] = 0.0
    max_pin_share: Share = 0.5
    merge_duplicates: bool = False
    use_eagle: bool = False
    disable_hybrid_manager: bool = False
    layout: Layout = "block_first"
    log_stats: bool = True

    @model_validator(mode="before")
    @classmethod
    def _has_one_core(cls, data: Any) -> Any:
        """Drop the key `core`, which was a choice before this version."""
        if not isinstance(data, dict) or "core" not in data:
            return data
        logger.warning(
            "cache.core, %s here, is ignored: there is one core now; take it out of the "
            "configuration, the next version refuses it",
            shown(data["core"]),
        )
        return {key: value for key, value in data.items() if key != "core"}


class ParallelConfig(Section):
    """The number of ranks, and how the model is divided between them.

    `data_parallel_size`: replicas of the whole model, each a cluster of its own with a cache of its
    own, of `num_ranks` ranks.
    """

    tensor_parallel_size: FewThousand = 1
    pipeline_parallel_size: FewThousand = 1
    data_parallel_size: FewThousand = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of one cluster, which has one replica of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class WorkersConfig(Section):
    """The device of a worker, and its resources in Ray."""

    device: Literal["cpu", "cuda"] = "cpu"
    num_cpus_per_rank: Annotated[float, Field(ge=0, allow_inf_nan=False), Real] = 0.1
    num_gpus_per_rank: Annotated[float, Field(ge=0, allow_inf_nan=False), Real] = 0.0

    @model_validator(mode="after")
    def _cuda_needs_gpus(self) -> WorkersConfig:
        if self.device == "cuda" and not self.num_gpus_per_rank:
            raise ConfigurationError(
                "device is cuda, but num_gpus_per_rank is 0: set it to 1, or to a share of a GPU"
            )
        return self


class TransportConfig(Section):
    """Messages between coordinator, workers and clients. `window`: messages without an answer.

    Peers on the coordinator's node use local sockets, others TCP at `bind_host`, or at the node's
    own address if `bind_host` is loopback. `curve` "auto": connections beyond loopback need the
    cluster's keys; "always": all do. At most `max_clients` are attached at a time; another one is
    told so and waits until one detaches, or for `deadlines.step_s`.
    """

    kind: Literal["zmq", "ray", "inprocess"] = "zmq"
    curve: Literal["auto", "always"] = "auto"
    bind_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    window: Count = 64
    max_clients: FewThousand = 64
    max_message_bytes: Annotated[Bytes, Field(ge=MIB)] = 64 * MIB
    resend_s: Seconds = 0.5
    heartbeat_s: Seconds = 1.0


class SchedulerConfig(Section):
    """Limits of one scheduling step: tokens to compute, and running requests."""

    max_num_batched_tokens: Count = 8192
    max_num_seqs: Count = 128

    @model_validator(mode="after")
    def _every_sequence_gets_a_token(self) -> SchedulerConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}), so that some requests would get no token: raise it"
            )
        return self


class ContentCheckConfig(Section):
    """Whether workers write into every block what its tokens demand, and compare every read."""

    enabled: bool = False


class AuditConfig(Section):
    """Whether the labels of all ranks are compared with the coordinator's state while it runs.

    `sample` compares some blocks every `interval_s`, `on` all blocks with every step: for tests.
    """

    mode: Literal["off", "sample", "on"] = "off"
    interval_s: Seconds = 1.0


class RecorderConfig(Section):
    """Whether the coordinator records its steps, for `kvcache replay-record`.

    `directory`: on the coordinator's node; each cluster has a subdirectory of its name; `~/...` is
    the home directory; None: nothing is recorded. Recordings consist of segments of
    `segment_bytes`. The oldest segments are removed to stay within `max_bytes`, but never those of
    the present epoch: when it alone reaches the limit, recording stops until the next epoch.
    Records are written to disk every `flush_s`; with `sync`, each write waits until the disk has
    the data.
    """

    directory: Annotated[str, Field(min_length=1)] | None = None
    segment_bytes: Bytes = 64 * MIB
    max_bytes: Bytes = 1024 * MIB
    flush_s: Seconds = 1.0
    sync: bool = False

    @model_validator(mode="after")
    def _can_be_written(self) -> RecorderConfig:
        if self.directory is not None:
            require_directory(self.directory, "the coordinator")
        if self.max_bytes < 2 * self.segment_bytes:
            raise ConfigurationError(
                f"max_bytes is {self.max_bytes}, less than two segments of segment_bytes "
                f"({self.segment_bytes}): raise it, or lower segment_bytes"
            )
        return self


class ClusterConfig(Section):
    """Everything about one cluster. `name` identifies it; no two clusters have the same."""

    name: Annotated[
        str, Field(max_length=MAX_NAME_CHARACTERS, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    ] = "kvcache"
    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    parallel: ParallelConfig = ParallelConfig()
    workers: WorkersConfig = WorkersConfig()
    transport: TransportConfig = TransportConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    content_check: ContentCheckConfig = ContentCheckConfig()
    audit: AuditConfig = AuditConfig()
    recorder: RecorderConfig = RecorderConfig()
    offload: OffloadConfig = OffloadConfig()
    events: EventsConfig = EventsConfig()
    metrics: MetricsConfig = MetricsConfig()
    tenants: TenantsConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_have_defaults(cls, data: Any) -> Any:
        """Replace null by an empty section: YAML reads a section of comments alone as null."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key == "model"}

    @model_validator(mode="after")
    def _sections_agree(self) -> ClusterConfig:
        self._require_divisible_layers()
        self._require_whole_chunks()
        stages = self.parallel.pipeline_parallel_size
        if stages > self.model.num_layers:
            raise ConfigurationError(
                f"parallel.pipeline_parallel_size is {stages}, but model.layers has only "
                f"{self.model.num_layers} layers: use at most one stage per layer"
            )
        for key in ("worker_silence_s", "client_silence_s"):
            silence_s = getattr(self.deadlines, key)
            if silence_s <= self.transport.heartbeat_s:
                raise ConfigurationError(
                    f"deadlines.{key} is {silence_s}, not more than transport.heartbeat_s "
                    f"({self.transport.heartbeat_s}), so that the living would seem dead: raise it"
                )
        silence_s, resend_s = self.deadlines.worker_silence_s, self.transport.resend_s
        if silence_s <= resend_s:
            raise ConfigurationError(
                f"deadlines.worker_silence_s is {silence_s}, not more than transport.resend_s "
                f"({resend_s}), so that one lost message would make a rank seem dead: raise it"
            )
        return self

    @property
    def stall_s(self) -> float:
        """How long an engine may see no request advance before it gives up: longer than a request
        waits for loads from tiers."""
        return self.deadlines.step_s + self.offload.wait_s

    def _require_divisible_layers(self) -> None:
        size = self.parallel.tensor_parallel_size
        for index, layer in enumerate(self.model.layers):
            problem = layer.indivisible(size)
            if problem:
                raise ConfigurationError(
                    f"parallel.tensor_parallel_size is {size}, but model.layers[{index}] has "
                    f"{problem}"
                )

    def _require_whole_chunks(self) -> None:
        for index, layer in enumerate(self.model.layers):
            problem = layer.misaligned(layer.block_size or self.cache.block_size)
            if problem:
                raise ConfigurationError(f"model.layers[{index}]: {problem}")


def _place_cross_attention(entries: Sequence[Layer]) -> list[tuple[Layer, ...]]:
    """Return the parts of every layer; raises ConfigurationError for parts without a layer."""
    layers: list[tuple[Layer, ...]] = []
    for index, entry in enumerate(entries):
        if not entry.is_beside_previous:
            layers.extend([(entry,)] * entry.count)
            continue
        start = len(layers) - entry.count
        if start < 0 or any(len(parts) > 1 for parts in layers[start:]):
            raise ConfigurationError(
                f"layers[{index}] extends the {entry.count} layers before it, but there are not "
                "that many without cross attention: lower its count, or write beside_previous: "
                "false"
            )
        layers[start:] = [(*parts, entry) for parts in layers[start:]]
    return layers


def layer_specs(config: ClusterConfig) -> list[dict[str, KVCacheSpec]]:
    """Return the specs by layer name for every global rank, `pipeline_rank * tp + tensor_rank`.

    Layers are named `layers.0`, `layers.1`, ... over the whole model, including layers without a
    cache; cross attention in a layer with another attention is `layers.0.cross`. Pipeline stages
    take consecutive layers; if the division leaves a remainder, earlier stages take one more.
    Raises ConfigurationError for sizes that contradict each other.
    """
    check_kind("config", config, ClusterConfig, ConfigurationError)
    layers = config.model.layers_in_order()
    by_rank: list[dict[str, KVCacheSpec]] = []
    for start, end in _stage_ranges(len(layers), config.parallel.pipeline_parallel_size):
        stage: dict[str, KVCacheSpec] = {}
        for index in range(start, end):
            stage |= _named_specs(config, f"layers.{index}", layers[index])
        by_rank.extend(dict(stage) for _ in range(config.parallel.tensor_parallel_size))
    return by_rank


def _stage_ranges(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """Return `[start, end)` of each stage."""
    share, remainder = divmod(num_layers, num_stages)
    ranges = []
    start = 0
    for stage in range(num_stages):
        end = start + share + (stage < remainder)
        ranges.append((start, end))
        start = end
    return ranges


def _named_specs(
    config: ClusterConfig, layer_name: str, parts: Sequence[Layer]
) -> dict[str, KVCacheSpec]:
    """Return the specs of one rank for the layer that `parts` make up; empty if it has none."""
    specs = {}
    for part in parts:
        block_size = part.block_size or config.cache.block_size
        spec = part.spec(block_size, config.model.dtype, config.parallel.tensor_parallel_size)
        if spec is not None:
            specs[f"{layer_name}.{part.kind}" if part.is_beside_previous else layer_name] = spec
    return specs
