"""From a YAML file to a `ClusterConfig`, or to an error that says what to change.

An error names all problems of a file: file, dotted key, value and remedy, with the nearest known
key for a misspelt one. Refuses repeated keys: YAML would silently take the last one.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvcache.base.arguments import as_text, check_kind
from kvcache.base.errors import ConfigurationError
from kvcache.config.models import ClusterConfig
from kvcache.config.problems import refusal

_DIRECTORY = Path(__file__).resolve().parent.parent / "configs"
"""In a checkout a link to `configs/`; in a wheel the files themselves."""


def prepared_names() -> list[str]:
    """Return the names of all of them, sorted; empty if the installation left them out."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def prepared_path(name: str) -> Path | None:
    """Return the file of the packaged configuration `name`, such as `cpu_tp2`; None if unknown."""
    return _DIRECTORY / f"{name}.yaml" if name in prepared_names() else None


def load_config(path: str | Path) -> ClusterConfig:
    """Return the configuration in the YAML file at `path`. If there is no such file, a bare name,
    such as `cpu_tp2`, means a configuration that comes with the package.

    Raises ConfigurationError for a file that cannot be read or is invalid.
    """
    check_kind("path", path, (str, PathLike), ConfigurationError)
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
        raise ConfigurationError(f"{path}{where}: is not valid YAML: {problem}") from error
    except RecursionError as error:
        raise ConfigurationError(
            f"{path}: is nested too deeply: no setting stands that deep"
        ) from error
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # Errors of PyYAML for a value that contradicts its tag, as in `2020-99-99`.
        raise ConfigurationError(
            f"{path}: holds a value that cannot be read ({error}): put it in quotes if it is text"
        ) from error
    return parse_config(data, str(path))


def _found(path: Path) -> Path:
    """Return the file to read: `path`, or the packaged configuration of that name."""
    is_name = path.name == str(path) and not path.exists()
    return (prepared_path(path.name) if is_name else None) or path


def _other_names(path: Path) -> str:
    """Name the packaged configuration that a missing path may have meant."""
    if prepared_path(path.stem) is not None:
        return f", or use one of the package: {path.stem}"
    if path.suffix or path.name != str(path):
        return ""
    return f", or use one of the package: {', '.join(prepared_names())}"


def parse_config(data: object, source: str = "configuration") -> ClusterConfig:
    """Return the configuration that the plain values `data` describe.

    Raises ConfigurationError that starts with `source` and names every invalid key.
    """
    source = as_text("source", source, ConfigurationError)
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"holds {type(data).__name__}, not sections"
        raise ConfigurationError(f"{source}: {what}: start with a section such as model:")
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        raise refusal(source, ClusterConfig, error) from error


# ---------------------------------------------------------------------------------------------
# YAML
# ---------------------------------------------------------------------------------------------


class _UniqueKeyLoader(yaml.SafeLoader):
    """Reads plain values only, and refuses a key that appears twice in one section."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        # Checked in the text itself: merging (`<<: *anchor`) mixes the anchor's keys with those
        # that override them, at a time that depends on the nesting.
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            first = seen.setdefault((key.tag, key.value), key.start_mark)
            if first is not key.start_mark:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} is in line {first.line + 1} already: remove one",
                    problem_mark=key.start_mark,
                )
        return node


def _describe_yaml_error(error: yaml.YAMLError) -> tuple[str, str]:
    """Return `:line` (or nothing) and the problem there."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        problem = error.problem or error.context or "unreadable"
        return (f":{mark.line + 1}" if mark is not None else "", problem)
    return "", str(error)
