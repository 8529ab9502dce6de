"""Recordings replay to the same state: random lives, and differences that a replay finds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.protocol.messages import Call
from kvcache.protocol.step import StepRequest
from kvcache.protocol.wire import decode
from kvcache.recorder import RecordReplay, open_recording
from kvcache.recorder.records import EpochBegun, Executed, Held, Record, StateReached
from tests.recorder.recorded_life import RecordedLife, make_recorder, manager_config_of
from tests.recorder.segments_at_rest import change, records_of, replay, write

MODELS = ("full", "full, window", "mla, chunk, align", "full, none", "full, cross")
LIVES = [(model, 0) for model in MODELS]
LIVES += [("full, window", seed) for seed in (1, 2)]


@pytest.mark.parametrize(("model", "seed"), LIVES)
def test_a_random_life_replays_to_the_identical_state(
    tmp_path: Path, model: str, seed: int
) -> None:
    print(f"seed {seed}")
    clock, manager_config = VirtualClock(), manager_config_of(model)
    recorder = make_recorder(tmp_path, manager_config, clock, segment_bytes=8_000)
    life = RecordedLife(recorder, manager_config, clock, f"{model} {seed}", has_hints=seed > 0)
    life.begin()
    life.play()
    life.begin(restores=True)
    life.play()
    state = life.manager.dump_state()
    recorder.close()
    assert recorder.statistics().num_lost_records == 0
    assert recorder.statistics().num_segments > 2
    assert life.num_calls > 10
    assert life.num_refused > 0
    replayed = RecordReplay(open_recording(tmp_path))
    report = replayed.run()
    assert report.difference is None
    assert report.num_records == recorder.statistics().num_records
    assert (report.num_epochs, report.num_skipped_records, report.notes) == (2, 0, ())
    assert (report.num_calls, report.num_refused) == (life.num_calls, life.num_refused)
    assert report.state_digest == report.recorded_state_digest != ""
    assert replayed.manager.dump_state() == state


# --- findings of a replay -------------------------------------------------------------------------


def is_step(record: object) -> bool:
    return isinstance(record, Executed) and isinstance(message_of(record), StepRequest)


def message_of(record: Executed) -> StepRequest | Call:
    message = decode(record.message)
    assert isinstance(message, StepRequest | Call)
    return message


def has_answer(name: str) -> Callable[[object], bool]:
    return lambda record: isinstance(record, Executed) and name in dict(record.outcome.answer)


def with_outcome(**changes: Any) -> Callable[[Executed], Record]:
    return lambda record: replace(record, outcome=replace(record.outcome, **changes))


CHANGES: list[tuple[Callable[[Any], bool], Callable[[Any], Record], str]] = [
    (
        has_answer("num_hit_tokens"),
        lambda r: with_outcome(
            answer=tuple((n, d ^ (n == "num_hit_tokens")) for n, d in r.outcome.answer)
        )(r),
        "the answer has another num_hit_tokens",
    ),
    (
        has_answer("result"),
        with_outcome(answer=(("result", 1),)),
        "the answer has another result",
    ),
    (
        lambda r: isinstance(r, Executed) and len(r.outcome.commands) > 0,
        lambda r: with_outcome(commands=(("Fence", 1), *r.outcome.commands[1:]))(r),
        r"command 0 is (Label|Unlabel|Copy|Reset|Zero|BlockTablePatch), recorded: Fence",
    ),
    (
        lambda r: isinstance(r, Executed) and len(r.outcome.commands) > 0,
        lambda r: with_outcome(commands=((r.outcome.commands[0][0], 1), *r.outcome.commands[1:]))(
            r
        ),
        r"command 0, \w+, has other contents",
    ),
    (
        is_step,
        lambda r: with_outcome(commands=(*r.outcome.commands, ("Fence", 1)))(r),
        r"\d commands, recorded: \d",
    ),
    (is_step, with_outcome(error="RequestError: no"), "no error, recorded: RequestError: no"),
    (
        lambda r: isinstance(r, Executed) and len(r.readings_s) > 0,
        lambda r: replace(r, readings_s=(*r.readings_s, 1.0)),
        r"the time was asked for (\d) times, recorded: \d",
    ),
    (
        lambda r: isinstance(r, Held),
        lambda r: replace(r, num_tokens=r.num_tokens + 1),
        r"\d+ tokens are held, recorded: \d+",
    ),
]


@pytest.mark.parametrize(("which", "changed", "what"), CHANGES, ids=[w for *_, w in CHANGES])
def test_a_difference_names_record_step_client_and_what_differs(
    copied: list[Path],
    which: Callable[[Any], bool],
    changed: Callable[[Any], Record],
    what: str,
) -> None:
    path = next(p for p in copied if any(which(r) for r in records_of(p)))
    was = change(path, which, changed)
    report = replay(path.parent)
    difference = report.difference
    assert re.fullmatch(what, difference.what)
    assert (difference.number, difference.path) == (was.number, str(path))
    if isinstance(was, Executed):
        message = message_of(was)
        assert (difference.client_id, difference.step) == (message.client_id, message.step)
        assert f", step {message.step} of {message.client_id}; " in str(difference)


def test_differences_of_the_final_state_are_named_part_by_part(copied: list[Path]) -> None:
    change(
        copied[-1],
        lambda r: isinstance(r, StateReached),
        lambda r: replace(r, digests={**r.digests, "requests": "0", "core.free": "1"}),
    )
    report = replay(copied[0].parent)
    assert report.difference.what == "the manager's state differs in core.free, requests"
    assert report.state_digest != report.recorded_state_digest


def test_another_clock_makes_another_manager(copied: list[Path]) -> None:
    """Pins expire by the clock: its times are part of the recording."""
    for path in copied:
        records = records_of(path)
        for i, record in enumerate(records):
            if isinstance(record, Executed):
                records[i] = replace(record, readings_s=tuple(5.0 for _ in record.readings_s))
        write(path, records)
    assert replay(copied[0].parent).difference is not None


def test_labels_are_part_of_an_epoch_that_was_restored(copied: list[Path]) -> None:
    path = next(p for p in copied if any(is_restored(r) for r in records_of(p)))
    change(path, is_restored, lambda r: replace(r, label_sets=()))
    report = replay(path.parent)
    assert report.difference is not None


def is_restored(record: object) -> bool:
    return isinstance(record, EpochBegun) and len(record.label_sets) > 0
