"""The record of a cluster with an embedded coordinator, and invalid records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from actors.embedded.record import EmbeddedRecord
from actors.processes import ProcessIdentity
from kvcache.base.errors import MalformedMessageError, VersionMismatchError
from kvcache.config import ClusterConfig

MakeConfig = Callable[..., ClusterConfig]

PROCESS = ProcessIdentity("n1", "10.0.0.1", 17, 4711)


def make_record(config: ClusterConfig) -> EmbeddedRecord:
    return EmbeddedRecord("launch", config.model_dump_json(), PROCESS, epoch=3)


def fields_of(record: EmbeddedRecord) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(record.to_bytes())
    return fields


def test_a_record_comes_back_as_it_was_with_the_configuration(make_config: MakeConfig) -> None:
    config = make_config(deadlines={"reattach_s": 1.5})
    record = make_record(config)
    again = EmbeddedRecord.from_bytes(record.to_bytes(), config.name)
    assert (again, again.config) == (record, config)
    assert again.where() == "process 17 on 10.0.0.1"
    left = replace(record, process=None)
    assert EmbeddedRecord.from_bytes(left.to_bytes(), config.name) == left


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "3"},
        {"epoch": True},
        {"process": {}},
        {"process": [1]},
        {"process": {"node_id": "n1", "host": "h", "process_id": 1}},
        {"launch_id": None},
        {"unknown": 1},
        {"version": None},
        {"version": "1"},
    ],
)
def test_invalid_records_are_refused(make_config: MakeConfig, change: dict[str, Any]) -> None:
    fields = {**fields_of(make_record(make_config())), **change}
    with pytest.raises(MalformedMessageError) as caught:
        EmbeddedRecord.from_bytes(json.dumps(fields).encode(), "c")
    assert str(caught.value) == "the record of c is invalid: launch under another name"


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b"null", b"1", b"{}", b'{"version": 1}'])
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessageError, match="the record of c is invalid"):
        EmbeddedRecord.from_bytes(data, "c")


def test_a_record_of_another_version_says_so(make_config: MakeConfig) -> None:
    fields = {**fields_of(make_record(make_config())), "version": 2}
    with pytest.raises(VersionMismatchError) as caught:
        EmbeddedRecord.from_bytes(json.dumps(fields).encode(), "c")
    assert str(caught.value) == (
        "the record of c has version 2, this package reads version 1: run the same release, or "
        "launch under another name"
    )
