"""A recorder of all that changes a coordinator's manager, and its replay into a real one.

    recorder.py         told by the coordinator      recording.py       segments, read back
    segments.py         files, bounded               replay.py          all of it done again
    frames.py           length, checksum, payload    replayed_epoch.py  an epoch's manager, again
    records.py          what a record says           recipe.py          what a manager is made from
    operation_clock.py  the times a manager saw      outcomes.py        what came of it, as digests
    label_codec.py      labels as plain values

Off unless a directory is configured. Nothing here is needed to serve.
"""

from __future__ import annotations

from kvcache.recorder.recipe import ManagerRecipe
from kvcache.recorder.recorder import FileStepRecorder, RecorderLimits, RecordingOrigin
from kvcache.recorder.recording import Recording, open_recording
from kvcache.recorder.replay import RecordReplay, RecordReplayReport, ReplayDifference

__all__ = [
    "FileStepRecorder",
    "ManagerRecipe",
    "RecordReplay",
    "RecordReplayReport",
    "RecorderLimits",
    "Recording",
    "RecordingOrigin",
    "ReplayDifference",
    "open_recording",
]
