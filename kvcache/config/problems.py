"""Error texts for an invalid configuration: key, value and remedy.

Translates the errors of pydantic, and those of our own validators.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvcache.base.errors import ConfigurationError, shown


def refusal(source: str, section: type[BaseModel], error: ValidationError) -> ConfigurationError:
    """Return the error that names everything wrong with a `section`, which comes from `source`."""
    problems = [_describe(section, details) for details in error.errors()]
    if len(problems) == 1:
        return ConfigurationError(f"{source}: {problems[0]}")
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigurationError(f"{source}: {len(problems)} settings are wrong:{lines}")


def _describe(section: type[BaseModel], details: ErrorDetails) -> str:
    """Return `key: value: what to do` for one error."""
    kind, context = details["type"], details.get("ctx", {})
    loc, tag = _without_tag(details["loc"])
    key, value = _dotted(loc), details["input"]
    if kind == "value_error":
        told = str(context["error"])  # from our validators, which name the values
        return f"{key}: {told}" if key else told
    if kind == "extra_forbidden":
        return f"{key}: {shown(value)}: {_suggest_key(section, loc, tag)}"
    if kind == "missing":
        return f"{key}: is missing: add it"
    if kind == "union_tag_not_found":
        return f"{key}.kind: is missing: add it"
    if kind == "union_tag_invalid":
        return f"{key}.kind: {shown(context['tag'])}: use {_alternatives(context)}"
    return f"{key}: {shown(value)}: {_remedy(kind, context, details['msg'])}"


def _without_tag(loc: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], str | None]:
    """Return the path without the kind of layer, which is not in the file; and the kind."""
    for place, part in enumerate(loc[:-2]):
        if part == "layers" and isinstance(loc[place + 1], int):
            tag = place + 2
            return (*loc[:tag], *loc[tag + 1 :]), str(loc[tag])
    return loc, None


def _alternatives(context: Mapping[str, Any]) -> str:
    """Return the tags of a union as `'a', 'b' or 'c'`."""
    first, _, last = str(context["expected_tags"]).rpartition(", ")
    return f"{first} or {last}" if first else last


def _remedy(kind: str, context: Mapping[str, Any], message: str) -> str:
    """Return the remedy for the kinds of error that our models can raise."""
    if kind == "literal_error":
        return f"use {context['expected']}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
        name = next(name for name in words if name in context)
        return f"must be {words[name]} {context[name]}"
    if kind == "string_too_long":
        return f"write at most {context['max_length']} characters"
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
        "invalid_key": "is not a text: put the key in quotes, or remove it",
        "tuple_type": "write a list, one '- ' per entry",
        "model_type": "write a section of keys and values",
        "model_attributes_type": "write a section of keys and values",
    }
    return remedies.get(kind, message)


def _suggest_key(section: type[BaseModel], loc: tuple[int | str, ...], kind: str | None) -> str:
    """Return the nearest known key in place of the last of `loc`, or all known keys.

    `kind`: of the layer that the path leads through, if any.
    """
    for part in loc[:-1]:
        if part in section.model_fields:  # else a name from the file, such as a tenant's
            found = list(_sections_in(section.model_fields[str(part)].annotation))
            section = next(
                (s for s in found if _kind_of(s) == kind), found[0] if found else section
            )
    known = list(section.model_fields)
    nearest = difflib.get_close_matches(str(loc[-1]), known, n=1)
    if nearest:
        return f"there is no such key: did you mean {nearest[0]}?"
    where = f"in a layer of kind {kind}" if kind else "here"
    return f"there is no such key: known {where} are {', '.join(known)}"


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that a field's value can be or contain."""
    if get_origin(annotation) is None and isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for part in get_args(annotation):
        yield from _sections_in(part)


def _kind_of(section: type[BaseModel]) -> str | None:
    kind = section.model_fields.get("kind")
    return None if kind is None else kind.default


def _dotted(loc: Sequence[int | str]) -> str:
    """Return `model.layers[1].kind` for the path of an error."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
