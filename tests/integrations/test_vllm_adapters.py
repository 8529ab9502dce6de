"""Blocks of LoRA adapters: another content under the same name and path never sees old bytes."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.integrations.vllm.adapters import AdapterRevisions, digest_below
from tests.integrations.test_vllm_block_store import Cluster, request_of


def make_adapter(directory: Path, weights: bytes, name: str = "a") -> Any:
    """Write an adapter's files, with the same times whatever they hold; return vLLM's request."""
    directory.mkdir(exist_ok=True)
    for file, content in (("config.json", b"{}"), ("model.safetensors", weights)):
        path = directory / f"adapter_{file}"
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
    (directory / "optimizer.pt").write_bytes(os.urandom(8))
    return SimpleNamespace(lora_name=name, lora_path=str(directory), lora_int_id=1)


def revision_of(adapter: Any) -> bytes | None:
    """What a new engine takes for the adapter's content."""
    return AdapterRevisions().revision_of(adapter)


def test_the_content_of_an_adapter_is_its_revision(tmp_path: Path) -> None:
    first = revision_of(make_adapter(tmp_path / "a", b"1"))
    assert first is not None and len(first) == 32
    assert revision_of(make_adapter(tmp_path / "a", b"1")) == first
    assert revision_of(make_adapter(tmp_path / "b", b"1")) == first
    assert revision_of(make_adapter(tmp_path / "a", b"2")) != first
    (tmp_path / "a" / "adapter_config.json").write_bytes(b'{"r": 4}')
    changed = SimpleNamespace(lora_name="a", lora_path=str(tmp_path / "a"), lora_int_id=1)
    assert revision_of(changed) not in (None, first)
    assert revision_of(None) == b""


def test_after_a_restart_other_weights_at_the_same_path_are_a_miss(tmp_path: Path) -> None:
    cluster = Cluster()
    old = make_adapter(tmp_path, b"1")
    assert cluster.run(request_of("r", 13, adapter=old)) == 0
    cluster.settle()
    assert cluster.run(request_of("s", 13, adapter=old)) == 12
    assert cluster.run(request_of("t", 13)) == 0
    cluster.settle()
    cluster.restart()
    new = make_adapter(tmp_path, b"2")
    assert cluster.run(request_of("u", 13, adapter=new)) == 0
    cluster.settle()
    cluster.restart()
    assert cluster.run(request_of("v", 13, adapter=make_adapter(tmp_path, b"1"))) == 0
    cluster.restart()
    assert cluster.run(request_of("w", 13)) == 12


@pytest.mark.parametrize("kind", ["a Hub name", "no weights", "a file"])
def test_an_adapter_whose_content_is_not_known_is_not_kept(tmp_path: Path, kind: str) -> None:
    adapter = make_adapter(tmp_path, b"1")
    if kind == "a Hub name":
        adapter.lora_path = "somebody/adapter"
    elif kind == "no weights":
        (tmp_path / "adapter_model.safetensors").unlink()
    else:
        adapter.lora_path += "/adapter_model.safetensors"
    cluster = Cluster()
    for name in "rs":
        assert cluster.run(request_of(name, 13, adapter=adapter)) == 0
        cluster.settle()
    assert cluster.sealed_keys() == [set(), set()]


def test_an_adapter_that_changes_in_a_running_engine_is_not_kept_any_more(tmp_path: Path) -> None:
    cluster = Cluster()
    adapter = make_adapter(tmp_path, b"1")
    cluster.run(request_of("r", 13, adapter=adapter))
    cluster.settle()
    kept = cluster.sealed_keys()
    make_adapter(tmp_path, b"2")
    assert cluster.run(request_of("s", 13, adapter=adapter)) == 0
    make_adapter(tmp_path, b"1")  # and who knows what vLLM has read
    assert cluster.run(request_of("t", 21, adapter=adapter)) == 0
    cluster.settle()
    assert cluster.sealed_keys() == kept


def test_events_name_a_block_of_an_adapter_as_vllm_does() -> None:
    digest, revision = sha256(b"block").digest(), sha256(b"adapter").digest()
    keyed = digest_below(digest, revision)
    assert keyed != digest and keyed[-8:] == digest[-8:] and len(keyed) == 32
    assert digest_below(digest, b"") == digest
