"""The base model of every section, and numbers with limits.

Refuses values that JSON and YAML would let pass: text instead of numbers, unknown keys, amounts of
memory without a unit.
"""

from __future__ import annotations

import os
import pwd
import re
from dataclasses import dataclass
from fractions import Fraction
from operator import index
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticKnownError

from kvcache.base.errors import ConfigurationError, shown
from kvcache.config.problems import refusal

KIB = 1 << 10
MIB = 1 << 20
MAX_COUNT = 2**31 - 1
"""Largest number of tokens: positions and block ids travel as int32."""
BYTE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_bytes(value: object) -> object:
    """Return the bytes of a text such as "256MiB" or "1.5 GiB"; other values unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]+)\s*", value)
    if match is None or match[2] not in BYTE_UNITS:
        units = ", ".join(BYTE_UNITS)
        raise ConfigurationError(
            f"{shown(value)} is not an amount of memory: write a number and one of {units}"
        )
    return int(Fraction(match[1]) * BYTE_UNITS[match[2]])


def parse_memory(value: object) -> object:
    """Return the bytes of a setting, like `parse_bytes`. Raises ConfigurationError for a fraction
    or a number below 1,024 without a unit, which was forgotten."""
    if type(value) is float or (type(value) is int and value < KIB):
        raise ConfigurationError(
            f"{shown(value)} is too little memory: write a number and a unit, such as 8GiB"
        )
    return parse_bytes(value)


def require_model_len(value: object) -> object:
    """Return `value`; raises ConfigurationError unless it is a number of tokens or "auto"."""
    is_auto = isinstance(value, str) and value == "auto"
    if not is_auto and (type(value) is not int or not 1 <= value <= MAX_COUNT):
        raise ConfigurationError(
            f"{shown(value)} is no length: write a number of tokens from 1 to {MAX_COUNT}, or auto"
        )
    return value


def require_policy(value: str) -> str:
    """Return `value`; raises ConfigurationError unless it names an eviction policy."""
    # Imported here: it loads the kernels of all policies, which most processes never use.
    from kvcache.policies import require_eviction_policy

    return require_eviction_policy(value)


@dataclass(frozen=True)
class Location:
    """A directory of a configuration: `below` a `root` that must exist, because it may be a mount
    point. Directories below the root may be created."""

    root: Path
    below: str = ""

    @property
    def path(self) -> Path:
        """The directory itself."""
        return self.root / self.below

    @staticmethod
    def of(directory: str) -> Location:
        """Return the place of `directory` on this node, for the user of this process.

        `~/` is the home directory in the user database, not in the environment. Raises
        ConfigurationError for a user without one.
        """
        if not directory.startswith("~/"):
            return Location(Path(directory))
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError as error:
            raise ConfigurationError(
                f"directory {directory!r} lies in the home directory, and user {os.getuid()} has "
                "none: write it from / on"
            ) from error
        return Location(Path(home), directory.removeprefix("~/"))


def require_directory(value: str, runs_anywhere: str) -> None:
    """Raise ConfigurationError unless `value` is the same directory for every process."""
    if not value.startswith(("/", "~/")):
        raise ConfigurationError(
            f"directory {value!r} is relative, and {runs_anywhere} may run anywhere: write it from "
            "/ on, or from ~/ on for one in the home directory"
        )


def plain(value: object) -> object:
    """Return the Python value of a numpy scalar; other values unchanged."""
    if isinstance(value, np.timedelta64):  # numpy calls it an integer
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating, np.str_)):
        of_python: object = value.item()
        return of_python
    is_integer = hasattr(type(value), "__index__") and not isinstance(value, int)
    return index(value) if is_integer and not hasattr(value, "__len__") else value  # type: ignore[arg-type]  # it has an index


def listed(value: object) -> object:
    """Return a list of plain values as a tuple; other values unchanged."""
    return tuple([plain(item) for item in value]) if isinstance(value, (list, tuple)) else value


def require_number(value: object) -> object:
    """Return `value`, but refuse arrays and booleans, which pydantic takes for numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PydanticKnownError("float_type")
    return value


Real = BeforeValidator(require_number)
"""For fields of numbers: pydantic alone would accept an array."""
List = BeforeValidator(listed)
"""For fields of tuples, which files write as lists."""

Bytes = Annotated[int, BeforeValidator(parse_memory), Field(ge=1, le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
FewThousand = Annotated[int, Field(ge=1, le=4096)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Real]
SecondsOrNever = Annotated[float, Field(ge=0, allow_inf_nan=False), Real]
Share = Annotated[float, Field(ge=0, le=1), Real]
EvictionPolicyName = Annotated[str, AfterValidator(require_policy)]


class Section(BaseModel):
    """A part of the configuration: frozen, strict about types, no unknown keys.

    numpy's integers, numbers, booleans and text become Python's. The constructor raises
    ConfigurationError that names every invalid key, with its value and the remedy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise refusal(type(self).__name__, type(self), error) from error

    # Nested sections, and those of a file, are not made by calling the class.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic's mark

    @model_validator(mode="before")
    @classmethod
    def _have_plain_values(cls, data: Any) -> Any:
        return {k: plain(value) for k, value in data.items()} if isinstance(data, dict) else data
