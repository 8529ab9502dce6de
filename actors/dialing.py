"""How a client finds its coordinator, and finds it again after it has moved."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from actors.connect import connect_peer, require_ray, this_node
from actors.endpoint_record import load_endpoint
from actors.reports import ClusterStatus
from actors.transport import Endpoint, Peer, PeerTransport
from actors.transport.mailbox import Mailbox
from kvcache.base.errors import ClusterError, DeadlineError, NotRunningError
from kvcache.config import ClusterConfig

DIAL_TIMEOUT_S = 5.0


class Dialer:
    """Opens connections to the coordinator of one cluster, wherever it is now."""

    needs_keeping_alive = True

    def __init__(self, coordinator: Any, config: ClusterConfig) -> None:
        """`coordinator` is the actor; `config` is the cluster's."""
        self._coordinator = coordinator
        self.config = config

    def endpoint(self) -> Endpoint:
        """Ask the coordinator where it listens for this process.

        Raises NotRunningError when the cluster is gone for good, DeadlineError when it gives no
        answer now.
        """
        try:
            call = self._coordinator.endpoint_for.remote(this_node())
            endpoint: Endpoint = ray.get(call, timeout=DIAL_TIMEOUT_S)
        except ActorDiedError as error:
            raise NotRunningError(f"cluster {self.config.name} is gone: launch it again") from error
        except RayError as error:
            raise DeadlineError(
                f"the coordinator of {self.config.name} cannot be asked where it listens: {error}"
            ) from error
        return endpoint

    def noted(self) -> Endpoint | None:
        """Return where the coordinator has written down that it listens for this process."""
        try:
            return load_endpoint(self.config.name, this_node().node_id)
        except ClusterError:
            return None  # it can be asked, later

    def open(self, endpoint: Endpoint, peer: Peer) -> PeerTransport:
        """Return a new end for `peer`."""
        return connect_peer(
            endpoint, peer, self.config.transport.max_message_bytes, Mailbox(capacity=1)
        )

    def lost_workers(self) -> str:
        """Say which ranks are lost and why, empty if none is. Raises as `endpoint` does."""
        require_ray()
        try:
            status: ClusterStatus = ray.get(
                self._coordinator.status.remote(), timeout=DIAL_TIMEOUT_S
            )
        except ActorDiedError as error:
            raise NotRunningError(f"cluster {self.config.name} is gone: launch it again") from error
        except RayError as error:
            raise DeadlineError(
                f"the coordinator of {self.config.name} cannot be asked how it does: {error}"
            ) from error
        lost = [f"rank {rank.rank} is {rank.describe()}" for rank in status.ranks if rank.problem]
        return "; ".join(lost) or (status.problem if "rank" in status.problem else "")
