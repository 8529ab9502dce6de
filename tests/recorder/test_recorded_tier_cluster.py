"""Recorded clusters in one process with tiers below the device: all effects of the tiers are
replayed, with the same final state."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from actors.local import LocalCluster
from kvcache.base.errors import RecordingError
from kvcache.config import ClusterConfig
from kvcache.coordinator.settings import OffloadStatistics
from kvcache.coordinator.step_recorder import Gone, LookedUp, SwappedOut
from kvcache.core import OffloadAnswer, OffloadHit
from kvcache.manager import KVCacheManager
from kvcache.protocol.commands import Load
from kvcache.protocol.step import NewRequest, RequestHints, ResumedRequest, StepRequest, StepResult
from kvcache.recorder import RecordReplay, open_recording
from kvcache.recorder.frames import frame
from kvcache.recorder.records import LoadBegun, LoadFinished, LoadReleased, Record
from kvcache.requests.hints import CacheHint
from kvcache.worker.transfers import TransferJobs
from tests.actors.tier_driver import (
    BLOCK_TOKENS,
    FOUND,
    PATIENCE_S,
    PROMPT_TOKENS,
    play_all,
    settle,
    tier_config,
)
from tests.cli.commands import run as run_command
from tests.recorder.segments_at_rest import change, records_of, write
from tests.recorder.test_recorded_cluster import LAYERS, SHAPE, play_conversations

PROMPTS = range(5)
"""Two fit on the device, less than two into host memory: the others are hit in files."""


def configured(directory: Path, **sections: dict[str, Any]) -> ClusterConfig:
    """Return a cluster with both tiers, recorded into `directory`."""
    (directory / "files").mkdir(exist_ok=True)
    cache = {**sections.pop("cache", {})}
    recorder = {"directory": str(directory)}
    return tier_config(directory / "files", "recorded", cache=cache, recorder=recorder, **sections)


def statistics_of(cluster: LocalCluster) -> OffloadStatistics:
    found = cluster.coordinator.statistics().offload
    assert found is not None
    return found


def manager_of(cluster: LocalCluster) -> KVCacheManager:
    manager = cluster.coordinator.manager
    assert manager is not None
    return manager


def play(cluster: LocalCluster, client: Any, numbers: Sequence[int] = PROMPTS) -> list[int]:
    """Play prompts, checking every byte; return how many tokens of each were hit."""
    return play_all(client, numbers, lambda: statistics_of(cluster))


def records_in(directory: Path) -> list[Any]:
    paths = sorted((directory / "recorded").glob("*.kvrec"))
    return [record for path in paths for record in records_of(path)[1:]]


def replay(directory: Path) -> RecordReplay:
    """Replay the whole recording, without differences."""
    replayed = RecordReplay(open_recording(directory / "recorded"))
    report = replayed.run()
    assert (report.difference, report.notes, report.num_skipped_records) == (None, (), 0)
    assert report.state_digest == report.recorded_state_digest != ""
    return replayed


def fail_every_other_load(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every other load fail on the rank that comes to it first; return which."""
    start, failed, seen = TransferJobs.start, list[int](), set[int]()

    def sometimes(self: TransferJobs, job: Any, *rest: Any) -> None:
        if isinstance(job, Load) and job.job_id not in seen:
            seen.add(job.job_id)
            if not len(seen) % 2:
                failed.append(job.job_id)
                job = replace(job, medium="nowhere")
        start(self, job, *rest)

    monkeypatch.setattr(TransferJobs, "start", sometimes)
    return failed


def until_let_in(client: Any, step: StepRequest) -> StepResult:
    """Send a step until its request is admitted or finally refused."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        result: StepResult = client.step(step)
        client.wait_finished(result.step)
        if result.refused or result.admitted_slots[0] >= 0:
            return result
        assert time.monotonic() < give_up_s
        step = replace(step, completed_step=result.step)
        time.sleep(0.002)


def test_prompts_that_come_up_or_fail_to_replay_to_the_identical_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(configured(tmp_path)) as cluster, cluster.client() as client:
        assert play(cluster, client) == [0] * len(PROMPTS)
        failed = fail_every_other_load(monkeypatch)
        found = play(cluster, client)
        assert (found.count(FOUND), len(failed)) == (3, 2)
        assert client.failures == ()
        told, manager = statistics_of(cluster), manager_of(cluster)
        assert (told.num_failed_jobs, told.num_fetched_tokens) == (2, 3 * FOUND)
        assert manager.statistics().core.num_evictions > 0
        client.close()
        for _ in range(100):
            cluster.pump()
        state, statistics = manager.dump_state(), manager.statistics()
    kinds = Counter(type(record) for record in records_in(tmp_path))
    assert (kinds[LoadBegun], kinds[LoadFinished]) == (5, 3)
    assert kinds[LoadReleased] == 5
    replayed = replay(tmp_path)
    assert replayed.manager.dump_state() == state
    assert replayed.manager.statistics() == statistics


def test_a_prefetched_prompt_is_hit_at_once_and_replays_with_its_hints(tmp_path: Path) -> None:
    tokens = np.arange(PROMPT_TOKENS, dtype=np.int32)
    with LocalCluster(configured(tmp_path)) as cluster, cluster.client() as client:
        assert play(cluster, client) == [0] * len(PROMPTS)
        assert client.prefetch_prefix(tokens) == PROMPT_TOKENS
        assert client.prefetch_prefix(tokens) == PROMPT_TOKENS
        completed, give_up_s = -1, time.monotonic() + PATIENCE_S
        while statistics_of(cluster).num_loaded_tokens < PROMPT_TOKENS:
            completed = client.step(StepRequest(completed_step=completed)).step
            client.wait_finished(completed)
            assert time.monotonic() < give_up_s
        assert client.prefetch_prefix(tokens) == 0
        new = NewRequest("r", tokens, PROMPT_TOKENS, hints=(CacheHint(returns_in_s=60.0),))
        result = client.step(StepRequest(new=(new,), completed_step=completed))
        assert result.num_hit_tokens.tolist() == [FOUND]
        client.wait_finished(result.step)
        hints = (RequestHints("r", (CacheHint(0, 64, priority=90), CacheHint(64, is_over=True))),)
        client.step(StepRequest(completed_step=result.step, finished=("r",), hints=hints))
        play(cluster, client)
        assert client.failures == ()
        client.close()
        for _ in range(100):
            cluster.pump()
        state = manager_of(cluster).dump_state()
    replayed = replay(tmp_path)
    assert replayed.manager.dump_state() == state


def test_conversations_of_a_hybrid_in_tiers_replay_to_the_identical_state(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        model={"name": "hybrid", "max_model_len": 512, "layers": LAYERS},
        cache={"num_blocks": 60, "memory_per_rank": "1MiB"},
        scheduler={"max_num_batched_tokens": 128, "max_num_seqs": 6},
        offload={"swap": "always"},
    )
    with LocalCluster(config) as cluster, cluster.client("replay") as client:
        shape = replace(SHAPE, num_conversations=5, num_turns=2)
        played = play_conversations(cluster, client, shape)
        assert played.num_wrong_blocks == 0
        assert played.num_evictions > 0
        settle(client, lambda: statistics_of(cluster))
    assert replay(tmp_path).manager is not None
    asked = [call for record in records_in(tmp_path) for call in getattr(record, "calls", ())]
    assert any(isinstance(call, LookedUp) for call in asked)


def test_a_request_that_is_swapped_out_and_comes_back_is_replayed(tmp_path: Path) -> None:
    config = configured(tmp_path, offload={"swap": "always"})
    prompt = np.arange(70, dtype=np.int32)
    with LocalCluster(config) as cluster, cluster.client() as client:
        step = until_let_in(client, StepRequest(new=(NewRequest("a", prompt, 70),)))
        step = client.step(StepRequest(preempted_swap=("a",), completed_step=step.step))
        client.wait_finished(step.step)
        settle(client, lambda: statistics_of(cluster))
        step = until_let_in(client, StepRequest(resumed=(ResumedRequest("a", 70),)))
        assert (step.num_hit_tokens.tolist(), statistics_of(cluster).num_swapped_in) == ([69], 1)
        client.step(StepRequest(finished=("a",), completed_step=step.step))
        assert client.failures == ()
    records = records_in(tmp_path)
    assert [record.has_tail for record in records if isinstance(record, LoadBegun)] == [True]
    calls = [call for record in records for call in getattr(record, "calls", ())]
    assert SwappedOut("a", 69, 64) in calls
    replay(tmp_path)


def test_a_request_that_ends_while_its_blocks_wait_for_it_lets_them_go_in_the_recording(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path, offload={"swap": "always", "hold_s": 600.0})
    prompt = np.arange(70, dtype=np.int32)
    with LocalCluster(config) as cluster, cluster.client() as client:
        step = until_let_in(client, StepRequest(new=(NewRequest("a", prompt, 70),)))
        step = client.step(StepRequest(preempted_swap=("a",), completed_step=step.step))
        client.wait_finished(step.step)
        settle(client, lambda: statistics_of(cluster))
        step = client.step(StepRequest(resumed=(ResumedRequest("a", 70),)))
        assert step.waiting_for_load == ("a",)
        client.wait_finished(step.step)
        client.wait_finished(client.step(StepRequest(completed_step=step.step)).step)
        settle(client, lambda: statistics_of(cluster))
        assert len(manager_of(cluster).tiers.loads) == 1
        client.wait_finished(client.step(StepRequest(finished=("a",))).step)
        assert len(manager_of(cluster).tiers.loads) == 0
        manager_of(cluster).check()
    calls = [call for record in records_in(tmp_path) for call in getattr(record, "calls", ())]
    assert Gone("a", (1,)) in calls
    assert not any(isinstance(record, LoadReleased) for record in records_in(tmp_path))
    replay(tmp_path)


def test_resets_and_coordinators_that_follow_one_another_are_replayed(tmp_path: Path) -> None:
    with LocalCluster(configured(tmp_path)) as cluster:
        client = cluster.client()
        assert play(cluster, client, (0, 1, 2)) == [0, 0, 0]
        assert play(cluster, client, (0,)) == [FOUND]
        assert client.reset_prefix_cache()
        assert play(cluster, client, (0, 1)) == [0, 0]
        cluster.restart_coordinator()
        client.attach()
        assert play(cluster, client, (2, 0)) == [0, FOUND]
        assert client.reset_prefix_cache(drain=True)
        assert play(cluster, client, (0, 1, 2, 0)) == [0, 0, 0, FOUND]
    recording = open_recording(tmp_path / "recorded")
    assert len({segment.head.recording_id for segment in recording.segments}) == 2
    assert all(segment.head.has_tiers for segment in recording.segments)
    replay(tmp_path)


def test_tenants_in_tiers_are_replayed(tmp_path: Path) -> None:
    tenants = {"named": {"a": {"guaranteed": 0.5}, "b": {"limit": 0.4}}}
    config = configured(tmp_path, tenants=tenants)
    with LocalCluster(config) as cluster, cluster.client() as client:
        completed = -1
        for turn, tenant in enumerate(("a", "b", "c", "a", "b")):
            tokens = np.arange(20 * BLOCK_TOKENS, dtype=np.int32)
            new = NewRequest(f"r{turn}", tokens, PROMPT_TOKENS, tenant=tenant)
            step = until_let_in(client, StepRequest(new=(new,), completed_step=completed))
            completed = step.step
            if not step.refused:
                ended = client.step(StepRequest(finished=(f"r{turn}",), completed_step=completed))
                client.wait_finished(ended.step)
                completed = ended.step
            settle(client, lambda: statistics_of(cluster))
        statistics = manager_of(cluster).statistics()
        assert statistics.tenants
    replayed = replay(tmp_path)
    assert replayed.manager.statistics().tenants == statistics.tenants


# --- the command, and damaged recordings ----------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one recording, in which prompts came up from tiers."""
    directory = tmp_path_factory.mktemp("recorded")
    with LocalCluster(configured(directory)) as cluster, cluster.client() as client:
        assert play(cluster, client, (0, 1, 2, 3)) == [0] * 4
        assert play(cluster, client, (0, 1)) == [FOUND] * 2
    return directory


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    """Its one segment, to be changed."""
    (path,) = (recorded / "recorded").glob("*.kvrec")
    (tmp_path / "recorded").mkdir()
    return Path(shutil.copy(path, tmp_path / "recorded"))


command = partial(run_command, "replay-record")


def test_the_command_replays_what_tiers_did(recorded: Path) -> None:
    shown, told = command(recorded / "recorded")
    assert ("identical" in shown, told) == (True, "")
    report = json.loads(command(recorded / "recorded", "--json")[0])
    assert (report["is_identical"], report["num_epochs"], report["notes"]) == (True, 1, [])
    assert report["state_digest"] == report["recorded_state_digest"]


def asks_tiers(record: object) -> bool:
    calls = getattr(record, "calls", ())
    return bool(calls) and isinstance(calls[0], LookedUp)


MISS = OffloadHit(OffloadAnswer.MISS)
CHANGES: list[tuple[Callable[[Any], bool], Callable[[Any], Record], str]] = [
    (
        asks_tiers,
        lambda r: replace(r, calls=(replace(r.calls[0], num_device_tokens=7), *r.calls[1:])),
        r"the tiers were asked for \S+ behind \d+ tokens, recorded: asked for \S+ behind 7 tokens",
    ),
    (
        asks_tiers,
        lambda r: replace(r, calls=r.calls[1:]),
        r"the tiers were asked for \S+ behind \d+ tokens, recorded: nothing",
    ),
    (
        asks_tiers,
        lambda r: replace(r, calls=(*r.calls, Gone("nobody"))),
        "the tiers were not called, recorded: told that nobody has gone",
    ),
    (
        lambda r: asks_tiers(r) and r.calls[0].answer.answer is OffloadAnswer.HIT_PENDING,
        lambda r: replace(r, calls=(replace(r.calls[0], answer=MISS), *r.calls[1:])),
        "the answer has another .*waiting_for_load.*",
    ),
    (
        lambda r: isinstance(r, LoadBegun),
        lambda r: replace(r, num_tokens=BLOCK_TOKENS),
        r"the load of \S+ has another num_tokens and another columns and another block_ids",
    ),
    (
        lambda r: isinstance(r, LoadBegun),
        lambda r: replace(r, load=()),
        r"the load of \S+ gets 23 blocks, recorded: none",
    ),
    (
        lambda r: isinstance(r, LoadBegun),
        lambda r: replace(r, num_tokens=5),
        r"the load of \S+ is refused: request .*: load whole blocks of every group",
    ),
    (
        lambda r: isinstance(r, LoadBegun),
        lambda r: replace(r, message=b""),
        r"request \S+, for which tiers load, is not known",
    ),
    (
        lambda r: isinstance(r, LoadFinished),
        lambda r: replace(r, load_id=77),
        "load 77 is not known: finish each load that was begun, once",
    ),
    (
        lambda r: isinstance(r, LoadReleased),
        lambda r: replace(r, load_id=77),
        "load 77 is not known: it was never begun, or has ended",
    ),
]


@pytest.mark.parametrize(("which", "changed", "what"), CHANGES, ids=[w for *_, w in CHANGES])
def test_what_tiers_did_otherwise_is_named(
    copied: Path, which: Callable[[Any], bool], changed: Callable[[Any], Record], what: str
) -> None:
    was = change(copied, which, changed)
    difference = RecordReplay(open_recording(copied)).run().difference
    assert re.fullmatch(what, difference.what), difference.what
    assert difference.number == was.number


def test_a_recording_with_tiers_that_is_cut_off_replays_as_far_as_it_goes(copied: Path) -> None:
    os.truncate(copied, copied.stat().st_size - 5)
    report = RecordReplay(open_recording(copied)).run()
    assert report.difference is None
    assert "are no whole record: cut off" in report.notes[0]


def test_a_byte_that_was_flipped_is_an_error_that_names_it(copied: Path) -> None:
    size, (offset, _) = copied.stat().st_size, frame_of(copied, LoadBegun)
    data = bytearray(copied.read_bytes())
    data[offset + 40] ^= 0x10
    copied.write_bytes(data)
    with pytest.raises(RecordingError, match=f"damaged at byte {offset} of {size}: a record of "):
        RecordReplay(open_recording(copied)).run()
    assert f"damaged at byte {offset}" in command(copied, exit_code=2)[1]


def frame_of(path: Path, kind: type) -> tuple[int, Any]:
    """Return where the first record of a kind begins, and the record."""
    for placed in open_recording(path).records():
        if isinstance(placed.record, kind):
            return placed.offset, placed.record
    raise AssertionError(f"no {kind.__name__} in {path}")


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (
            ["load begun", 2, ["r", b"", 0], [16, 0], []],
            "load begun makes no sense: 2 fields instead of 3",
        ),
        (
            ["load begun", 2, ["r", b"", 0], [16, 0, 1], []],
            "load begun makes no sense: int is not true or false",
        ),
        (["load finished", 2, "one"], "load finished makes no sense: str is not a number"),
        (["released", 2, "c", [], [["what", "r"]]], "a call of tiers that is 'what'"),
        (["released", 2, "c", [], [["?", "r", 0, "perhaps", 0]]], "'perhaps' is not a valid"),
        (["load begun", 2, ["r", b"no", 0], [16, 0, False], []], "its message cannot be read"),
    ],
)
def test_a_record_of_tiers_that_makes_no_sense_is_an_error(
    copied: Path, payload: object, what: str
) -> None:
    write(copied, records_of(copied)[:2])
    with copied.open("ab") as file:
        file.write(frame(msgpack.packb(payload)))
    with pytest.raises(RecordingError, match=what):
        RecordReplay(open_recording(copied)).run()
