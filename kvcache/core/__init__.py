"""The core of one pool: which blocks exist, what they cache, and which requests reference them.

`interface.py` has the names that the rest of the package uses; they are imported from here. The
core itself is `FlatCore` (`flat_core.py`), made from `CoreSettings`.
"""

from __future__ import annotations

from kvcache.core.interface import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    CacheHit,
    CoreStatistics,
    EventSink,
    NewestState,
    OffloadAnswer,
    OffloadHit,
    OffloadHooks,
    ReferenceKind,
    Reservation,
    RowsAdmitted,
    RowsReserved,
    StepHooks,
    TableChange,
    joined,
    patch_of,
)

__all__ = [
    "AllBlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "CacheEvent",
    "CacheHit",
    "CoreStatistics",
    "EventSink",
    "NewestState",
    "OffloadAnswer",
    "OffloadHit",
    "OffloadHooks",
    "ReferenceKind",
    "Reservation",
    "RowsAdmitted",
    "RowsReserved",
    "StepHooks",
    "TableChange",
    "joined",
    "patch_of",
]
