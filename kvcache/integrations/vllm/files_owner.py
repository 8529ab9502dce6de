"""Which model, weight revision and layout a directory of files is for.

    directory / name / engine.json

All ranks and replicas of a name share the record. An engine that does not fit it does not start,
so a mistyped option neither removes the files of another model nor leaves two models' files side by
side. When weights change in a running engine, its record is opened: the next engine may be of any
revision, and the record is then for that one. An engine takes the record over, too, if it differs
only by keys of the model's configuration that one side does not have: another version of
transformers has added them. It does not read the files before, because bytes may differ.

The record is replaced as a whole, and opened in its place, because a full disk has no room for
another one; both under a lock on its directory, which the kernel releases if the process is killed.
It only guards the start: each file names its layout, and a reader compares it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from kvcache.base.errors import ConfigurationError
from kvcache.base.logs import get_logger
from kvcache.config.offload import DiskConfig
from kvcache.config.sections import Location
from kvcache.integrations.vllm.options import MODEL_CONFIG, EngineSetting
from kvcache.worker.files.old_layouts import layouts_in

logger = get_logger(__name__)

RECORD = "engine.json"
MAX_RECORD_BYTES = 1 << 20

LOCK_S = 5.0
"""How long a start waits for the lock. Others keep it for milliseconds, unless they are stopped."""

MAX_DETAILS_BYTES = MAX_RECORD_BYTES // 2
"""Limit of the details in a record. If there are more, it has none."""

MAX_NAMED = 5
"""How many differences an error names."""

_LONG = 100
_LOOK_S = 0.005
_CLOSED, _OPEN = b'"is_open": false', b'"is_open": true '


@dataclass(frozen=True)
class _Record:
    """`engine`: the fingerprint of what all ranks have in common; `ranks`: those of single ranks.
    `about`: the same in words. `is_open`: weights may have changed since. `details`: what `engine`
    covers, long texts as digests; empty if it is not known."""

    engine: str
    about: str
    ranks: dict[str, str] = field(default_factory=dict)
    is_open: bool = False
    details: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(data: bytes) -> _Record | None:
        try:
            found = _Record(**json.loads(data))
        except (ValueError, TypeError, RecursionError):
            return None
        is_valid = (
            isinstance(found.engine, str)
            and isinstance(found.about, str)
            and _are_texts(found.ranks)
            and _are_texts(found.details)
            and isinstance(found.is_open, bool)
        )
        return found if is_valid else None


class FilesOwner:
    """The record of one engine's directory, for one rank or the scheduler."""

    def __init__(self, setting: EngineSetting, disk: DiskConfig) -> None:
        """Read and write nothing yet."""
        self._setting = setting
        self._location = Location.of(disk.directory)
        self._place = self._location.path / setting.options.name
        details = {name: _shortened(text) for name, text in setting.details.items()}
        if len(json.dumps(details)) > MAX_DETAILS_BYTES:
            details = {}
        self._own = _Record(setting.fingerprint(""), setting.about, details=details)

    def require(self, rank: int, fingerprint: str) -> None:
        """Raise ConfigurationError if the directory is for another model, revision or layout than
        this rank's `fingerprint`. Changes nothing."""
        try:
            is_there = self._place.is_dir()
        except OSError as error:  # of a directory above it that this user cannot enter, too
            raise self._unusable(error) from error
        if is_there:
            with self._locked(LOCK_S):
                self._record_after(rank, fingerprint)

    def claim(self, rank: int, fingerprint: str) -> None:
        """Have the directory for this rank; raises as `require`."""
        if not self._location.root.is_dir():
            return  # the tier says so
        try:
            self._place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        with self._locked(LOCK_S):
            record, found = self._record_after(rank, fingerprint), self._read()
            if record == found:
                return
            self._write(record)
            if found is not None and found.engine != record.engine and not found.is_open:
                logger.warning(
                    "%s: files of %r are dropped, because the model's configuration has other "
                    "keys: %s",
                    self._place,
                    self._setting.options.name,
                    self._differences(found),
                )

    def open(self) -> None:
        """Say that the engine's weights may be others from now on. Never raises: an error is
        logged."""
        try:
            with self._locked(LOCK_S / 5):
                record = self._read() or self._own
                if record.engine != self._own.engine or record.is_open:
                    return
                if not self._open_in_place():
                    self._write(replace(record, is_open=True))
        except ConfigurationError as error:
            logger.warning(
                "after a change of weights, the next engine may not start with another "
                "weight_revision: %s",
                error,
            )

    def _record_after(self, rank: int, fingerprint: str) -> _Record:
        """Return the record that has this rank, too; raises ConfigurationError."""
        found, own = self._read(), self._own
        if found is None:
            layouts = [path.name for path in layouts_in(self._place)]
            if layouts and fingerprint not in layouts:
                what = f"another engine (there is no {RECORD} that can be read), fingerprint "
                raise self._foreign(what + layouts[0][:12], fingerprint)
            found = own
        known = found.ranks.get(str(rank), fingerprint)
        if found.engine != own.engine:
            if not found.is_open and not self._has_other_keys(found):
                what = f"{found.about}, fingerprint {found.engine[:12]}"
                raise self._foreign(what, own.engine, self._differences(found))
            found = own
        elif known != fingerprint:
            if not found.is_open:
                raise self._foreign(f"{found.about}, fingerprint {known[:12]}", fingerprint)
            found = own
        ranks = {**found.ranks, str(rank): fingerprint}
        return replace(found, ranks=ranks, is_open=False, details=own.details)

    def _changed(self, found: _Record) -> list[str]:
        """Return the names of details that differ, sorted; none if they are not known."""
        old, new = found.details, self._own.details
        if not old or not new:
            return []
        return sorted(name for name in old | new if old.get(name) != new.get(name))

    def _has_other_keys(self, found: _Record) -> bool:
        """Say whether all differences are keys of the model's configuration that only one side
        has."""
        changed, old, new = self._changed(found), found.details, self._own.details
        return bool(changed) and all(
            name.startswith(f"{MODEL_CONFIG}.") and (name in old) != (name in new)
            for name in changed
        )

    def _differences(self, found: _Record) -> str:
        """Return the details that differ, in words; empty if they are not known."""
        old, new, told = found.details, self._own.details, []
        changed = self._changed(found)
        for name in changed[:MAX_NAMED]:
            if name not in old:
                told.append(f"{name} is new, {new[name]}")
            elif name not in new:
                told.append(f"{name} is gone, it was {old[name]}")
            else:
                told.append(f"{name} is {new[name]}, it was {old[name]}")
        if len(changed) > MAX_NAMED:
            told.append(f"{len(changed) - MAX_NAMED} more")
        return ", ".join(told)

    def _foreign(self, what: str, fingerprint: str, differences: str = "") -> ConfigurationError:
        options = self._setting.options
        return ConfigurationError(
            f"offload.disk.directory {str(self._location.path)!r} keeps files of "
            f"{options.name!r} for {what}, and this engine has {self._own.about}, fingerprint "
            f"{fingerprint[:12]}{f' ({differences})' if differences else ''}: choose another "
            "directory or name, or end the engines that use this one and remove their files with "
            f"rm -r {shlex.quote(str(self._place))}"
        )

    def _unusable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"offload.disk.directory {str(self._location.path)!r}: {self._place} cannot be "
            f"used ({error.strerror}): let the engine's user write there, make room, or choose "
            "another directory"
        )

    @contextmanager
    def _locked(self, wait_s: float) -> Iterator[None]:
        """Keep other processes out; raises ConfigurationError."""
        try:
            directory = self._lock(wait_s)
            try:
                yield
            finally:
                os.close(directory)
        except OSError as error:
            raise self._unusable(error) from error

    def _lock(self, wait_s: float) -> int:
        """Return a descriptor that has the lock; raises OSError or ConfigurationError."""
        give_up_s = time.monotonic() + wait_s
        while True:
            directory = os.open(self._place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.stat(self._place), os.fstat(directory)):
                    return directory
            except BlockingIOError:
                pass
            except BaseException:
                os.close(directory)
                raise
            os.close(directory)
            if time.monotonic() > give_up_s:
                raise ConfigurationError(
                    f"another process has had the lock of {self._place} for {wait_s:g} s: end "
                    f"engines of {self._setting.options.name!r} that hang"
                )
            time.sleep(_LOOK_S)

    def _read(self) -> _Record | None:
        """Return the record, None if there is none or it is damaged."""
        try:
            with (self._place / RECORD).open("rb") as file:
                return _Record.parse(file.read(MAX_RECORD_BYTES))
        except FileNotFoundError:
            return None

    def _open_in_place(self) -> bool:
        """Change the bytes of the record that say so, which needs no room; say whether there are
        any. They are its first, so they lie in one sector of a disk."""
        try:
            with (self._place / RECORD).open("r+b", buffering=0) as file:
                place = file.read(MAX_RECORD_BYTES).find(_CLOSED)
                if place < 0:
                    return False
                file.seek(place)
                file.write(_OPEN)
                os.fsync(file.fileno())
                return True
        except FileNotFoundError:
            return False

    def _write(self, record: _Record) -> None:
        made = self._place / f"{RECORD}.new"
        with made.open("w") as file:
            json.dump({"is_open": record.is_open, **asdict(record)}, file)
            file.flush()
            os.fsync(file.fileno())
        made.replace(self._place / RECORD)


def _are_texts(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(each, str) for each in found.values())


def _shortened(text: str) -> str:
    """Return a text, or the digest of a long one."""
    if len(text) <= _LONG:
        return text
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"
