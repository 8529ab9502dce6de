"""The plan of one rank.

Only the planner makes it; managers, workers and messages read it. Refuses invalid counts. The
planner checks whether a plan fits a machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from kvcache.base.arguments import as_int, as_texts, as_tuple, check_fields, check_kind
from kvcache.base.errors import ConfigurationError, MalformedMessageError, shown
from kvcache.base.logs import get_logger
from kvcache.specs.attention import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvcache.specs.spec import KVCacheSpec, as_specs
from kvcache.specs.state import MambaSpec

NULL_BLOCK_ID = 0
"""The null block's index in the pool: it is never allocated."""

SPEC_KINDS: Mapping[str, type[KVCacheSpec]] = MappingProxyType(
    {
        spec.kind: spec
        for spec in (
            FullAttentionSpec,
            MLAAttentionSpec,
            SlidingWindowSpec,
            ChunkedLocalAttentionSpec,
            MambaSpec,
            CrossAttentionSpec,
        )
    }
)
"""The kinds that messages may carry. For kinds of your own, pass an extended copy."""


_MOST_LISTED = 4


def spec_from_dict(
    data: object, kinds: Mapping[str, type[KVCacheSpec]] = SPEC_KINDS
) -> KVCacheSpec:
    """Return the spec that `to_dict` made `data` from; raises MalformedMessageError."""
    check_kind("kinds", kinds, Mapping, ConfigurationError)
    kind = data.get("kind") if isinstance(data, dict) else data
    if not isinstance(data, dict) or not isinstance(kind, str) or kind not in kinds:
        raise MalformedMessageError(
            f"a KV cache spec of kind {shown(kind)} is not known: known kinds are "
            f"{', '.join(sorted(kinds))}"
        )
    values = {name: value for name, value in data.items() if name != "kind"}
    made: KVCacheSpec = construct(kinds[kind], values)
    return made


def require_dict(what: str, data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise MalformedMessageError(f"{what}: got {type(data).__name__}, not a dict")
    return data


def construct(cls: type[Any], data: object) -> Any:
    """Build dataclass `cls` from plain values; raises MalformedMessageError if they do not fit."""
    values = require_dict(cls.__name__, data)
    known = {f.name for f in fields(cls)}
    unknown = [name if isinstance(name, str) else shown(name) for name in values.keys() - known]
    if unknown:
        listed = ", ".join(sorted(unknown)[:_MOST_LISTED])
        raise MalformedMessageError(f"{cls.__name__}: unknown fields {listed}")
    try:
        return cls(**values)
    except (TypeError, ConfigurationError) as error:
        raise MalformedMessageError(f"{cls.__name__}: {error}") from error


logger = get_logger(__name__)

Layout = Literal["block_first", "layer_first"]
"""Order of a rank's bytes: all layers of a block together, or all blocks of a layer together."""

LAYOUTS: tuple[Layout, ...] = ("block_first", "layer_first")

MAX_NUM_BLOCKS = 2**31 - 1
"""Most blocks of a pool: block ids travel as int32."""


@dataclass(frozen=True)
class KVCacheTensor:
    """One pool: a page per block, shared by one layer of each KV cache group.

    Byte `b` of block `n` lies at `offset + n * block_stride + b` of the rank's allocation.
    `size`: bytes of all pages of this pool. `layer_stride`: bytes from this pool's page of a block
    to the next pool's page of the same block.
    """

    size: int
    shared_by: tuple[str, ...]
    offset: int = 0
    block_stride: int = 0
    layer_stride: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_by", _as_names("shared_by", self.shared_by))
        for name in ("size", "offset", "block_stride", "layer_stride"):
            check_fields(self, as_int, name, at_least=0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a message."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "shared_by": list(self.shared_by)}

    @classmethod
    def from_dict(cls, data: object) -> KVCacheTensor:
        """Return what `to_dict` made `data` from; raises MalformedMessageError."""
        made: KVCacheTensor = construct(cls, data)
        return made


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table, and the spec that serves all of them.

    `layer_names` are those of one rank. A rank without layers of the group has an empty group,
    so that group ids mean the same on every rank.
    """

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_names", _as_names("layer_names", self.layer_names))
        check_kind("kv_cache_spec", self.kv_cache_spec, KVCacheSpec, ConfigurationError)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a message."""
        return {
            "layer_names": list(self.layer_names),
            "kv_cache_spec": self.kv_cache_spec.to_dict(),
        }

    @classmethod
    def from_dict(
        cls, data: object, kinds: Mapping[str, type[KVCacheSpec]] = SPEC_KINDS
    ) -> KVCacheGroupSpec:
        """Return what `to_dict` made `data` from; raises MalformedMessageError."""
        values = require_dict("KVCacheGroupSpec", data)
        spec = spec_from_dict(values.get("kv_cache_spec"), kinds)
        made: KVCacheGroupSpec = construct(cls, {**values, "kv_cache_spec": spec})
        return made


@dataclass(frozen=True)
class KVCacheConfig:
    """The plan of one rank: the number of blocks, their places in memory, and the groups.

    `num_blocks` counts the null block and is the same on every rank, as are the capacities of the
    host and disk tiers, `host_blocks` and `disk_blocks`.
    """

    num_blocks: int
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    host_blocks: int = 0
    disk_blocks: int = 0
    layout: Layout = "block_first"

    def __post_init__(self) -> None:
        check_fields(self, as_tuple, "kv_cache_tensors", kind=KVCacheTensor)
        check_fields(self, as_tuple, "kv_cache_groups", kind=KVCacheGroupSpec)
        for name in ("num_blocks", "host_blocks", "disk_blocks"):
            check_fields(self, as_int, name, at_least=0)
        if self.num_blocks > MAX_NUM_BLOCKS:
            raise ConfigurationError(
                f"num_blocks is {shown(self.num_blocks)}, but block ids are int32: use at most "
                f"{MAX_NUM_BLOCKS} blocks, or larger ones"
            )
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise ConfigurationError(
                f"layout {shown(self.layout)}: use one of {', '.join(LAYOUTS)}"
            )

    @property
    def total_size_bytes(self) -> int:
        """Bytes of this rank's allocation."""
        return sum(tensor.size for tensor in self.kv_cache_tensors)

    @property
    def block_size_bytes(self) -> int:
        """Bytes that one block takes on this rank, over all pools."""
        return self.total_size_bytes // self.num_blocks if self.num_blocks else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a message."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values["kv_cache_tensors"] = [tensor.to_dict() for tensor in self.kv_cache_tensors]
        values["kv_cache_groups"] = [group.to_dict() for group in self.kv_cache_groups]
        return values

    @classmethod
    def from_dict(
        cls, data: object, kinds: Mapping[str, type[KVCacheSpec]] = SPEC_KINDS
    ) -> KVCacheConfig:
        """Return what `to_dict` made `data` from; raises MalformedMessageError."""
        values = dict(require_dict("KVCacheConfig", data))
        for name in ("kv_cache_tensors", "kv_cache_groups"):
            if not isinstance(values.get(name), list | tuple):
                raise MalformedMessageError(f"KVCacheConfig: {name} is not a list")
        values["kv_cache_tensors"] = [
            KVCacheTensor.from_dict(tensor) for tensor in values["kv_cache_tensors"]
        ]
        values["kv_cache_groups"] = [
            KVCacheGroupSpec.from_dict(group, kinds) for group in values["kv_cache_groups"]
        ]
        made: KVCacheConfig = construct(cls, values)
        return made


def require_eagle_support(specs: Iterable[KVCacheSpec]) -> None:
    """Raise ConfigurationError if a hit of some kind is not valid without its last block."""
    for spec in as_specs(specs):
        if not spec.supports_eagle:
            raise ConfigurationError(
                f"EAGLE cannot be used with KV cache groups of kind {spec.kind!r}, whose hits do "
                "not hold without their last block: turn use_eagle off"
            )


def can_cache_prefixes(specs: Sequence[KVCacheSpec]) -> bool:
    """Return whether every group can start requests from cached blocks; warn if some cannot."""
    listed = as_specs(specs)
    unable = sorted({spec.kind for spec in listed if not spec.can_prefix_cache})
    if unable:
        logger.warning(
            "prefix caching is off: KV cache groups of kind %s cannot start from cached blocks",
            ", ".join(unable),
        )
    return bool(listed) and not unable


_NO_LISTS = (str, Mapping, Set, np.ndarray)
"""Iterable types that do not fix the order of names."""


def _as_names(what: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return `names` as a tuple; raises ConfigurationError unless it lists different names."""
    is_list = isinstance(names, Iterable) and not isinstance(names, _NO_LISTS)
    listed = tuple(names) if is_list else ()
    if not is_list or not all(isinstance(name, str) for name in listed):
        raise ConfigurationError(f"{what} is {shown(names)}: give a list of layer names")
    listed = as_texts(what, listed, ConfigurationError)
    twice = [name for name, count in Counter(listed).items() if count > 1]
    if twice:
        raise ConfigurationError(f"{what} has {twice[0]} more than once: name every layer once")
    return listed
