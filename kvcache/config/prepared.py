"""Configurations that come with the package, by name: those of `configs/`, wherever it is.

`loading.py` opens them if there is no file of that name. Refuses to list what is not
a configuration.
"""

from __future__ import annotations

from pathlib import Path

_DIRECTORY = Path(__file__).resolve().parent.parent / "configs"
"""In a checkout a link to `configs/`; in a wheel the files themselves."""


def prepared_names() -> list[str]:
    """Return the names of all of them, in order; none where the installation left them out."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def prepared_path(name: str) -> Path | None:
    """Return the file of the configuration `name`, such as `cpu_tp2`; None for any other name."""
    return _DIRECTORY / f"{name}.yaml" if name in prepared_names() else None
