"""Communication between ranks: sums within a stage, hidden states from stage to stage.

Each user makes and owns a `ProcessGroup` of PyTorch (gloo on CPU, NCCL on CUDA). Without global
state, ranks may be threads of one process, and a group can be dropped and made again after a rank
has failed. Ranks connect through a store on loopback, on a port that the system chooses. Every
operation has a deadline.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroup, ProcessGroupGloo

from examples.engine.weights import RankPlace
from kvcache.base.errors import ClusterError

LOOPBACK = "127.0.0.1"


class Communicator(Protocol):
    """The operations between ranks."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of the parts of all tensor-parallel ranks of this stage."""

    def pass_on(self, hidden: torch.Tensor) -> None:
        """Hand hidden states to the same rank of the next stage."""

    def take_over(self, like: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the stage before, of the shape and kind of `like`."""

    def all_agree(self, is_well: bool) -> bool:
        """Say whether every rank of the model is well."""


class SingleRank:
    """The communicator of a single rank."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the only part."""
        return part

    def pass_on(self, hidden: torch.Tensor) -> None:
        """Never called: there is no next stage."""

    def take_over(self, like: torch.Tensor) -> torch.Tensor:
        """Never called: there is no previous stage."""
        return like

    def all_agree(self, is_well: bool) -> bool:
        """Return the only rank's answer."""
        return is_well


class RankGroup:
    """One of several ranks. Every rank makes one for the same `generation` at the same time."""

    def __init__(
        self,
        store: Store,
        rank: int,
        place: RankPlace,
        *,
        generation: int = 0,
        device: str = "cpu",
        timeout_s: float = 60.0,
    ) -> None:
        """Connect to the others through `store`. Raises ClusterError if they do not come."""
        self._place = place
        self._rank = rank
        timeout = timedelta(seconds=timeout_s)
        num_ranks = place.tensor_size * place.num_stages
        try:
            everybody = PrefixStore(f"{generation}/all", store)
            stage = PrefixStore(f"{generation}/stage-{place.stage}", store)
            self._everybody = _make_group(everybody, rank, num_ranks, timeout, device)
            self._stage = _make_group(stage, place.tensor_rank, place.tensor_size, timeout, device)
        except RuntimeError as error:
            raise ClusterError(f"rank {rank} of {num_ranks} reached no other: {error}") from error
        self._device = device

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """See `Communicator`. Raises ClusterError, as all methods do, if another rank is gone."""
        if self._place.tensor_size == 1:
            return part
        total = part.contiguous()
        self._run("sum", self._stage.allreduce([total]))
        return total

    def pass_on(self, hidden: torch.Tensor) -> None:
        """See `Communicator`."""
        receiver = self._rank + self._place.tensor_size
        self._run("pass on", self._everybody.send([hidden.contiguous()], receiver, 0))

    def take_over(self, like: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        hidden = torch.empty_like(like)
        sender = self._rank - self._place.tensor_size
        self._run("take over", self._everybody.recv([hidden], sender, 0))
        return hidden

    def all_agree(self, is_well: bool) -> bool:
        """See `Communicator`."""
        flag = torch.tensor([0 if is_well else 1], device=self._device)
        self._run("agree", self._everybody.allreduce([flag]))
        return not int(flag)

    def _run(self, what: str, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise ClusterError(f"rank {self._rank} cannot {what}: {error}") from error


def local_store() -> Store:
    """Return the store of ranks that are threads of this process."""
    return HashStore()


def open_store(host: str) -> tuple[Store, int]:
    """Return a store for ranks of other processes, and its port, which the system chooses."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, store.port


def join_store(host: str, port: int, timeout_s: float) -> Store:
    """Connect to another process's store."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _make_group(
    store: Store, rank: int, size: int, timeout: timedelta, device: str
) -> ProcessGroup:
    if device == "cuda":
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        made: Any = ProcessGroupNCCL(store, rank, size, nccl)
        return cast(ProcessGroup, made)
    # Bound to loopback: the host's name may not resolve to an interface of this machine.
    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    group: ProcessGroup = kind(store, rank, size, options)
    return group
