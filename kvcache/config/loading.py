"""From a YAML file to a `ClusterConfig`, or to an error that says what to change.

Every problem of a file is named at once: file, dotted key, value and remedy, with the nearest
known key for a misspelt one. Refuses repeated keys, which YAML would let win silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvcache.config.layer_kinds import LAYER_KINDS
from kvcache.config.models import ClusterConfig
from kvcache.config.prepared import prepared_names, prepared_path
from kvcache.errors import ConfigurationError, shown

_TAG_POSITION = 3
"""Where the kind of a layer stands in the path of an error: model, layers, index, kind."""


def load_config(path: str | Path) -> ClusterConfig:
    """Return the configuration in the YAML file at `path`. Where there is none a bare name, such as
    `cpu_tp2`, is that of a configuration that comes with the package.

    Raises ConfigurationError for a file that cannot be read or does not say what is meant.
    """
    try:
        text = _found(Path(path)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = "not UTF-8 text"
        remedy = _other_names(Path(path)) if isinstance(error, FileNotFoundError) else ""
        raise ConfigurationError(
            f"{path}: cannot be read ({reason}): check the path{remedy}"
        ) from error
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        where, problem = _describe_yaml_error(error)
        raise ConfigurationError(f"{path}{where}: is no valid YAML: {problem}") from error
    except RecursionError as error:
        raise ConfigurationError(
            f"{path}: is nested too deeply: no setting stands that deep"
        ) from error
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # What the reader lets through from a value that contradicts its tag, as in `2020-99-99`.
        raise ConfigurationError(
            f"{path}: holds a value that cannot be read ({error}): put it in quotes if it is text"
        ) from error
    return parse_config(data, str(path))


def _found(path: Path) -> Path:
    """Return where to read: `path`, or what comes with the package under a name without a file."""
    is_name = path.name == str(path) and not path.exists()
    return (prepared_path(path.name) if is_name else None) or path


def _other_names(path: Path) -> str:
    """Say which name comes with the package, for a path that may have meant it."""
    if prepared_path(path.stem) is not None:
        return f", or name what comes with the package: {path.stem}"
    if path.suffix or path.name != str(path):
        return ""
    return f", or name what comes with the package: {', '.join(prepared_names())}"


def parse_config(data: object, source: str = "configuration") -> ClusterConfig:
    """Return the configuration that plain values `data` describe.

    Raises ConfigurationError that starts with `source` and names every key that is wrong.
    """
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{source}: holds {type(data).__name__}, not sections: start with a section such as "
            "model:"
        )
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        problems = [_describe(details) for details in error.errors()]
        if len(problems) == 1:
            raise ConfigurationError(f"{source}: {problems[0]}") from error
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigurationError(f"{source}: {len(problems)} settings are wrong:{lines}") from error


# ---------------------------------------------------------------------------------------------
# YAML
# ---------------------------------------------------------------------------------------------


class _UniqueKeyLoader(yaml.SafeLoader):
    """Reads plain values only, and refuses a key that appears twice in one section."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        # Looked for in the text as it stands: merging (`<<: *anchor`) puts the anchor's keys
        # beside those that override them, at a time that depends on the nesting.
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            first = seen.setdefault((key.tag, key.value), key.start_mark)
            if first is not key.start_mark:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} stands in line {first.line + 1} already: remove "
                    "one",
                    problem_mark=key.start_mark,
                )
        return node


def _describe_yaml_error(error: yaml.YAMLError) -> tuple[str, str]:
    """Return `:line` (or nothing) and what is wrong there."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        problem = error.problem or error.context or "unreadable"
        return (f":{mark.line + 1}" if mark is not None else "", problem)
    return "", str(error)


# ---------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------


def _describe(details: ErrorDetails) -> str:
    """Return `key: value: what to do` for one error."""
    kind, context = details["type"], details.get("ctx", {})
    loc, tag = _without_tag(details["loc"])
    key, value = _dotted(loc), details["input"]
    if kind == "value_error":
        told = str(context["error"])  # from a validator of ours: it names the values itself
        return f"{key}: {told}" if key else told
    if kind == "extra_forbidden":
        return f"{key}: {shown(value)}: {_suggest_key(loc, tag)}"
    if kind == "missing":
        return f"{key}: is missing: add it"
    if kind == "union_tag_not_found":
        return f"{key}.kind: is missing: add it"
    if kind == "union_tag_invalid":
        return f"{key}.kind: {shown(context['tag'])}: use {_alternatives(context)}"
    return f"{key}: {shown(value)}: {_remedy(kind, context, details['msg'])}"


def _without_tag(loc: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], str | None]:
    """Return the path without the kind of layer, which is in it but not in the file; and that."""
    if len(loc) > _TAG_POSITION and loc[:2] == ("model", "layers"):
        return (*loc[:_TAG_POSITION], *loc[_TAG_POSITION + 1 :]), str(loc[_TAG_POSITION])
    return loc, None


def _alternatives(context: Mapping[str, Any]) -> str:
    """Return the tags of a union as `'a', 'b' or 'c'`."""
    first, _, last = str(context["expected_tags"]).rpartition(", ")
    return f"{first} or {last}" if first else last


def _remedy(kind: str, context: Mapping[str, Any], message: str) -> str:
    """Return what to write instead, for the kinds of error our models can give."""
    if kind == "literal_error":
        return f"use {context['expected']}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
        name = next(name for name in words if name in context)
        return f"must be {words[name]} {context[name]}"
    remedies = {
        "int_type": "write a whole number",
        "int_from_float": "write a whole number",
        "float_type": "write a number",
        "finite_number": "write a finite number",
        "bool_type": "write true or false",
        "string_type": "write text; put it in quotes if it looks like a number",
        "string_too_short": "write at least one character",
        "string_pattern_mismatch": "use letters, digits, '.', '_' and '-', a letter or digit first",
        "string_unicode": "use text that UTF-8 can encode",
        "invalid_key": "is no text: put the key in quotes, or remove it",
        "tuple_type": "write a list, one '- ' per entry",
        "model_type": "write a section of keys and values",
        "model_attributes_type": "write a section of keys and values",
    }
    return remedies.get(kind, message)


def _suggest_key(loc: tuple[int | str, ...], kind: str | None) -> str:
    """Return the nearest known key in place of the last of `loc`, or all that are known.

    `kind`: of the layer that the path leads through, if it does.
    """
    section: type[BaseModel] = ClusterConfig
    for part in loc[:-1]:
        if part in section.model_fields:  # else it is a name that the file chose, as of a tenant
            section = _section_of(section, part)
    section = LAYER_KINDS.get(kind or "", section)
    known = list(section.model_fields)
    nearest = difflib.get_close_matches(str(loc[-1]), known, n=1)
    if nearest:
        return f"there is no such key: did you mean {nearest[0]}?"
    where = f"in a layer of kind {kind}" if kind else "here"
    return f"there is no such key: known {where} are {', '.join(known)}"


def _section_of(section: type[BaseModel], key: str) -> type[BaseModel]:
    """Return the model of the values under `key`, be they one section or a list of them."""
    annotation = section.model_fields[key].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return section


def _dotted(loc: Sequence[int | str]) -> str:
    """Return `model.layers[1].kind` for the path of an error."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
