"""Specs as plain values for messages and files, and back.

Invalid values raise MalformedMessageError. For kinds of your own, pass a mapping that has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from kvcache.base.arguments import check_kind
from kvcache.base.errors import ConfigurationError, MalformedMessageError, shown
from kvcache.specs.attention import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvcache.specs.spec import KVCacheSpec
from kvcache.specs.state import MambaSpec

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
