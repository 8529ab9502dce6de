"""Maps a rank's host memory in the background, before copies use it.

`make_memory` reserves pages. The kernel clears and maps each at its first use, which takes some
microseconds. So that copies do not wait for it while an engine runs, a thread of the least priority
uses the pages first, a slice at a time, and changes no byte.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

import numpy as np
import numpy.typing as npt

SLICE_BYTES = 1 << 20
"""Mapped at a time: other threads of the process cannot change its mappings meanwhile."""

LEAST_PRIORITY = 19

_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap.madvise would hold the interpreter's lock
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_slice(address: int, length: int) -> bool:
    """Map bytes for writing; say whether the kernel could."""
    return bool(_madvise(address, length, _MADV_POPULATE_WRITE) == 0)


class FirstTouch:
    """Maps all of `memory`, which begins at a page, unless it is closed before."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.num_bytes = 0
        """How much is mapped. Less than everything at the end if the kernel cannot do it."""
        self._memory = memory
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-touch", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; say whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end_soon(self) -> None:
        """Map nothing after the current slice."""
        self._is_closed.set()

    def close(self) -> None:
        """Map nothing after the current slice, and wait for it."""
        self.end_soon()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # other systems have no priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
        address, size = self._memory.ctypes.data, self._memory.nbytes
        while self.num_bytes < size and not self._is_closed.is_set():
            length = min(SLICE_BYTES, size - self.num_bytes)
            if not map_slice(address + self.num_bytes, length):
                return
            self.num_bytes += length
