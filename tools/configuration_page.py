"""The configuration reference, made from the models that read configurations.

A section's docstring says what its keys mean; types, limits and defaults come from its fields. Run
`python -m tools.configuration_page` after changing a model.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvcache.config import ClusterConfig
from kvcache.config.layer_kinds import LAYER_KINDS
from kvcache.config.sections import BYTE_UNITS, MAX_COUNT
from kvcache.policies import EVICTION_POLICIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

_HEAD = """# Configuration

One YAML file describes a cluster. Everything but `model` has a default; a key that is not known is
an error, and so is a value of another type. `kvcache plan --config FILE` says what a file means
without starting anything. `configs/` has one for each kind of model. Amounts of memory are written
with a unit: `512MiB`, `1.5GiB`.

```yaml
name: chat
model:
  name: llama
  max_model_len: 8192
  layers:
    - {kind: full, count: 32, num_kv_heads: 8, head_size: 128}
parallel: {tensor_parallel_size: 4}
```

This page is made from the models in `kvcache/config/` (`python -m tools.configuration_page`).
"""


AMOUNT = "a share from `0.0` to `1.0`, written with a point, or a whole number of blocks"
CHECKED = {
    "parse_memory": "an amount of memory",
    "require_policy": ", ".join(f"`{policy}`" for policy in EVICTION_POLICIES),
    "require_amount": AMOUNT,
    "require_amounts": f"{AMOUNT}; or a section with one for each tier",
    "require_model_len": "a number of tokens, at least 1, or `auto`",
}
"""Descriptions of values, by the name of the function that checks them."""


def configuration_page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD, _section("The file", "", ClusterConfig)]
    for key, model in _sections(ClusterConfig, ""):
        parts.append(_section(f"`{key}`", key, model))
    parts.append("## Kinds of layers\n\nEntries of `model.layers`, told apart by `kind`.\n")
    for kind, model in LAYER_KINDS.items():
        parts.append(_section(f"`kind: {kind}`", "", model, level=3))
    return "\n".join(parts)


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        for part in _models_in(field.annotation):
            yield f"{prefix}{name}", part
            yield from _sections(part, f"{prefix}{name}.")


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a field of this type is, or may be. Layers have their own part."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []


def _section(title: str, prefix: str, model: type[BaseModel], level: int = 2) -> str:
    rows = [
        f"| `{name}` | {_type_text(field)} | {_default_text(field)} |"
        for name, field in model.model_fields.items()
        if not (_models_in(field.annotation) and not prefix and model is ClusterConfig)
        or field.is_required()
    ]
    text = " ".join(
        line.strip() for line in (model.__doc__ or "").strip().split("\n\n")[0].split("\n")
    )
    rest = [
        " ".join(line.strip() for line in paragraph.split("\n"))
        for paragraph in (model.__doc__ or "").strip().split("\n\n")[1:]
    ]
    lines = [f"{'#' * level} {title}", "", text, ""]
    for paragraph in rest:
        lines += [paragraph, ""]
    return "\n".join([*lines, "| key | value | default |", "|---|---|---|", *rows, ""])


def _type_text(field: FieldInfo) -> str:
    return _described(field.annotation, field.metadata)


def _described(annotation: Any, metadata: list[Any]) -> str:
    """Return the allowed values of a type with such metadata."""
    for item in metadata:
        text = CHECKED.get(getattr(getattr(item, "func", None), "__name__", ""))
        if text is not None:
            return text
    text = _plain_type(annotation)
    limits = _limits_text(metadata, "entries" if text == "a list" else "characters")
    return f"{text}{', ' + limits if limits else ''}"


def _plain_type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{_value_text(value)}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        parts = [_plain_type(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(parts)
    if origin is tuple:
        return "a list"
    if hasattr(annotation, "__metadata__"):
        return _described(get_args(annotation)[0], _flat(annotation.__metadata__))
    if origin is dict:
        return "names, each with a section like `default`"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section"
    return {int: "a whole number", float: "a number", str: "text", bool: "`true`, `false`"}.get(
        annotation, str(annotation)
    )


def _flat(metadata: tuple[Any, ...]) -> list[Any]:
    return [inner for item in metadata for inner in getattr(item, "metadata", [item])]


def _limits_text(metadata: list[Any], unit: str) -> str:
    parts: list[str] = []
    for item in metadata:
        if isinstance(item, Ge):
            parts.append(f"at least {_number(item.ge)}")
        elif isinstance(item, Gt):
            parts.append(f"above {_number(item.gt)}")
        elif isinstance(item, Le) and int(float(str(item.le))) < MAX_COUNT:
            parts.append(f"at most {_number(item.le)}")
        elif isinstance(item, Lt):
            parts.append(f"below {_number(item.lt)}")
        elif isinstance(item, MaxLen):
            parts.append(f"at most {item.max_length} {unit}")
        elif isinstance(item, MinLen) and item.min_length > 1:
            parts.append(f"at least {item.min_length} {unit}")
    return ", ".join(parts)


def _number(value: Any) -> str:
    return f"{value:,.0f}" if value >= 10_000 else str(value)


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "**must be set**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "not set"
    if isinstance(value, BaseModel):
        return "its defaults"
    checks = {getattr(getattr(item, "func", None), "__name__", "") for item in field.metadata}
    if "parse_memory" in checks:
        return f"`{_memory_text(value)}`"
    if checks & {"require_amount", "require_amounts"}:
        return f"`{value}`"  # 1.0 is all, 1 a single block
    return f"`{_value_text(value)}`"


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value_text, value)) + "]"
    return str(value)


def _memory_text(num_bytes: int) -> str:
    """Return bytes in the largest unit that leaves a whole number."""
    for unit, size in reversed(BYTE_UNITS.items()):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser("python -m tools.configuration_page", description=__doc__).parse_args()
    PAGE.write_text(configuration_page(), "utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
