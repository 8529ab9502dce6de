"""The fields of a `config.json`, read one by one and never guessed.

A field that is null states that the model has no such thing; a missing field has the default of its
architecture, if there is one. A value of the wrong type is refused by name. Multimodal models keep
the fields of their language model in `text_config`: those take precedence over the outer ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from kvcache.base.arguments import check_kind
from kvcache.base.errors import ConfigurationError, shown
from kvcache.specs import DTYPE_SIZES_BYTES

MAX_LAYERS = 4096
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class HFFields:
    """The contents of a `config.json`; `source` names it in errors.

    `values` has no nulls; `nulls` names the null fields. `defaults` are the values of fields that
    files of an architecture leave out.
    """

    source: str
    values: Mapping[str, object]
    nulls: frozenset[str]
    defaults: Mapping[str, object]

    @classmethod
    def read(cls, source: str | Path | Mapping[str, object]) -> HFFields:
        """Return the fields of a file, or of its parsed contents.

        Raises ConfigurationError for a file that cannot be read, holds no JSON object, or has a key
        twice.
        """
        check_kind("source", source, (str, PathLike, Mapping), ConfigurationError)
        if isinstance(source, Mapping):
            return cls._of("config.json", source)
        try:
            text = Path(source).read_text(encoding="utf-8")
            data = json.loads(text, object_pairs_hook=_unrepeated)
        except OSError as error:
            remedy = "give its config.json" if Path(source).is_dir() else "check the path"
            raise ConfigurationError(
                f"{source}: cannot be read ({error.strerror}): {remedy}"
            ) from error
        except ConfigurationError as error:
            raise ConfigurationError(f"{source}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{source}: is not valid JSON ({error}): give the config.json as it was published"
            ) from error
        return cls._of(str(source), data)

    @classmethod
    def _of(cls, source: str, data: object) -> HFFields:
        if not isinstance(data, Mapping):
            raise ConfigurationError(
                f"{source}: holds {type(data).__name__}, not an object: give the config.json of a "
                "model"
            )
        inner = data.get("text_config")
        if inner is not None and not isinstance(inner, Mapping):
            raise ConfigurationError(
                f"{source}: text_config is {shown(inner)}, not an object: give the config.json as "
                "it was published"
            )
        present = {
            name: value
            for values in (data, inner or {})
            for name, value in values.items()
            if value is not None
        }
        nulls = frozenset({*data, *(inner or {})} - present.keys())
        return cls(source, present, nulls, {})

    def with_defaults(self, defaults: Mapping[str, object]) -> HFFields:
        """Return a copy that uses `defaults` for missing fields."""
        return replace(self, defaults=defaults)

    def has(self, name: str) -> bool:
        """Whether the field has a value."""
        return self._value(name) is not None

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` without a value."""
        return [name for name in names if not self.has(name)]

    def count(self, name: str, *, at_least: int = 1, at_most: int = MAX_COUNT) -> int:
        """Return a whole number; raises ConfigurationError unless it is in the range."""
        value = self._value(name)
        if type(value) is not int or not at_least <= value <= at_most:
            raise self.wrong(
                f"{name} is {shown(value)}, but must be a whole number from {at_least} to {at_most}"
            )
        return value

    def count_or_none(self, name: str) -> int | None:
        """Return a whole number of at least 1, None if the field has no value."""
        return self.count(name) if self.has(name) else None

    def flag(self, name: str) -> bool:
        """Return true or false; raises ConfigurationError for another value."""
        value = self._value(name)
        if type(value) is not bool:
            raise self.wrong(f"{name} is {shown(value)}, but must be true or false")
        return value

    def text(self, name: str) -> str:
        """Return text; raises ConfigurationError for anything else."""
        value = self._value(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(f"{name} is {shown(value)}, but must be text")
        return value

    def dtype(self, name: str) -> str:
        """Return the name of a dtype, as in `bfloat16`; raises ConfigurationError for others."""
        dtype = self.text(name).removeprefix("torch.")
        if dtype not in DTYPE_SIZES_BYTES:
            raise self.wrong(
                f"{name} is {shown(dtype)}, which is not known (known are "
                f"{', '.join(DTYPE_SIZES_BYTES)})"
            )
        return dtype

    def require_size(self, formula: str, size: int) -> int:
        """Return a size made of several fields; raises ConfigurationError if it is too large."""
        if size > MAX_COUNT:
            raise self.wrong(f"{formula} is {shown(size)}, but must be at most {MAX_COUNT}")
        return size

    def per_layer(self, name: str, num_layers: int) -> list[object]:
        """Return a list with an entry per layer; raises ConfigurationError unless it is one.

        A text counts as the list of its characters.
        """
        value = self._value(name)
        if not isinstance(value, list | tuple | str):
            raise self.wrong(f"{name} is {shown(value)}, but must list one entry per layer")
        if len(value) != num_layers:
            raise self.wrong(
                f"{name} has {len(value)} entries, but num_hidden_layers is {num_layers}"
            )
        return list(value)

    def wrong(self, problem: str) -> ConfigurationError:
        """Return the error for a problem of the file itself."""
        return ConfigurationError(
            f"{self.source}: {problem}: give the config.json as it was published, or describe the "
            "layers in a configuration of your own"
        )

    def refused(self, problem: str) -> ConfigurationError:
        """Return the error for a contradiction between the file and the choices."""
        return ConfigurationError(f"{self.source}: {problem}")

    def _value(self, name: str) -> object:
        if name in self.nulls:
            return None
        return self.values.get(name, self.defaults.get(name))


def _unrepeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; raises ConfigurationError if it has a key twice."""
    values: dict[str, object] = {}
    for name, value in pairs:
        if name in values:
            raise ConfigurationError(
                f"{shown(name)} is there twice in one object, as {shown(values[name])} and "
                f"{shown(value)}: remove one"
            )
        values[name] = value
    return values
