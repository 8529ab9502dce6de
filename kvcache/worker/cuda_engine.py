"""The copy engine for CUDA: transfers on a stream of their own, ordered by events.

Stands beside copy_engine.py, whose protocol it serves. Compute-stream work runs on the stream that
is current on the device when the worker calls, so it is ordered with the model's kernels. Host
tensors must be pinned: otherwise a "non-blocking" copy blocks. Refuses to run without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvcache.arrays import Int32Array
from kvcache.errors import ConfigurationError
from kvcache.worker.copy_engine import (
    CopyEngine,
    CpuCopyEngine,
    DoneCopy,
    PendingCopy,
    consecutive_runs,
)


class _Queryable(Protocol):
    """What is asked of `torch.cuda.Event`, whose own method has no types."""

    def query(self) -> bool:
        """Say whether everything before the event is over."""


# Typed names for constructors that have no types of their own.
_make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
_make_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream


@dataclass(frozen=True, eq=False)
class _EventCopy:
    """A transfer that is over when `event` is. Keeps alive what the copy still uses."""

    event: torch.cuda.Event
    kept_alive: tuple[torch.Tensor, ...]

    def is_done(self) -> bool:
        """Ask the event; never blocks."""
        return _is_over(self.event)

    def wait(self) -> None:
        """Block until the event."""
        self.event.synchronize()


class CudaCopyEngine:
    """Asynchronous copies between device blocks and pinned host memory, and on the device."""

    def __init__(self, device: torch.device) -> None:
        """Make the transfer stream; raises ConfigurationError when there is no such device."""
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigurationError(
                f"device {device} is not a usable CUDA device: set the device to cpu, or install a "
                "CUDA build of torch on a machine with a GPU"
            )
        self._device = device
        self._stream = _make_stream(device)
        self._forward_end: torch.cuda.Event | None = None

    def copy_blocks(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> PendingCopy:
        """Start the transfer behind everything queued on the compute stream so far."""
        if not len(source_ids):
            return DoneCopy()
        kept_alive = [sources, destinations]
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            if self._forward_end is not None:  # the model may use another thread and stream
                self._stream.wait_event(self._forward_end)
            with torch.cuda.stream(self._stream):
                if sources.device == destinations.device:
                    staging = sources.index_select(0, self._ids(source_ids))
                    destinations.index_copy_(0, self._ids(destination_ids), staging)
                    kept_alive.append(staging)
                else:
                    _copy_runs(sources, source_ids, destinations, destination_ids)
                event = _make_event()
                event.record(self._stream)
        return _EventCopy(event, tuple(kept_alive))

    def copy_within(
        self, rows: torch.Tensor, source_ids: Int32Array, destination_ids: Int32Array
    ) -> None:
        """Gather, then scatter, on the compute stream."""
        if len(source_ids):
            staging = rows.index_select(0, self._ids(source_ids))
            rows.index_copy_(0, self._ids(destination_ids), staging)

    def zero_blocks(self, rows: torch.Tensor, ids: Int32Array) -> None:
        """Fill on the compute stream."""
        if len(ids):
            rows.index_fill_(0, self._ids(ids), 0)

    def on_forward_end(self) -> None:
        """Record an event on the compute stream."""
        event = _make_event()
        event.record(torch.cuda.current_stream(self._device))
        self._forward_end = event

    def is_compute_idle(self) -> bool:
        """Ask the last forward's event."""
        return self._forward_end is None or _is_over(self._forward_end)

    def wait_compute(self) -> None:
        """Wait for the last forward's event."""
        if self._forward_end is not None:
            self._forward_end.synchronize()

    def close(self) -> None:
        """Wait for the transfers and for the compute stream."""
        self._stream.synchronize()
        self.wait_compute()

    def _ids(self, ids: Int32Array) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self._device)


def _is_over(event: _Queryable) -> bool:
    return event.query()


def _copy_runs(
    sources: torch.Tensor,
    source_ids: Int32Array,
    destinations: torch.Tensor,
    destination_ids: Int32Array,
) -> None:
    """Queue one contiguous copy per run; rows that are not side by side go one by one."""
    is_solid = sources.is_contiguous() and destinations.is_contiguous()
    for source, destination, count in consecutive_runs(source_ids, destination_ids):
        step = count if is_solid else 1
        for i in range(0, count, step):
            destinations[destination + i : destination + i + step].copy_(
                sources[source + i : source + i + step], non_blocking=True
            )


def make_copy_engine(device: torch.device) -> CopyEngine:
    """Return the engine for `device`; raises ConfigurationError when there is none."""
    if device.type == "cpu":
        return CpuCopyEngine()
    if device.type == "cuda":
        return CudaCopyEngine(device)
    raise ConfigurationError(f"no copy engine for device {device}: use cpu or cuda")
