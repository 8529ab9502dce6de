"""Configurations that come with the package, by name: the files of `configs/`.

`loading.py` uses them if there is no file of that name.
"""

from __future__ import annotations

from pathlib import Path

_DIRECTORY = Path(__file__).resolve().parent.parent / "configs"
"""In a checkout a link to `configs/`; in a wheel the files themselves."""


def prepared_names() -> list[str]:
    """Return the names of all of them, sorted; empty if the installation left them out."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def prepared_path(name: str) -> Path | None:
    """Return the file of the packaged configuration `name`, such as `cpu_tp2`; None if unknown."""
    return _DIRECTORY / f"{name}.yaml" if name in prepared_names() else None
