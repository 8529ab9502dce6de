"""Which engine a directory is for: all its ranks and replicas agree, and others are refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.integrations.vllm import files_owner
from kvcache.integrations.vllm.files_owner import RECORD, FilesOwner
from kvcache.integrations.vllm.kv_groups import KVGroups
from kvcache.integrations.vllm.options import ConnectorOptions, EngineSetting
from kvcache.specs import FullAttentionSpec

LAYERS = "layers"
DEADLINE_S = 30.0


def setting_of(directory: Path, revision: str = "1", **changes: object) -> EngineSetting:
    disk = {"directory": str(directory), "capacity_per_rank": "1MiB"}
    options = ConnectorOptions.parse(
        {
            "name": "chat",
            "weight_revision": revision,
            "offload": {"host_memory_per_rank": "1MiB", "disk": disk},
        }
    )
    groups = KVGroups((FullAttentionSpec(4, 1, 1),), 4)
    setting = EngineSetting(options, f"m {revision}", groups, 9, num_ranks=1, model="/models/m")
    return replace(setting, **changes)  # type: ignore[arg-type]


def owner_of(setting: EngineSetting) -> FilesOwner:
    disk = setting.options.offload.disk
    assert disk is not None
    return FilesOwner(setting, disk)


def claim(setting: EngineSetting, rank: int = 0, layers: str = LAYERS) -> None:
    """Start a rank: it has the directory, and makes that of its layout."""
    owner, fingerprint = owner_of(setting), setting.fingerprint(layers)
    owner.require(rank, fingerprint)
    owner.claim(rank, fingerprint)
    place = Path(setting.options.offload.disk.directory) / "chat" / fingerprint / f"rank{rank}"
    place.mkdir(parents=True, exist_ok=True)


def refusal_of(setting: EngineSetting, rank: int = 0, layers: str = LAYERS) -> str:
    """Return why the rank does not start; nothing has changed in the directory."""
    directory = Path(setting.options.offload.disk.directory)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    owner, fingerprint = owner_of(setting), setting.fingerprint(layers)
    with pytest.raises(ConfigurationError) as refused:
        owner.claim(rank, fingerprint)
    with pytest.raises(ConfigurationError, match="rm -r"):
        owner.require(rank, fingerprint)
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return str(refused.value)


def test_the_same_engine_starts_again_and_its_replicas_with_it(tmp_path: Path) -> None:
    setting = setting_of(tmp_path, num_ranks=2)
    for _ in range(2):
        claim(setting, 0)
        claim(setting, 1, "layers of the second stage")
    claim(replace(setting, replica=1), 0)


def test_another_revision_is_refused_in_one_sentence_with_values_and_remedy(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "a place"
    directory.mkdir()
    first, second = setting_of(directory), setting_of(directory, "2")
    claim(first)
    assert refusal_of(second) == (
        f"offload.disk.directory '{directory}' keeps files of 'chat' for model '/models/m', "
        f"weight_revision '1', 1 rank, fingerprint {first.fingerprint('')[:12]}, and this engine "
        f"has model '/models/m', weight_revision '2', 1 rank, fingerprint "
        f"{second.fingerprint('')[:12]}: choose another directory or name, or end the engines that "
        f"use this one and remove their files with rm -r '{directory}/chat'"
    )
    claim(first)


def test_another_model_number_of_ranks_or_layout_is_refused(tmp_path: Path) -> None:
    setting = setting_of(tmp_path)
    claim(setting)
    other = replace(setting, model_identity="other", model="/models/other")
    assert "has model '/models/other', " in refusal_of(other)
    for rank in (0, 1):
        assert "weight_revision '1', 2 ranks, " in refusal_of(replace(setting, num_ranks=2), rank)
    refused = refusal_of(setting, layers="laid out by AVX2")
    assert f"fingerprint {setting.fingerprint(LAYERS)[:12]}, and " in refused
    assert f"fingerprint {setting.fingerprint('laid out by AVX2')[:12]}: " in refused


CONFIG = {
    "dtype": "bf16",
    "hf_config": "an object",
    "hf_config.size": "64",
    "hf_config.rope": "null",
}


def configured(directory: Path, **changes: str | None) -> EngineSetting:
    """Return a setting with some of CONFIG changed, `hf_config__key`; None leaves it out."""
    named: dict[str, str | None] = dict(CONFIG)
    named.update({name.replace("__", "."): text for name, text in changes.items()})
    known = {name: text for name, text in named.items() if text is not None}
    return setting_of(directory, model_identity=str(sorted(known.items())), named_identity=known)


def test_keys_that_another_version_of_a_library_has_or_lacks_keep_no_engine_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = configured(tmp_path), configured(tmp_path, hf_config__new="null")
    assert before.fingerprint("") != after.fingerprint("")  # it reads none of the files
    claim(before)
    claim(after)
    assert caplog.text.count("has other keys: hf_config.new is new, null") == 1
    claim(replace(after, replica=1))
    claim(before)
    assert "other keys: hf_config.new is gone, it was null" in caplog.text
    claim(configured(tmp_path, hf_config__rope=None, hf_config__turn="null"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hf_config__size": "128"}, "hf_config.size is 128, it was 64"),
        ({"hf_config__size": "8" * 101}, "hf_config.size is sha256 "),
        ({"dtype": "f16"}, "dtype is f16, it was bf16"),
        ({"lora_dtype": "f16"}, "lora_dtype is new, f16"),
        ({"dtype": None, "hf_config__new": "1"}, "dtype is gone, it was bf16, hf_config.new is n"),
        (
            {"hf_config__rope": "an object", "hf_config__rope__factor": "2"},
            "hf_config.rope is an object, it was null, hf_config.rope.factor is new, 2",
        ),
        (
            {"dtype": "f16", **{f"hf_config__key{i}": "1" for i in range(6)}},
            "hf_config.key3 is new, 1, 2 more",
        ),
    ],
)
def test_values_that_differ_are_named(
    tmp_path: Path, changes: dict[str, str | None], said: str
) -> None:
    claim(configured(tmp_path))
    assert said in refusal_of(configured(tmp_path, **changes))


def test_without_details_every_difference_is_refused(tmp_path: Path) -> None:
    large = configured(tmp_path, **{f"hf_config__key{i}": "1" * 99 for i in range(5000)})
    claim(large)
    assert "hf_config" not in refusal_of(configured(tmp_path))
    claim(large)
    record = tmp_path / "chat" / RECORD
    record.unlink()
    shutil.rmtree(tmp_path / "chat" / large.fingerprint(LAYERS))
    claim(configured(tmp_path))
    known = json.loads(record.read_bytes())
    assert known.pop("details")["hf_config.size"] == "64"
    record.write_text(json.dumps(known))  # as an earlier release has written it
    other = configured(tmp_path, hf_config__new="1")
    assert "hf_config" not in refusal_of(other)
    claim(configured(tmp_path))
    claim(other)


def test_after_a_change_of_weights_one_engine_of_any_revision_starts(tmp_path: Path) -> None:
    claim(setting_of(tmp_path))
    for before, after in (("1", "2"), ("2", "1"), ("1", "1"), ("1", "3")):
        owner_of(setting_of(tmp_path, before)).open()
        claim(setting_of(tmp_path, after))
        refusal_of(setting_of(tmp_path, "4"))
    owner_of(setting_of(tmp_path, "3")).open()
    ranks = setting_of(tmp_path, "3", num_ranks=2)
    claim(ranks, 0)
    claim(ranks, 1)


def open_without_room(told: Connection, directory: Path) -> None:
    """A process that may make no file of more than a few bytes, and opens the directory."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    owner = owner_of(setting_of(directory))
    try:
        owner._write(owner._own)
    except OSError as error:
        told.send(error.errno)
    owner.open()
    told.send("opened")


def test_a_full_disk_does_not_keep_the_next_revision_out(tmp_path: Path) -> None:
    claim(setting_of(tmp_path))
    fork = get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=open_without_room, args=(theirs, tmp_path))
    process.start()
    for told in (errno.EFBIG, "opened"):
        assert ours.poll(DEADLINE_S)
        assert ours.recv() == told
    process.join(DEADLINE_S)
    claim(setting_of(tmp_path, "2"))
    refusal_of(setting_of(tmp_path))


def test_a_record_in_another_notation_is_opened_too(tmp_path: Path) -> None:
    claim(setting_of(tmp_path))
    record = tmp_path / "chat" / RECORD
    record.write_text(json.dumps(json.loads(record.read_bytes()), separators=(",", ":")))
    owner_of(setting_of(tmp_path)).open()
    claim(setting_of(tmp_path, "2"))


def test_an_engine_whose_weights_change_does_not_open_the_directory_of_the_next_revision(
    tmp_path: Path,
) -> None:
    claim(setting_of(tmp_path))
    owner_of(setting_of(tmp_path)).open()
    claim(setting_of(tmp_path, "2"))
    owner_of(setting_of(tmp_path)).open()  # a replica that has not been restarted yet
    refusal_of(setting_of(tmp_path, "3"))


@pytest.mark.parametrize(
    "damage",
    [
        None,
        b"",
        b"{",
        b"[1]",
        b'{"engine": 1, "about": ""}',
        b"\xff\0" * 9,
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_without_a_record_that_can_be_read_only_the_own_layout_is_taken(
    tmp_path: Path, damage: bytes | None
) -> None:
    setting, record = setting_of(tmp_path), tmp_path / "chat" / RECORD
    claim(setting)
    record.unlink()
    if damage is not None:
        record.write_bytes(damage)
    assert f"no {RECORD} that can be read), fingerprint {setting.fingerprint(LAYERS)[:12]}, " in (
        refusal_of(setting_of(tmp_path, "2"))
    )
    for rank in (0, 1):
        refusal_of(replace(setting, num_ranks=2), rank)
    claim(setting)
    assert json.loads(record.read_bytes())["about"] == setting.about
    assert "weight_revision '1'" in refusal_of(setting_of(tmp_path, "2"))


def test_a_missing_root_is_not_made_and_an_unusable_place_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    owner_of(setting_of(missing)).require(0, "0" * 64)
    owner_of(setting_of(missing)).claim(0, "0" * 64)
    owner_of(setting_of(missing)).open()
    assert not missing.exists()
    (tmp_path / "chat").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"chat cannot be used .*: let the engine's user"):
        owner_of(setting_of(tmp_path)).claim(0, "0" * 64)


def test_a_lock_that_is_not_to_be_had_ends_the_start_and_not_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = setting_of(tmp_path)
    claim(setting)
    monkeypatch.setattr(files_owner, "LOCK_S", 0.05)
    held = os.open(tmp_path / "chat", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(
        ConfigurationError, match=r"has had the lock of .*chat for 0\.05 s: end eng"
    ):
        claim(setting)
    owner_of(setting).open()
    os.close(held)
    claim(setting)


def start_at_once(told: Connection, directory: Path, revision: str, rank: int) -> None:
    """A process that starts a rank when it is told."""
    setting = setting_of(directory, revision, num_ranks=2)
    told.recv()
    try:
        claim(setting, rank, f"stage {rank}")
        told.send(True)
    except ConfigurationError:
        told.send(False)


@pytest.mark.seeds(3, long=20)
@pytest.mark.parametrize("is_open", [False, True], ids=["fresh", "opened"])
def test_of_two_revisions_that_start_at_once_one_gets_all_ranks(
    tmp_path: Path, is_open: bool, seeds: range
) -> None:
    fork = get_context("fork")
    for attempt in seeds:
        directory = tmp_path / str(attempt)
        directory.mkdir()
        if is_open:
            claim(setting_of(directory, "0", num_ranks=2), 0, "stage 0")
            owner_of(setting_of(directory, "0", num_ranks=2)).open()
        engines = [(revision, rank) for revision in ("1", "2") for rank in (0, 1)]
        pipes = [fork.Pipe() for _ in engines]
        processes = [
            fork.Process(target=start_at_once, args=(theirs, directory, *engine))
            for engine, (_, theirs) in zip(engines, pipes, strict=True)
        ]
        for process in processes:
            process.start()
        for ours, _ in pipes:
            ours.send(None)
        found = []
        for ours, _ in pipes:
            assert ours.poll(DEADLINE_S), "a rank does not start"
            found.append(ours.recv())
        for process in processes:
            process.join(DEADLINE_S)
        assert found in ([True, True, False, False], [False, False, True, True]), attempt
