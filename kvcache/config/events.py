"""Cache events for external routers: whether to publish, where, and in which form.

One section of `ClusterConfig`. Refuses invalid addresses, and two sockets at one address.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kvcache.base.errors import ConfigurationError, shown
from kvcache.config.sections import Bytes, Count, Seconds, Section

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.*-]+):(?P<port>[0-9]{1,5}|\*)")


def require_endpoint(value: str) -> str:
    """Return `value`; raises ConfigurationError unless it is an address to bind."""
    match = _TCP.fullmatch(value)
    is_port = match is not None and (match["port"] == "*" or int(match["port"]) < 1 << 16)
    if not is_port and not re.fullmatch(r"ipc://.+", value):
        raise ConfigurationError(
            f"{shown(value)} is not an address: write tcp://HOST:PORT, where PORT 0 lets the "
            "system choose, or ipc://PATH"
        )
    return value


def shifted(endpoint: str, by: int) -> str:
    """Return a replica's address: the port, or the name, of `endpoint` plus `offset`.

    Raises ConfigurationError if there is no such port.
    """
    if endpoint.endswith((":0", ":*")) or not by:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}-{by}"
    place, _, port = endpoint.rpartition(":")
    return require_endpoint(f"{place}:{int(port) + by}")


Address = Annotated[str, AfterValidator(require_endpoint)]


class EventsConfig(Section):
    """The events that routers get. Prompt tokens leave the process only when `enabled`.

    `endpoint` has the live stream, `replay_endpoint` answers requests for missed events. With port
    0 the system chooses one, which `kvcache status` shows. `topic` None: "kv@<cluster>@<model>".
    `encoding` "array" is for old consumers that cannot read maps, `publish_one_block_per_event` for
    consumers that hash every block under the event's parent. `publish_groups` "all" also publishes
    groups that routers cannot use. An empty batch follows `heartbeat_s` of silence. The last
    `history_batches`, of at most `history_bytes`, can be requested again; a follower that missed
    more gets the whole state. `queue_bytes` limits the events that the publisher has not taken yet;
    beyond it the publisher sends a full snapshot. With `curve` "always", connections need the
    cluster's keys, which `discovery_record` hands out; third-party routers cannot get them.
    `data_parallel_rank` is set by the launch of several replicas; it is added to their ports.
    """

    enabled: bool = False
    endpoint: Address = "tcp://127.0.0.1:5557"
    replay_endpoint: Address = "tcp://127.0.0.1:5657"
    topic: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    encoding: Literal["map", "array"] = "map"
    publish_groups: Literal["usable", "all"] = "usable"
    publish_one_block_per_event: bool = False
    heartbeat_s: Seconds = 5.0
    history_batches: Count = 10_000
    history_bytes: Bytes = 64 << 20
    queue_bytes: Bytes = 256 << 20
    curve: Literal["never", "always"] = "never"
    data_parallel_rank: Annotated[int, Field(ge=0, le=4095)] = 0

    @model_validator(mode="after")
    def _are_two_places(self) -> EventsConfig:
        is_chosen = self.endpoint.endswith((":0", ":*"))
        if self.endpoint == self.replay_endpoint and not is_chosen:
            raise ConfigurationError(
                f"endpoint and replay_endpoint are both {self.endpoint}: give each a port of its "
                "own"
            )
        return self
