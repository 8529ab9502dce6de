"""What is written down of a cluster whose coordinator is embedded in some process.

There is no coordinator actor whose name would make a launch exclusive, and that could be asked. A
record in the cluster's small state does both: whoever writes it first may launch, and whoever reads
it knows the configuration, and where the coordinator is. It outlives its process, like the workers.
"""

from __future__ import annotations

import importlib
import json
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

from actors.connect import is_actor_known
from actors.names import coordinator_name, worker_name
from actors.processes import ProcessIdentity, is_process_alive, this_process
from actors.state import RayRecordStore
from actors.workers.making import WorkerOptions
from kvcache.base.errors import (
    AlreadyRunningError,
    ConfigurationError,
    MalformedMessageError,
    VersionMismatchError,
)
from kvcache.config import ClusterConfig, parse_config

RECORD_VERSION = 1

_TYPES: dict[str, type] = {
    "launch_id": str,
    "configuration": str,
    "has_given_workers": bool,
    "worker_class": str,
    "epoch": int,
}
_PROCESS_TYPES: dict[str, type] = {
    "node_id": str,
    "host": str,
    "process_id": int,
    "started_ticks": int,
}


@dataclass(frozen=True)
class EmbeddedRecord:
    """One launch and the process that has its coordinator.

    `launch_id` stays the same when another process takes over. `process` None: its last one has
    left. `epoch`: the one that the process took first, 0 while the launch is under way.
    `has_given_workers`: they are an engine's own actors, which have no names of ours; otherwise
    `worker_class` says where that of the workers is, `module:name`, empty for the usual one.
    """

    launch_id: str
    configuration: str
    process: ProcessIdentity | None
    has_given_workers: bool = False
    worker_class: str = ""
    epoch: int = 0

    @property
    def config(self) -> ClusterConfig:
        """The cluster's configuration. Raises ConfigurationError for what another release wrote."""
        return parse_config(json.loads(self.configuration), "the record of an embedded cluster")

    @property
    def worker_options(self) -> WorkerOptions:
        """How other workers are made for those that are lost.

        Raises ConfigurationError when their class cannot be imported here.
        """
        return WorkerOptions(self.has_given_workers, _imported(self.worker_class))

    def to_bytes(self) -> bytes:
        """Return the record as versioned JSON."""
        return json.dumps({"version": RECORD_VERSION, **asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes, cluster: str) -> EmbeddedRecord:
        """Return what `to_bytes` made of the record of `cluster`.

        Raises MalformedMessageError for what is no record, VersionMismatchError for another
        version's.
        """
        remedy = "launch under another name"
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise MalformedMessageError(f"the record of {cluster} is none: {remedy}") from error
        version = fields.pop("version", None) if type(fields) is dict else None
        if type(version) is int and version != RECORD_VERSION:
            raise VersionMismatchError(
                f"the record of {cluster} has version {version}, this package reads version "
                f"{RECORD_VERSION}: run the same release, or {remedy}"
            )
        process = fields.pop("process", None) if type(fields) is dict else None
        if (
            type(version) is not int
            or not _has_types(fields, _TYPES)
            or not (process is None or _has_types(process, _PROCESS_TYPES))
        ):
            raise MalformedMessageError(f"the record of {cluster} is none: {remedy}")
        owner = None if process is None else ProcessIdentity(**process)
        return cls(process=owner, **fields)

    def where(self) -> str:
        """Say in which process the coordinator is, for messages."""
        if self.process is None:
            return "no process any more"
        return f"process {self.process.process_id} on {self.process.host}"


def _place_of(worker_class: type[Any]) -> str:
    return f"{worker_class.__module__}:{worker_class.__qualname__}"


def _imported(place: str) -> type[Any] | None:
    """Return the class at `module:name`, None for no place."""
    if not place:
        return None
    module, _, name = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the workers' class {place} cannot be imported here: define it in a module that every "
            "process of the cluster has"
        ) from error
    if not isinstance(found, type):
        raise ConfigurationError(f"{place} is no class of workers")
    return found


def claim_launch(config: ClusterConfig, worker_options: WorkerOptions) -> EmbeddedRecord:
    """Write the record of a launch by this process, and return it.

    Raises AlreadyRunningError when a cluster of that name lives, or is being launched.
    """
    name = config.name
    store = RayRecordStore(name)
    record = EmbeddedRecord(
        secrets.token_hex(8),
        config.model_dump_json(),
        this_process(),
        worker_options.is_foreign,
        "" if worker_options.subclass is None else _place_of(worker_options.subclass),
    )
    refuse_if_embedded(name)
    if not store.claim(record.to_bytes()):
        store.remove()  # of a launch that died
        if not store.claim(record.to_bytes()):
            raise AlreadyRunningError(
                f"a cluster named {name!r} is being launched: wait, or launch under another name"
            )
    if is_actor_known(coordinator_name(name)):
        store.remove()
        raise AlreadyRunningError(
            f"a cluster named {name!r} is running: connect to it, stop it, or launch under "
            "another name"
        )
    return record


def load_record(name: str) -> EmbeddedRecord | None:
    """Return the record of the cluster `name`, None where there is none. Raises as `from_bytes`
    does, and ClusterError when it cannot be read."""
    data = RayRecordStore(name).load()
    return None if data is None else EmbeddedRecord.from_bytes(data, name)


def refuse_if_embedded(name: str) -> None:
    """Raise AlreadyRunningError when a cluster of this name with an embedded coordinator lives: its
    workers do, or the process that launches it does."""
    record = load_record(name)
    if record is None:
        return
    num_ranks = record.config.parallel.num_ranks
    has_workers = any(is_actor_known(worker_name(name, place)) for place in range(num_ranks))
    has_process = record.process is not None and is_process_alive(record.process)
    if has_process:
        raise AlreadyRunningError(
            f"a cluster named {name!r} is running, with its coordinator in {record.where()}: stop "
            "it, take it over, or launch under another name"
        )
    if has_workers:
        raise AlreadyRunningError(
            f"the workers of a cluster named {name!r} are running without a coordinator: take it "
            "over, stop it, or launch under another name"
        )


def take_record(record: EmbeddedRecord, epoch: int) -> EmbeddedRecord:
    """Return the record with which this process has the coordinator since `epoch`; write it down,
    if no later one has it."""
    mine = replace(record, process=this_process(), epoch=epoch)
    _save_unless_outrun(mine)
    return mine


def leave_record(record: EmbeddedRecord) -> None:
    """Write down that no process has the coordinator, if no later one has."""
    _save_unless_outrun(replace(record, process=None))


def _save_unless_outrun(record: EmbeddedRecord) -> None:
    name = record.config.name
    present = load_record(name)
    if present is None or present.epoch <= record.epoch:
        RayRecordStore(name).save(record.to_bytes())


def _has_types(fields: Any, types: dict[str, type]) -> bool:
    return type(fields) is dict and {k: type(v) for k, v in fields.items()} == types
