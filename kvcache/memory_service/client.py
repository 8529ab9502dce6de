"""The worker's client of its node's memory service.

A new worker asks for the memory of its predecessor. Every call has a deadline. The client does not
wait for a memory service that is absent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.base.errors import (
    ClusterError,
    DeadlineError,
    ExhaustedError,
    MalformedMessageError,
    NotRunningError,
)
from kvcache.memory_service.protocol import (
    ADDRESS_SCHEME,
    connect,
    is_trusted,
    lock_owner,
    make_socket,
    receive,
    send,
    socket_name,
)


@dataclass(frozen=True)
class MemoryServiceAddress:
    """The endpoint of the node's memory service (`unix:@name`), and the cluster whose memory it
    keeps."""

    address: str
    cluster: str
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        socket_name(self.address)

    def name_of(self, rank: int) -> str:
        return segment_name(self.cluster, rank)


ENGINE_SERVICES = "kvcache-vllm-"
"""How the addresses of memory services of vLLM engines begin, behind `unix:@`: the user's number
and the engine's name follow."""


def service_address(name: str, replica: int = 0) -> MemoryServiceAddress:
    """Return where the memory service of the engines `name` of this user listens on this node, and
    how it names the memory of a replica's ranks: `name/rank0`, `name/replica1/rank0`."""
    address = f"{ADDRESS_SCHEME}{ENGINE_SERVICES}{os.getuid()}-{name}"
    return MemoryServiceAddress(address, f"{name}/replica{replica}" if replica else name)


def segment_name(cluster: str, rank: int) -> str:
    """Return the name of a rank's memory in the memory service."""
    return f"{cluster}/rank{rank}"


class MemoryServiceClient:
    """Asks the memory service at an address, with one connection per question.

    Every method raises NotRunningError (no memory service, or another user's), DeadlineError, or
    ClusterError for a refusal or an invalid answer.
    """

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        """Ask at `address`. Connects later."""
        self._address = address
        self._name = socket_name(address)
        self._timeout_s = timeout_s

    def attach(self, name: str) -> int | None:
        """Return a descriptor of the memory kept under `name`, None if there is none.

        The caller closes it.
        """
        return self._ask("attach", name)[1]

    def list(self, prefix: str) -> dict[str, int]:
        """Return the names that begin with `prefix`, and the number of the memory under each."""
        values, _ = self._ask("list", prefix)
        if len(values) != 1 or not isinstance(values[0], list):
            raise ClusterError(f"the memory service at {self._address} lists nothing that is known")
        return {str(name): int(number) for name, number in values[0]}

    def put(self, name: str, descriptor: int) -> None:
        """Make the service keep this memory under `name`, replacing older memory that no other
        process uses. The descriptor stays open."""
        self._ask("put", name, descriptor)

    def drop(self, name: str) -> None:
        """Make the service drop the memory under `name`."""
        self._ask("drop", name)

    def _ask(
        self, verb: str, name: str, descriptor: int | None = None
    ) -> tuple[Sequence[Any], int | None]:
        """Return the other values of a successful answer, and its descriptor."""
        with make_socket(self._timeout_s) as connected:
            try:
                connect(connected, self._name, self._timeout_s)
                if not is_trusted(connected):
                    raise NotRunningError(
                        f"the memory service at {self._address} is another user's"
                    )
                send(connected, [verb, name], descriptor)
                values, received = receive(connected)
            except TimeoutError as error:
                raise DeadlineError(
                    f"the memory service at {self._address} does not answer within "
                    f"{self._timeout_s} s"
                ) from error
            except OSError as error:
                raise NotRunningError(
                    f"no memory service answers at {self._address} ({error.strerror})"
                ) from error
            except MalformedMessageError as error:
                raise ClusterError(f"memory service at {self._address}: {error}") from error
        if values[:2] == [True, ""]:
            return values[2:], received
        if received is not None:
            os.close(received)
        if len(values) == 2 and values[0] is False:
            raise ExhaustedError(f"the memory service at {self._address} refuses: {values[1]}")
        raise ClusterError(f"the memory service at {self._address} gives an invalid answer")


@dataclass(frozen=True)
class KeptMemory:
    """Memory that is kept under `name`. `process_id` has it now, as `lock_owner` says."""

    name: str
    num_bytes: int
    process_id: int


def kept_memory(name: str) -> list[KeptMemory]:
    """Return what the memory service of the engines `name` keeps, by rank and replica.

    Raises as the client does.
    """
    client = MemoryServiceClient(service_address(name).address)
    found: list[KeptMemory] = []
    for each in sorted(client.list(f"{name}/")):
        descriptor = client.attach(each)
        if descriptor is None:
            continue  # dropped since
        try:
            size = os.fstat(descriptor).st_size
            found.append(KeptMemory(each, size, lock_owner(descriptor)))
        finally:
            os.close(descriptor)
    return found
