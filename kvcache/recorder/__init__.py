"""A recorder of all changes to a coordinator's manager, and their replay into a new one.

    recorder.py        writes events as records      recording.py       reads segments
    segments.py        files within a size limit     replay.py          replays a recording
    frames.py          length, checksum, payload     replayed_epoch.py  replays one epoch
    records.py         kinds of records              manager_config.py  a manager's settings
    request_tracer.py  requests as they are served   outcomes.py        digests of results

A recorder writes if a directory is configured. A tracer listens while a client asks it for
requests. Serving needs neither.
"""

from __future__ import annotations

from kvcache.recorder.manager_config import ManagerConfig
from kvcache.recorder.recorder import FileStepRecorder, RecorderLimits, RecordingOrigin
from kvcache.recorder.recording import Recording, open_recording
from kvcache.recorder.replay import RecordReplay, RecordReplayReport, ReplayDifference
from kvcache.recorder.request_tracer import (
    SALT_BYTES,
    RecordedBatch,
    RecordedRequest,
    RequestTracer,
    SeenRequest,
    SeenRequests,
    TracedRecorder,
    TracerLimits,
    record_request,
)

__all__ = [
    "SALT_BYTES",
    "FileStepRecorder",
    "ManagerConfig",
    "RecordReplay",
    "RecordReplayReport",
    "RecordedBatch",
    "RecordedRequest",
    "RecorderLimits",
    "Recording",
    "RecordingOrigin",
    "ReplayDifference",
    "RequestTracer",
    "SeenRequest",
    "SeenRequests",
    "TracedRecorder",
    "TracerLimits",
    "open_recording",
    "record_request",
]
