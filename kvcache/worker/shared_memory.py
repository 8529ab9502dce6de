"""Memory without a name: a descriptor that can be handed to other processes, and nothing in a
directory.

Below host_segment.py. The memory lives as long as a process has its descriptor or a mapping of it,
so that nothing is left when all of them are killed. All of it is taken before it is mapped: too
little memory is an error here, never a signal later. It never shrinks: no process that has the
descriptor can take pages away under somebody else's mapping.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

from kvcache.base.errors import NotEnoughMemoryError
from kvcache.worker.free_memory import SYSTEM_ROOT, require_memory

FALLBACK_DIRECTORY = Path("/dev/shm")
"""Where a file is made, and unlinked at once, by kernels without memfd."""

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory(name: str, size_bytes: int, root: Path = SYSTEM_ROOT) -> int:
    """Return a descriptor of `size_bytes` zero bytes, all of them there. The caller closes it.

    `name` is shown in `/proc/PID/maps` and nowhere else.

    Raises:
        NotEnoughMemoryError: the machine or the control group has less, or shared memory is full.
    """
    purpose = f"shared memory {name}"
    remedy = "lower host_blocks, or raise the limit of the container"
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
    """Forbid every change of size, where the kernel can: a file of a tmpfs cannot be sealed."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM):
            raise
