"""The manager of a new epoch: rebuilt from the ranks' labels, or empty.

Keeps the labels on which every rank agrees. Labels that do not fit are dropped, and if none can be
used the epoch begins cold, which is always correct. A rebuild that fails is a cold start with its
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcache.base.errors import KVCacheError
from kvcache.base.logs import get_logger
from kvcache.coordinator.label_collection import LabelCollection
from kvcache.manager import KVCacheManager

logger = get_logger(__name__)

ManagerFactory = Callable[[int], KVCacheManager]
"""Makes a cold manager for a new epoch; the argument is the model epoch."""


@dataclass(frozen=True)
class Recovery:
    """How an epoch began. `num_labels` is the most that one rank sent; `reason` is empty, or says
    why nothing was kept."""

    num_kept_blocks: int = 0
    num_labels: int = 0
    reason: str = ""

    def describe(self) -> str:
        """Return a text about what was kept."""
        if self.reason:
            return f"cold, {self.reason}"
        return f"{self.num_kept_blocks} blocks are kept, a rank has labels of {self.num_labels}"

    @property
    def is_cold(self) -> bool:
        """Whether the ranks have to drop everything."""
        return bool(self.reason)


def recover(
    make_manager: ManagerFactory, model_epoch: int, collection: LabelCollection
) -> tuple[KVCacheManager, Recovery]:
    """Return the manager of a new epoch, and how much of the cache it kept."""
    manager = make_manager(model_epoch)
    label_sets = collection.label_sets()
    num_labels = max((len(labels.labels.block_ids) for labels in label_sets), default=0)
    reason = collection.problem
    if not reason and not num_labels:
        return manager, Recovery(reason="no rank holds anything")
    if not reason:
        try:
            num_kept = manager.restore(label_sets)
            return manager, Recovery(num_kept, num_labels)
        except KVCacheError as error:
            reason = f"the labels could not be put together: {error}"
            manager = make_manager(model_epoch)
    logger.warning("model epoch %d: no labels are kept: %s", model_epoch, reason)
    return manager, Recovery(0, num_labels, reason)
