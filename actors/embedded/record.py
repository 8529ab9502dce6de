"""The record of a cluster whose coordinator is embedded in a process.

Such a cluster has no coordinator actor, whose name would make a launch exclusive and which could be
asked. A record in the cluster's small state does both: the process that writes it first may launch,
and readers learn the configuration and the coordinator's process. It outlives its process.
"""

from __future__ import annotations

import importlib
import json
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

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


@dataclass(frozen=True)
class EmbeddedRecord:
    """One launch and the process that has its coordinator.

    `launch_id` stays the same after a takeover. `process` None: the last one has left. `epoch`: the
    first one of the process, 0 during the launch. `has_given_workers`: the workers are an engine's
    own actors, without names of this package. Otherwise `worker_class` is their class as
    `module:name`, empty for the usual one.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    launch_id: str
    configuration: str
    process: ProcessIdentity | None
    has_given_workers: bool = False
    worker_class: str = ""
    epoch: int = 0

    @property
    def config(self) -> ClusterConfig:
        """The cluster's configuration. Raises ConfigurationError if another release wrote it."""
        return parse_config(json.loads(self.configuration), "the record of an embedded cluster")

    @property
    def worker_options(self) -> WorkerOptions:
        """How replacements of lost workers are made.

        Raises ConfigurationError if their class cannot be imported here.
        """
        return WorkerOptions(self.has_given_workers, _imported(self.worker_class))

    def to_bytes(self) -> bytes:
        """Return the record as versioned JSON."""
        return json.dumps({"version": RECORD_VERSION, **asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes, cluster: str) -> EmbeddedRecord:
        """Decode the record of `cluster`, as `to_bytes` encoded it.

        Raises MalformedMessageError if it is no record, VersionMismatchError for another version.
        """
        remedy = "launch under another name"
        try:
            fields = json.loads(data)
            version = fields.pop("version")
            if type(version) is not int:
                raise TypeError(f"the version is {version!r}")
            if version == RECORD_VERSION:
                return TypeAdapter(cls).validate_json(json.dumps(fields))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise MalformedMessageError(f"the record of {cluster} is invalid: {remedy}") from error
        raise VersionMismatchError(
            f"the record of {cluster} has version {version}, this package reads version "
            f"{RECORD_VERSION}: run the same release, or {remedy}"
        )

    def where(self) -> str:
        """Describe the coordinator's process, for messages."""
        if self.process is None:
            return "no process any more"
        return f"process {self.process.process_id} on {self.process.host}"


def _place_of(worker_class: type[Any]) -> str:
    return f"{worker_class.__module__}:{worker_class.__qualname__}"


def _imported(place: str) -> type[Any] | None:
    """Return the class at `module:name`, None for an empty name."""
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
        raise ConfigurationError(f"{place} is not a class of workers")
    return found


def claim_launch(config: ClusterConfig, worker_options: WorkerOptions) -> EmbeddedRecord:
    """Write and return the record of a launch by this process.

    Raises AlreadyRunningError if a cluster of that name lives or is being launched.
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
        store.remove()  # the record of a launch that died
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
    """Return the record of the cluster `name`, None if there is none. Raises as `from_bytes`, and
    ClusterError if it cannot be read."""
    data = RayRecordStore(name).load()
    return None if data is None else EmbeddedRecord.from_bytes(data, name)


def refuse_if_embedded(name: str) -> None:
    """Raise AlreadyRunningError if a cluster of this name with an embedded coordinator lives: its
    workers, or the process that launches it."""
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
    """Record that this process has the coordinator since `epoch`, unless a later one has it;
    return the new record."""
    mine = replace(record, process=this_process(), epoch=epoch)
    _save_unless_outrun(mine)
    return mine


def leave_record(record: EmbeddedRecord) -> None:
    """Record that no process has the coordinator, unless a later one has it."""
    _save_unless_outrun(replace(record, process=None))


def _save_unless_outrun(record: EmbeddedRecord) -> None:
    name = record.config.name
    present = load_record(name)
    if present is None or present.epoch <= record.epoch:
        RayRecordStore(name).save(record.to_bytes())
