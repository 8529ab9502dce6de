"""The files of a rank: one for each key, under the name of the key.

A file that is being written gets its name when it is complete. It describes itself, so that a
foreign or damaged one is a miss. Files outlive every process.
"""

from __future__ import annotations

from tests.model.sizes import Model
from tests.model.state import DAMAGED, FOREIGN, TORN, Job, Rank, State, put


def file_of(rank: Rank, key: int) -> int | None:
    """Return the content of the file named `key`, None if there is none."""
    return dict(rank.files).get(key)


def names_on_all(state: State) -> tuple[int, ...]:
    """Return the names that every rank has a file of."""
    names = set.intersection(*[{name for name, _ in rank.files} for rank in state.ranks])
    return tuple(sorted(names))


def names_on_any(state: State) -> tuple[int, ...]:
    """Return the names that some rank has a file of."""
    return tuple(sorted({name for rank in state.ranks for name, _ in rank.files}))


def start_save(model: Model, rank: Rank, job: Job) -> Rank:
    """Begin to write a file, in addition to the one that may have its name."""
    return rank if model.rules.rename else with_file(rank, job.key, TORN)


def end_save(model: Model, rank: Rank, job: Job) -> Rank:
    """Give the file its name."""
    return with_file(rank, job.key, rank.host[job.slot])


def end_fetch(model: Model, rank: Rank, job: Job) -> tuple[Rank, bool]:
    """Copy a file to its host slot; False if it is missing or not what its name says."""
    found = file_of(rank, job.key)
    is_verifying = model.sizes.is_verifying and model.rules.file_verified
    if found is None or (is_verifying and found in (DAMAGED, FOREIGN, TORN)):
        return rank, False
    return rank._replace(host=put(rank.host, job.slot, found)), True


def with_file(rank: Rank, key: int, value: int) -> Rank:
    """Return the rank with one file written or replaced."""
    files = {**dict(rank.files), key: value}
    return rank._replace(files=tuple(sorted(files.items())))
