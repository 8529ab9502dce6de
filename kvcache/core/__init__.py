"""What a core is, and the one that keeps its books in columns.

`protocol.py` is what the rest of the package works with: its names are imported from here. The core
itself (`flat_core.py`) is made by the manager, see `manager/core_settings.py`.
"""

from __future__ import annotations

from kvcache.core.protocol import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    CacheHit,
    Core,
    CoreStatistics,
    EventSink,
    ForkOrigin,
    NewestState,
    NewRows,
    NullEventSink,
    NullOffloadHooks,
    OffloadAnswer,
    OffloadHit,
    OffloadHooks,
    ReferenceKind,
    Reservation,
    RowBatch,
    RowsAdmitted,
    RowsReserved,
    RowStates,
    RowTokens,
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
    "Core",
    "CoreStatistics",
    "EventSink",
    "ForkOrigin",
    "NewRows",
    "NewestState",
    "NullEventSink",
    "NullOffloadHooks",
    "OffloadAnswer",
    "OffloadHit",
    "OffloadHooks",
    "ReferenceKind",
    "Reservation",
    "RowBatch",
    "RowStates",
    "RowTokens",
    "RowsAdmitted",
    "RowsReserved",
    "TableChange",
    "joined",
    "patch_of",
]
