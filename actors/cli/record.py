"""`kvcache record`: write the requests of a running cluster, or of a vLLM engine on this node, to a
trace for `kvcache simulate`.

Asks the coordinator periodically for newly served requests. Tokens do not leave the coordinator,
and digests do not leave this process. A vLLM engine writes the file itself, as long as this command
asks it to. Ctrl-C, SIGTERM and the limits all end a recording after a whole line.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.clusters import open_cluster
from actors.cli.command import (
    JsonOption,
    NameOption,
    NoProgressOption,
    VllmOption,
    bytes_text,
    command,
    handling,
    parse_size,
    print_facts,
    print_json,
    say,
)
from actors.cli.simulate import RequestsOption
from kvcache.base.errors import ClusterError, ConfigurationError, DeadlineError, NotRunningError

if TYPE_CHECKING:
    from kvcache.base.clock import Clock
    from kvcache.recorder import RecordedBatch
    from kvcache.simulate.request_recording import RequestRecording

_POLL_S = 0.3
_LINE_INTERVAL_S = 10.0
_ENGINE_PATIENCE_S = 20.0
"""An engine that does not answer for longer has ended the recording: see its lease."""


@command
def record(
    file: Annotated[Path, typer.Argument(help="The trace to write, a new file (.jsonl).")],
    *,
    name: NameOption = None,
    vllm: VllmOption = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Stop after this many seconds, above 0.")
    ] = None,
    requests: RequestsOption = None,
    max_size: Annotated[str, typer.Option(help="Stop before the file grows larger.")] = "256MiB",
    tenants: Annotated[
        bool, typer.Option("--tenants", help="Also write the tenant of each request.")
    ] = False,
    as_json: JsonOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Record the requests of a running cluster, without tokens, until Ctrl-C."""
    if seconds is not None and not seconds > 0:
        raise ConfigurationError(
            f"--seconds {seconds:g} records nothing: give a number above 0, such as 600, "
            "or omit it and end the recording with Ctrl-C"
        )
    max_bytes = parse_size("--max-size", max_size, "256MiB")
    limits = RecordingLimits(_ENGINE_PATIENCE_S, seconds, requests)
    if vllm is not None:
        if tenants:
            raise ConfigurationError(
                "--tenants is for clusters, not for --vllm: its requests have no tenants"
            )
        summary = _record_engine(vllm, file, max_bytes, limits, is_shown=not no_progress)
    else:
        summary = _record_cluster(
            name, file, max_bytes, limits, has_tenants=tenants, is_shown=not no_progress
        )
    if as_json:
        print_json(asdict(summary))
        return
    facts = {
        "requests": f"{summary.num_requests:,}",
        "lost": f"{summary.num_lost:,}",
        "different blocks": f"{summary.num_distinct_blocks:,}",
        "size": bytes_text(summary.num_bytes),
        "ended by": summary.ended_by,
    }
    print_facts(f"recorded {summary.path}", facts)


def _record_cluster(
    name: str | None,
    file: Path,
    max_bytes: int,
    limits: RecordingLimits,
    *,
    has_tenants: bool,
    is_shown: bool,
) -> RecordingSummary:
    """Record a cluster's requests until a limit or a signal."""
    from kvcache.base.clock import SystemClock
    from kvcache.recorder import SALT_BYTES
    from kvcache.simulate.request_recording import RecordingOptions, RequestRecording

    options = RecordingOptions(max_bytes, has_tenants)
    with open_cluster(name, otherwise="record a cluster whose coordinator is an actor") as cluster:
        listener, salt = secrets.token_hex(8), secrets.token_bytes(SALT_BYTES)

        def take(is_last: bool) -> RecordedBatch:
            return cluster.record_requests(listener, salt, is_last=is_last)

        ended = threading.Event()
        with (
            handling(lambda number, frame: ended.set(), signal.SIGINT, signal.SIGTERM),
            RequestRecording(file, options) as recording,
        ):
            limits = replace(limits, patience_s=cluster.config.deadlines.return_s)
            follower = RecordingFollower(recording, take, SystemClock(), limits, is_shown=is_shown)
            return follower.run(ended)


def _record_engine(
    which: str, file: Path, max_bytes: int, limits: RecordingLimits, *, is_shown: bool
) -> RecordingSummary:
    """Have a vLLM engine write its requests until a limit or a signal, or until it ends.

    Raises NotRunningError if there is none, ClusterError if it cannot record into `file`.
    """
    from actors.cli.engines import ask

    listener, ended = secrets.token_hex(8), threading.Event()
    beginning = {
        "path": str(file.absolute()),
        "max_bytes": max_bytes,
        "num_requests": limits.num_requests,
    }
    with handling(lambda number, frame: ended.set(), signal.SIGINT, signal.SIGTERM):
        found = ask(which, "record", act="begin", listener=listener, **beginning)
        start_s = line_s = heard_s = time.monotonic()
        if is_shown:
            say(f"{which} records {file}: Ctrl-C ends it")
        ended_by = ""
        while not ended_by:
            ended.wait(_POLL_S)
            now_s = time.monotonic()
            is_time = limits.seconds is not None and now_s - start_s >= limits.seconds
            ended_by = "signal" if ended.is_set() else "time" if is_time else ""
            try:
                found = ask(which, "record", act="end" if ended_by else "renew", listener=listener)
                heard_s, ended_by = now_s, ended_by or found["ended_by"]
            except DeadlineError:
                if now_s - heard_s > limits.patience_s:
                    raise
            except ClusterError:
                ended_by = "end of the engine"
            if is_shown and now_s - line_s >= _LINE_INTERVAL_S:
                line_s = now_s
                say(
                    f"{which} records {file}: {found['num_requests']:,} requests, "
                    f"{bytes_text(found['num_bytes'])}, {now_s - start_s:.0f} s"
                )
    if found["problem"] and is_shown:
        say(found["problem"])
    counts = ("num_requests", "num_lost", "num_distinct_blocks", "num_bytes")
    return RecordingSummary(
        path=str(file), **{key: found[key] for key in counts}, ended_by=ended_by
    )


@dataclass(frozen=True)
class RecordingSummary:
    """What was recorded. `num_lost` requests arrived faster than they could be reported."""

    path: str
    num_requests: int
    num_lost: int
    num_distinct_blocks: int
    num_bytes: int
    ended_by: str


@dataclass(frozen=True)
class RecordingLimits:
    """When a recording ends: after `seconds` or `num_requests`, if they are given.

    A coordinator that does not answer has `patience_s` to restart.
    """

    patience_s: float
    seconds: float | None = None
    num_requests: int | None = None


class RecordingFollower:
    """Writes requests into a recording until a limit.

    `take` asks for requests, and gets True the last time.
    """

    def __init__(
        self,
        recording: RequestRecording,
        take: Callable[[bool], RecordedBatch],
        clock: Clock,
        limits: RecordingLimits,
        *,
        is_shown: bool = True,
    ) -> None:
        self._recording = recording
        self._take = take
        self._clock = clock
        self._limits = limits
        self._is_shown = is_shown
        self._start_s = self._line_s = self._heard_s = clock.now()
        self._lost_before = self._lost = 0
        self._has_begun = False

    def run(self, ended: threading.Event) -> RecordingSummary:
        """Write until a limit or until `ended` is set."""
        reason = ""
        while not (reason or ended.is_set()):
            reason = self._write(self._ask())
            if not reason and self._is_time():
                reason = "time"
            if not reason:
                self._tell()
                ended.wait(_POLL_S)
        self._finish(is_wanted=reason in ("", "time"))
        recording = self._recording
        return RecordingSummary(
            path=str(recording.path),
            num_requests=recording.num_requests,
            num_lost=self._lost_before + self._lost,  # under all coordinators
            num_distinct_blocks=recording.num_distinct_blocks,
            num_bytes=recording.num_bytes,
            ended_by=reason or "signal",
        )

    def _ask(self) -> RecordedBatch | None:
        try:
            batch = self._take(False)
        except (DeadlineError, NotRunningError):
            if self._clock.now() - self._heard_s > self._limits.patience_s:
                raise
            return None
        self._heard_s = self._clock.now()
        if not self._has_begun:
            self._has_begun = True
            self._say(f"recording {self._recording.path}: Ctrl-C ends it")
        return batch

    def _finish(self, *, is_wanted: bool) -> None:
        """End the recording in the coordinator. If `is_wanted`, write the requests that waited
        there."""
        try:
            batch = self._take(True)
        except (DeadlineError, NotRunningError):
            return  # it ends by itself when nothing asks any more
        if is_wanted:
            self._write(batch)

    def _write(self, batch: RecordedBatch | None) -> str:
        """Write requests; return the limit that was reached, if any."""
        if batch is None:
            return ""
        if batch.num_lost < self._lost:  # another coordinator
            self._lost_before += self._lost
        self._lost = batch.num_lost
        most = self._limits.num_requests
        for request in batch.requests:
            if most is not None and self._recording.num_requests >= most:
                return "requests"
            if not self._recording.append(request, batch.block_size):
                return "size"
        is_full = most is not None and self._recording.num_requests >= most
        return "requests" if is_full else ""

    def _is_time(self) -> bool:
        elapsed_s, most_s = self._clock.now() - self._start_s, self._limits.seconds
        return most_s is not None and elapsed_s >= most_s

    def _tell(self) -> None:
        now_s = self._clock.now()
        if now_s - self._line_s >= _LINE_INTERVAL_S:
            self._line_s = now_s
            recording = self._recording
            self._say(
                f"recording {recording.path}: {recording.num_requests:,} requests, "
                f"{bytes_text(recording.num_bytes)}, {now_s - self._start_s:.0f} s"
            )

    def _say(self, text: str) -> None:
        if self._is_shown:
            say(text)
