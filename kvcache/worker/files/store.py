"""One rank's blocks on disk: one file per block, found by its key.

A file is written under a temporary name, synced as configured, and renamed. So a file with its
final name is complete unless something damaged it. A read checks head, key, layout, length and
payload. A wrong file is a miss with a reason, and is set aside. The files never exceed their limit;
the coordinator decides which blocks go.

    rank0/about           describes the directory, locked by the process that uses it
    rank0/3f/3fa9….kvb    256 directories, by the first byte of the key
    rank0/set-aside/      the last few wrong files

Other processes may remove, replace and damage files at any time. A vanished file is a miss and is
no longer counted, an obstacle is set aside, and a missing directory is recreated.

Calls for keys with the same first byte must come from one thread at a time.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Literal, TypeAlias

from kvcache.base.errors import InvariantError, MalformedMessageError
from kvcache.base.logs import get_logger
from kvcache.offload.keys import label_keys
from kvcache.worker.copies.checksums import ChecksumRule, checksum_of
from kvcache.worker.files.format import (
    SET_ASIDE,
    START_BYTES,
    FileHead,
    FileTierError,
    Problem,
    from_os_error,
    head_bytes,
    labels_of_heads,
    pack_head,
    unpack_head,
)
from kvcache.worker.files.system import DirectoryFiles, IrregularFileError
from kvcache.worker.host_memory.segment import SegmentShape

logger = get_logger(__name__)

NUM_DIRECTORIES = 256
SUFFIX = ".kvb"
UNFINISHED = ".tmp"
SET_ASIDE_DIRECTORY = "set-aside"

FIRST_READ_BYTES = 4096
"""Holds most heads; a smaller buffer would not be faster."""

MAX_OBSTACLES = 3
"""Obstacles and missing directories that are repaired for one file before it is given up."""

Sync: TypeAlias = Literal["never", "file", "directory"]


@dataclass(frozen=True)
class StoreLimits:
    """`max_bytes` of all files together (0: no limit); at most `max_set_aside` files are set
    aside. `is_shared`: other processes write and remove files, too (shared.py), so none of this
    process's own is known to be there, and their system calls hold the limit."""

    max_bytes: int = 0
    sync: Sync = "never"
    max_set_aside: int = 16
    is_shared: bool = False


@dataclass(frozen=True)
class ScannedDirectory:
    """The content of directory `prefix`: heads of good files, and problems of the others."""

    prefix: int
    heads: tuple[FileHead, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class FileTierStatistics:
    """Counts since the start; `problems` has the number of each kind.

    `num_vanished` files were removed by others. `used_bytes` is exact once every directory has been
    scanned.
    """

    num_written: int
    num_read: int
    num_discarded: int
    num_set_aside: int
    num_vanished: int
    used_bytes: int
    problems: Mapping[str, int]


class FileStore:
    """Writes, reads and discards the files of one rank."""

    def __init__(
        self,
        files: DirectoryFiles,
        shape: SegmentShape,
        limits: StoreLimits,
        writer: str,
        rule: ChecksumRule | None = None,
        *,
        make_again: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep blocks of `shape` in `files`. `writer` is unique to the process, and part of
        temporary names; those of other writers are leftovers. `rule` says which payloads to
        compare, by default all. `make_again` is called when the whole directory is gone: it creates
        another one and calls `forget_all`, or raises FileTierError."""
        self.shape = shape
        self._rule = rule or ChecksumRule()
        self._files = files
        self._sync = limits.sync
        self._writer = writer
        self._make_again = make_again
        self._table = FileTable(limits.max_bytes, is_shared=limits.is_shared)
        self._aside = SetAside(files, limits.max_set_aside, is_shared=limits.is_shared)

    def write(self, head: FileHead, payload: Sequence[memoryview]) -> int:
        """Write a block, replacing an older file of the same key; return the file's bytes, 0 if
        another process has written it.

        Raises FileTierError; then only the older file exists. Exception: if only syncing its name
        failed, the new file exists.
        """
        self._require_whole(payload)
        if head.checksum < 0:  # none was computed; another rule may apply at the read
            head = replace(head, checksum=checksum_of(payload))
        packed = pack_head(head)
        name, num_bytes = _name(head.key), len(packed) + head.block_bytes
        unfinished = f"{name[:2]}/.{head.key.hex()}.{self._writer}{UNFINISHED}"
        self._table.reserve(num_bytes)
        try:
            if self._files.is_complete(name):
                self._table.release(num_bytes)
                return 0
            self._write_file(unfinished, name, [memoryview(packed), *payload])
        except OSError as error:
            self._give_up_write(unfinished, num_bytes)
            raise self._counted(from_os_error(f"block {_shown(head.key)}", error)) from error
        except FileTierError as error:
            self._give_up_write(unfinished, num_bytes)
            if error.kind == "quota":
                self._table.count("quota")
            else:
                self._counted(error)
            raise
        self._table.wrote(head.key, num_bytes)
        if self._sync == "directory":
            self._sync_directory(name[:2])
        return num_bytes

    def read(self, key: bytes, payload: Sequence[memoryview]) -> FileHead:
        """Read a block into `payload`; return the head of its file.

        Raises FileTierError; `payload` may hold anything then. A wrong file is set aside.
        """
        self._require_whole(payload)
        name, what = _name(key), f"block {_shown(key)}"
        try:
            descriptor = self._files.open(name)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._table.vanished(key)
            raise self._counted(FileTierError("missing", f"{what} has no file")) from error
        except OSError as error:
            raise self._counted(self._unopened(name, what, error)) from error
        try:
            size = self._files.size(descriptor)
            head, start = self._read_head(descriptor, size)
            self._require_ours(head, key)
            self._read_payload(descriptor, start, payload)
            is_compared = bool(self._rule.chosen(1)[0])
            if is_compared and checksum_of(payload) != head.checksum:
                raise FileTierError("damaged", "the checksum of its bytes is wrong")
        except OSError as error:
            raise self._counted(from_os_error(what, error)) from error
        except FileTierError as error:
            is_aside = self._put_aside(name, error.kind)
            fate = "set aside" if is_aside else "it cannot be set aside"
            told = FileTierError(error.kind, f"file of {what}: {error}: {fate}")
            raise self._counted(told) from error
        finally:
            self._quietly(lambda: self._files.close(descriptor))
        self._table.read()
        return head

    def discard(self, key: bytes) -> bool:
        """Remove a block's file; return whether there was one.

        Raises FileTierError if it still exists.
        """
        name = _name(key)
        try:
            self._clear(name)
        except (FileNotFoundError, NotADirectoryError):
            if self._table.vanished(key):
                logger.warning(
                    "files of rank %d: that of block %s has vanished before it was discarded: let "
                    "nothing else clean the tier",
                    self.shape.rank,
                    _shown(key),
                )
            return False
        except OSError as error:
            raise self._counted(from_os_error(f"block {_shown(key)}", error)) from error
        self._table.discarded(key)
        return True

    def scan(self, prefix: int) -> ScannedDirectory:
        """Read the heads of all files of one directory; from then on its content is known.

        Wrong files are set aside, and unfinished files of dead writers are removed. Payloads are
        not read: `read` checks them.
        """
        directory = f"{prefix:02x}"
        heads: list[FileHead] = []
        problems: list[str] = []
        sizes: dict[bytes, int] = {}
        try:
            names = sorted(self._files.names_in(directory))
        except (FileNotFoundError, NotADirectoryError):
            names = []
        except OSError as error:  # the table has its known files
            told = self._counted(from_os_error(f"directory {directory}", error))
            return ScannedDirectory(prefix, (), (str(told),))
        for name in names:
            path = f"{directory}/{name}"
            if name.endswith(UNFINISHED):
                self._quietly(partial(self._remove_abandoned, path))
            if not name.endswith(SUFFIX):
                continue
            try:
                found = self._scan_file(path)
            except FileTierError as error:
                problems.append(f"{path}: {error}")
                continue
            if found is not None:
                head, sizes[head.key] = found
                heads.append(head)
        num_vanished = self._table.scanned(prefix, sizes)
        if num_vanished:
            logger.warning(
                "files of rank %d: %d have vanished from directory %s: let nothing else clean it",
                self.shape.rank,
                num_vanished,
                directory,
            )
        return ScannedDirectory(prefix, tuple(heads), tuple(problems))

    def forget_all(self) -> None:
        """Record that the directory is gone with its content, and an empty one replaces it."""
        self._table.all_vanished()
        self._aside.forget()

    def statistics(self) -> FileTierStatistics:
        return self._table.statistics()

    def count(self, kind: Problem) -> None:
        """Count a problem that occurred outside this store."""
        self._table.count(kind)

    def _require_whole(self, payload: Sequence[memoryview]) -> None:
        """Raise InvariantError unless `payload` is the memory of one block."""
        size = sum(map(len, payload))
        if size != self.shape.slot_bytes:
            raise InvariantError(f"memory of {size} bytes for a block of {self.shape.slot_bytes}")

    # --- writing

    def _write_file(self, unfinished: str, name: str, buffers: Sequence[memoryview]) -> None:
        """Write a file under another name, and rename it. Raises OSError, FileTierError."""
        for _ in range(MAX_OBSTACLES):
            try:
                self._write_once(unfinished, name, buffers)
                return
            except FileNotFoundError:
                self._make_directory(name[:2])
            except NotADirectoryError:
                self._clear(name[:2])
                self._make_directory(name[:2])
            except IsADirectoryError:
                self._clear(name)
            except FileExistsError:
                pass  # removed below
            self._remove_quietly(unfinished)
        self._write_once(unfinished, name, buffers)

    def _write_once(self, unfinished: str, name: str, buffers: Sequence[memoryview]) -> None:
        descriptor = self._files.create(unfinished)
        try:
            self._files.write_all(descriptor, buffers)
            if self._sync != "never":
                self._files.sync(descriptor)
        finally:
            self._files.close(descriptor)
        self._files.rename(unfinished, name)

    def _give_up_write(self, unfinished: str, num_bytes: int) -> None:
        self._remove_quietly(unfinished)
        self._table.release(num_bytes)

    def _make_directory(self, directory: str) -> None:
        """Make a directory, in place of any file there, and the store's own if that is gone."""
        try:
            self._files.make_directory(directory)
            return
        except NotADirectoryError:
            self._clear(directory)
        except FileNotFoundError:
            self._make_again()
        self._files.make_directory(directory)

    def _clear(self, name: str) -> None:
        """Remove the obstacle under a name; set aside a directory with content."""
        try:
            self._files.remove(name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self._aside.put(name, "damaged")

    def _sync_directory(self, directory: str) -> None:
        try:
            self._files.sync_directory(directory)
        except OSError as error:
            raise self._counted(from_os_error(f"directory {directory}", error)) from error

    # --- reading

    def _read_head(self, descriptor: int, size: int) -> tuple[FileHead, int]:
        """Return the head and the offset of the payload."""
        data = self._files.read_start(descriptor, min(size, FIRST_READ_BYTES))
        end = START_BYTES + head_bytes(data)
        if end > len(data):
            data = self._files.read_start(descriptor, min(size, end))
        return unpack_head(data, size), end

    def _read_payload(self, descriptor: int, start: int, payload: Sequence[memoryview]) -> None:
        wanted = sum(map(len, payload))
        count = self._files.fill(descriptor, payload, start)
        if count != wanted:
            raise FileTierError("truncated", f"it ends after {count} of {wanted} bytes")

    def _require_ours(self, head: FileHead, key: bytes) -> None:
        """Raise FileTierError unless the file is of this rank, this layout and this key."""
        ours = self.shape
        for name, found, expected in (
            ("layout", head.layout_fingerprint, ours.layout_fingerprint),
            ("rank", head.rank, ours.rank),
            ("block bytes", head.block_bytes, ours.slot_bytes),
            ("digest bytes", len(head.digest), ours.digest_bytes),
            ("key bytes", len(head.key), ours.key_bytes),
            ("parent digest bytes", len(head.parent_digest), ours.digest_bytes),
        ):
            if found != expected:
                raise FileTierError("foreign", f"it has {name} {found}, this tier {expected}")
        if len(head.token_bytes) > 4 * ours.max_block_tokens:
            raise FileTierError("foreign", f"it has {len(head.token_bytes) // 4} tokens")
        if head.key != key:
            raise FileTierError("wrong_key", f"it is the file of block {_shown(head.key)}")
        try:
            (named,) = label_keys(labels_of_heads([head]))
        except MalformedMessageError as error:
            raise FileTierError("damaged", str(error)) from error
        if named != key:
            raise FileTierError("wrong_key", f"it holds block {_shown(named)}")

    def _scan_file(self, path: str) -> tuple[FileHead, int] | None:
        """Return a file's head and length, None if it has just vanished.

        Raises FileTierError; the file is counted and set aside then.
        """
        try:
            descriptor = self._files.open(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._counted(self._unopened(path, "it cannot be opened", error), path) from error
        try:
            size = self._files.size(descriptor)
            head, _ = self._read_head(descriptor, size)
            if _name(head.key) != path:
                raise FileTierError("wrong_key", f"it is the file of block {_shown(head.key)}")
            self._require_ours(head, head.key)
        except OSError as error:
            raise self._counted(from_os_error("it cannot be read", error), path) from error
        except FileTierError as error:
            self._put_aside(path, error.kind)
            raise self._counted(error, path) from None
        finally:
            self._quietly(lambda: self._files.close(descriptor))
        return head, size

    # --- problems

    def _unopened(self, name: str, what: str, error: OSError) -> FileTierError:
        """Return the error for a file that cannot be opened.

        Something that is no file, or an unreadable file in a readable directory, is set aside: only
        this file is wrong, and waiting would not help.
        """
        is_its_own = isinstance(error, (IrregularFileError, PermissionError))
        if is_its_own and self._put_aside(name, "damaged"):
            return FileTierError("damaged", f"{what}: {error.strerror}: set aside")
        return from_os_error(what, error)

    def _put_aside(self, name: str, kind: Problem) -> bool:
        """Move a wrong file away and keep only the last few; return whether it is gone."""
        if kind not in SET_ASIDE:
            return False
        try:
            self._aside.put(name, kind)
        except FileNotFoundError:
            return True
        except OSError:
            self.count("io")
            return False
        self._table.set_aside(key_of(name))
        return True

    def _remove_abandoned(self, name: str) -> None:
        """Remove an unfinished file of a dead writer."""
        if self._files.is_abandoned(name):
            self._clear(name)

    def _remove_quietly(self, name: str) -> None:
        """Remove a writer's unfinished file."""
        self._quietly(lambda: self._clear(name))

    def _quietly(self, call: Callable[[], None]) -> None:
        """Make a call whose failure does not matter to the caller; count failures."""
        try:
            call()
        except FileNotFoundError:
            return
        except OSError:
            self.count("io")

    def _counted(self, error: FileTierError, path: str = "") -> FileTierError:
        """Count and log an error; `path` is the file's, if the error does not have it."""
        logger.warning(
            "files of rank %d: %s%s (%d of this kind so far)",
            self.shape.rank,
            path and f"{path}: ",
            error,
            self._table.count(error.kind),
        )
        return error


def _name(key: bytes) -> str:
    text = key.hex()
    return f"{text[:2]}/{text}{SUFFIX}"


def key_of(name: str) -> bytes | None:
    """Return the key of a file name, None if it is no key's."""
    try:
        key = bytes.fromhex(name[3 : -len(SUFFIX)])
    except ValueError:
        return None
    return key if _name(key) == name else None


def _shown(key: bytes) -> str:
    return key.hex()[:16]


class FileTable:
    """Counts, sizes and problems of a tier's files. Thread-safe.

    A directory's files are known once it has been scanned; before that, only those written since
    the start. Files that a read, a discard or a scan finds missing are subtracted.

    Invariant: `_used` is the sum of `_sizes[p]`, by key the bytes of the files in directory `p`;
    `_reserved` is the bytes of files being written.
    """

    def __init__(self, max_bytes: int, *, is_shared: bool = False) -> None:
        """Limit the files to `max_bytes` together; 0: no limit. If others write files, too, no
        sizes are kept."""
        self._max_bytes = max_bytes
        self._is_shared = is_shared
        self._sizes: list[dict[bytes, int]] = [{} for _ in range(NUM_DIRECTORIES)]
        self._used = self._reserved = 0
        self._num_written = self._num_read = self._num_discarded = 0
        self._num_set_aside = self._num_vanished = 0
        self._problems: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for a file; raises FileTierError (counted) beyond the limit."""
        with self._lock:
            used = self._used + self._reserved
            if not self._max_bytes or used + num_bytes <= self._max_bytes:
                self._reserved += num_bytes
                return
            self._problems["quota"] += 1
        raise FileTierError(
            "quota",
            f"a file of {num_bytes} bytes on top of {used} exceeds the tier's max_bytes, "
            f"{self._max_bytes}: discard blocks, or raise it",
        )

    def release(self, num_bytes: int) -> None:
        """Release room: nothing was written."""
        with self._lock:
            self._reserved -= num_bytes

    def wrote(self, key: bytes, num_bytes: int) -> None:
        """Record a written file for which room was reserved; it replaces any other of this key."""
        with self._lock:
            self._reserved -= num_bytes
            self._num_written += 1
            if self._is_shared:
                return
            self._take_out(key)
            self._sizes[key[0]][key] = num_bytes
            self._used += num_bytes

    def read(self) -> None:
        """Record a successful read."""
        with self._lock:
            self._num_read += 1

    def discarded(self, key: bytes) -> None:
        """Record a removed file."""
        with self._lock:
            self._take_out(key)
            self._num_discarded += 1

    def vanished(self, key: bytes) -> bool:
        """Record that a key has no file; return whether one was expected."""
        with self._lock:
            was_known = self._take_out(key)
            self._num_vanished += was_known
            return was_known

    def set_aside(self, key: bytes | None) -> None:
        """Record a wrong file, which no longer counts. None: its name was no key's."""
        with self._lock:
            if key is not None:
                self._take_out(key)
            self._num_set_aside += 1

    def scanned(self, prefix: int, sizes: Mapping[bytes, int]) -> int:
        """Set the files of a directory; return how many have vanished from it."""
        if self._is_shared:
            return 0
        with self._lock:
            old = self._sizes[prefix]
            num_vanished = len(old.keys() - sizes.keys())
            self._num_vanished += num_vanished
            self._used += sum(sizes.values()) - sum(old.values())
            self._sizes[prefix] = dict(sizes)
            return num_vanished

    def all_vanished(self) -> None:
        """Record that all directories are gone."""
        for prefix in range(NUM_DIRECTORIES):
            self.scanned(prefix, {})

    def count(self, kind: Problem) -> int:
        """Count a problem; return its count so far."""
        with self._lock:
            self._problems[kind] += 1
            return self._problems[kind]

    def statistics(self) -> FileTierStatistics:
        with self._lock:
            return FileTierStatistics(
                self._num_written,
                self._num_read,
                self._num_discarded,
                self._num_set_aside,
                self._num_vanished,
                self._used,
                MappingProxyType(dict(self._problems)),
            )

    def _take_out(self, key: bytes) -> bool:
        """Forget the file of a key; return whether one was known. Locked."""
        num_bytes = self._sizes[key[0]].pop(key, None)
        if num_bytes is None:
            return False
        self._used -= num_bytes
        return True


class SetAside:
    """Moves wrong files into their own directory, and keeps the last few. Thread-safe.

    Handles a directory or pipe with the name of a file alike. A file that cannot be moved is
    removed, because it must not be found again under its name. A directory with content is never
    removed.
    """

    def __init__(self, files: DirectoryFiles, max_files: int, *, is_shared: bool = False) -> None:
        """Keep at most `max_files`. If others set files aside, too, these are listed each time."""
        self._files = files
        self._max_files = max_files
        self._is_shared = is_shared
        self._names: deque[str] | None = None
        self._lock = threading.Lock()

    def put(self, name: str, kind: Problem) -> None:
        """Move the file `name` away; raises OSError if it cannot even be removed."""
        target = f"{SET_ASIDE_DIRECTORY}/{name.rpartition('/')[2]}.{kind}"
        with self._lock:
            if self._is_shared:
                self._names = None
            names = self._known()
            try:
                target = self._move(name, target)
            except OSError:
                self._files.remove(name)
                return
            if target in names:
                names.remove(target)
            names.append(target)
            while len(names) > self._max_files:
                with suppress(OSError):  # it is not empty, or is gone
                    self._files.remove(names.popleft())

    def forget(self) -> None:
        """List the directory again: it was replaced."""
        with self._lock:
            self._names = None

    def _move(self, name: str, target: str) -> str:
        """Move it to `target`, or next to it if a directory is in the way; return the new name."""
        try:
            self._files.make_directory(SET_ASIDE_DIRECTORY)
            self._files.rename(name, target)
            return target
        except NotADirectoryError:
            with suppress(OSError):  # a file where that directory should be
                self._files.remove(SET_ASIDE_DIRECTORY)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST):
                raise
        names = self._known()
        target = next(new for n in count(1) if (new := f"{target}.{n}") not in names)
        self._files.make_directory(SET_ASIDE_DIRECTORY)
        self._files.rename(name, target)
        return target

    def _known(self) -> deque[str]:
        """Return the names there, oldest first; those of other processes are unordered."""
        if self._names is None:
            try:
                found = self._files.names_in(SET_ASIDE_DIRECTORY)
            except OSError:
                found = []
            self._names = deque(f"{SET_ASIDE_DIRECTORY}/{name}" for name in sorted(found))
        return self._names
