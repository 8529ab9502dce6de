"""One core: the books of a pool of blocks, and what goes into and comes out of them.

`protocol.py` is what the rest of the package works with: its names are imported from here. The core
itself (`flat_core.py`) is made from `CoreSettings`, see `settings.py`.
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
    ForkOrigin,
    NewestState,
    NewRows,
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
    "CoreStatistics",
    "EventSink",
    "ForkOrigin",
    "NewRows",
    "NewestState",
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
