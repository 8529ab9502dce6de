"""Cache events for routers outside, in a configuration: whether, where, and in which form.

One section of `ClusterConfig`. Refuses places that are no addresses, and two sockets at one place.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kvcache.base.errors import ConfigurationError, shown
from kvcache.config.sections import Bytes, Count, Seconds, Section

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.*-]+):(?P<port>[0-9]{1,5}|\*)")


def require_endpoint(value: str) -> str:
    """Return `value`; raises ConfigurationError unless a socket could be bound there."""
    match = _TCP.fullmatch(value)
    is_port = match is not None and (match["port"] == "*" or int(match["port"]) < 1 << 16)
    if not is_port and not re.fullmatch(r"ipc://.+", value):
        raise ConfigurationError(
            f"{shown(value)} is no address: write tcp://HOST:PORT, where PORT 0 lets the system "
            "choose, or ipc://PATH"
        )
    return value


def shifted(endpoint: str, by: int) -> str:
    """Return the address of a replica: that many ports, or names, behind `endpoint`.

    Raises ConfigurationError where there is no such port.
    """
    if endpoint.endswith((":0", ":*")) or not by:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}-{by}"
    place, _, port = endpoint.rpartition(":")
    return require_endpoint(f"{place}:{int(port) + by}")


Address = Annotated[str, AfterValidator(require_endpoint)]


class EventsConfig(Section):
    """What routers are told of the cache. Prompt tokens leave the process only when `enabled`.

    `endpoint` and `replay_endpoint`: the live stream, and where it can be asked for again; port 0
    lets the system choose, and `kvcache status` shows what it chose. `topic` None:
    "kv@<cluster>@<model>". `encoding` "array" is for consumers from before there were maps,
    `publish_one_block_per_event` for those that hash every block under the event's parent.
    `publish_groups` "all" tells of groups that a router cannot use, too. An empty batch is
    published after `heartbeat_s` of silence. The last `history_batches`, of `history_bytes`
    together, can be asked for again; who has missed more gets everything. `queue_bytes`: what the
    publisher has not taken yet; beyond it the publisher sends a full snapshot. `curve` "always": a
    connection needs the cluster's keys, which `discovery_record` hands out; third-party routers
    cannot have them. `data_parallel_rank` is set by the launch of several replicas: their ports are
    those of the configuration plus it.
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
