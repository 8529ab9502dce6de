"""Unnamed shared memory, passed as a descriptor; and the amount of available memory.

The memory lives as long as a process has its descriptor or a mapping of it, so nothing remains when
all of them are killed. It never shrinks: no process can remove pages that another one has mapped.

The kernel does not refuse too much shared memory; it, or the limit of the control group, kills the
process. So `available_memory_bytes` is checked first, and all memory is allocated before it is
mapped: too little memory is an error, never a signal later. Unreadable limits are ignored.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

from kvcache.base.errors import NotEnoughMemoryError

SYSTEM_ROOT = Path("/")


def available_memory_bytes(root: Path = SYSTEM_ROOT) -> int | None:
    """Return the bytes that this process may still allocate, None if no limit can be read.

    The minimum over the machine's available memory and the unused part of each control group
    around this process. Files in a group's page cache that were not used lately count as free.
    """
    found = [_machine_bytes(root, "MemAvailable"), *(_left_in(*each) for each in _groups(root))]
    known = [size for size in found if size is not None]
    return max(0, min(known)) if known else None


def total_memory_bytes(root: Path = SYSTEM_ROOT) -> int | None:
    """Return the bytes of memory that there are for this process and others together, None if that
    cannot be read: the minimum over the machine's and the limit of each control group around it."""
    limits = [_number(_read(group / names[0]).strip()) for group, names in _groups(root)]
    known = [size for size in (_machine_bytes(root, "MemTotal"), *limits) if size is not None]
    return min(known, default=None)


def require_memory(num_bytes: int, purpose: str, remedy: str, root: Path = SYSTEM_ROOT) -> None:
    """Raise NotEnoughMemoryError unless `num_bytes` are available, for `purpose`."""
    available = available_memory_bytes(root)
    if available is not None and num_bytes > available:
        raise NotEnoughMemoryError(
            f"{purpose} needs {num_bytes} bytes of memory, {available} are available: {remedy}"
        )


def _machine_bytes(root: Path, field: str) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == field and value.split():
            number = _number(value.split()[0])
            return None if number is None else number * 1024
    return None


_Group = tuple[Path, tuple[str, str]]
"""A control group, and the names of its files of limit and use."""


def _groups(root: Path) -> list[_Group]:
    """Return the groups around this process, in both versions of groups."""
    found: list[_Group] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found += _along(root / "sys/fs/cgroup", path, ("memory.max", "memory.current"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found += _along(root / "sys/fs/cgroup/memory", path, names)
    return found


def _along(mount: Path, path: str, names: tuple[str, str]) -> list[_Group]:
    """Return the group at `path` and every group around it.

    Inside a container the path may be the host's, and then only the mount itself exists.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [(mount.joinpath(*parts[:depth]), names) for depth in range(len(parts), -1, -1)]


def _left_in(group: Path, names: tuple[str, str]) -> int | None:
    limit, used = (_number(_read(group / name).strip()) for name in names)
    if limit is None or used is None:
        return None
    statistics = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines())
    idle = statistics.get("inactive_file", statistics.get("total_inactive_file", "0"))
    return limit - used + min(used, _number(idle) or 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


FALLBACK_DIRECTORY = Path("/dev/shm")
"""Directory of a file that is unlinked at once, for kernels without memfd."""

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory(name: str, size_bytes: int, root: Path = SYSTEM_ROOT) -> int:
    """Return a descriptor of `size_bytes` zero bytes, all allocated. The caller closes it.

    `name` appears only in `/proc/PID/maps`.

    Raises:
        NotEnoughMemoryError: the machine or the control group has less, or shared memory is full.
    """
    purpose = f"shared memory {name}"
    remedy = "lower offload.host_memory_per_rank, or raise the limit of the container"
    require_memory(size_bytes, purpose, remedy, root)
    descriptor = _open(name)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        _fix_size(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise NotEnoughMemoryError(
            f"{purpose} needs {size_bytes} bytes of memory, which cannot be had "
            f"({error.strerror}): {remedy}"
        ) from error
    return descriptor


def _open(name: str) -> int:
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM):
            raise NotEnoughMemoryError(
                f"shared memory {name} cannot be made ({error.strerror}): raise the limit of open "
                "files or of memory"
            ) from error
    return _open_unlinked(FALLBACK_DIRECTORY)


def _open_unlinked(directory: Path) -> int:
    try:
        descriptor, path = tempfile.mkstemp(prefix="kvcache-", dir=directory)
        os.unlink(path)
    except OSError as error:
        raise NotEnoughMemoryError(
            f"no file of shared memory can be made in {directory} ({error.strerror}): mount a "
            "tmpfs there"
        ) from error
    return descriptor


def _fix_size(descriptor: int) -> None:
    """Forbid changes of size, if the kernel can: a file of a tmpfs cannot be sealed."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM):
            raise
