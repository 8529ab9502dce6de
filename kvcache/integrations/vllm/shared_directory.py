"""What all replicas have written to the ranks' directories of files, for the scheduler of one.

A block is of use when every rank has its file. Ranks write one after the other, so a key waits
until the last one has written it. What this says is a hint: each rank looks into the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcache.base.arrays import int32_array
from kvcache.base.logs import get_logger
from kvcache.integrations.vllm.block_labels import block_labels
from kvcache.integrations.vllm.observer_errors import ObserverErrors
from kvcache.integrations.vllm.step_messages import Inventory
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.keys import OffloadKey
from kvcache.worker.files.shared import Changes, DirectoryFollower, position_in

logger = get_logger(__name__)

LOOK_S = 0.05
"""How often directories are looked at while steps run."""


class SharedDirectory:
    """The directories of all ranks. One user, in the scheduler's thread."""

    def __init__(self, followers: Sequence[DirectoryFollower]) -> None:
        """Follow the directory of each rank, which is empty."""
        self._followers = tuple(followers)
        self._all = (1 << len(self._followers)) - 1
        self._ranks: dict[OffloadKey, int] = {}  # which ranks have the file of a key, a bit each
        self._look_at_s = 0.0
        self._problems: dict[int, str] = {}
        self._errors = ObserverErrors()

    @staticmethod
    def of(inventories: Iterable[Inventory]) -> SharedDirectory | None:
        """Return those of the ranks, to be followed from what they have read; None if a rank has
        none."""
        followers, ranks = [], dict[OffloadKey, int]()
        for rank, told in enumerate(inventories):
            if not told.files_directory or told.shape is None:
                return None
            followers.append(
                DirectoryFollower(told.files_directory, told.files_position, told.shape.key_bytes)
            )
            for key in told.file_keys:
                ranks[OffloadKey(key)] = ranks.get(OffloadKey(key), 0) | 1 << rank
        made = SharedDirectory(followers)
        made._ranks = ranks
        return made

    @staticmethod
    def at(directories: Sequence[str], key_bytes: int) -> SharedDirectory:
        """Return those at these places, by rank; lists the files that are there. Raises OSError."""
        made = SharedDirectory(
            [DirectoryFollower(each, position_in(each), key_bytes) for each in directories]
        )
        for rank, follower in enumerate(made._followers):
            for name in sorted(follower.keys()):
                key = OffloadKey(name)
                made._ranks[key] = made._ranks.get(key, 0) | 1 << rank
        return made

    def whole(self) -> list[OffloadKey]:
        """Return the keys that have a file of every rank."""
        return [key for key, ranks in self._ranks.items() if ranks == self._all]

    def follow(self, tiers: TierHierarchy, now_s: float) -> None:
        """Tell the tiers what all ranks have now, and what some rank has no more."""
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        try:
            self._follow(tiers)
        except Exception as error:  # of damaged bytes, for which the engine must not end
            self._errors.note("following the files of other replicas", error)

    def _follow(self, tiers: TierHierarchy) -> None:
        written, removed = self.changes()
        if written or removed:
            tiers.files_changed(block_labels(int32_array(range(len(written))), written), removed)

    def changes(self) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Return the keys that have a file of every rank since the last call, and those that have
        lost one."""
        before: dict[OffloadKey, int] = {}
        for rank, follower in enumerate(self._followers):
            for name, is_there in self._changes(rank, follower).items():
                key = OffloadKey(name)
                ranks = self._ranks.pop(key, 0)
                before.setdefault(key, ranks)
                ranks = ranks | 1 << rank if is_there else ranks & ~(1 << rank)
                if ranks:
                    self._ranks[key] = ranks
        written = [key for key in before if self._ranks.get(key) == self._all]
        removed = [key for key, ranks in before.items() if ranks == self._all]
        return written, [key for key in removed if self._ranks.get(key) != self._all]

    def _changes(self, rank: int, follower: DirectoryFollower) -> Changes:
        """Return what has changed in a directory since the last call."""
        try:
            found = follower.changes()
            there = follower.keys() if found is None else set()
        except OSError as error:
            if str(error) != self._problems.get(rank):
                logger.warning("files of other replicas are not looked at: %s", error)
            self._problems[rank] = str(error)
            return {}
        self._problems.pop(rank, None)
        if found is not None:
            return found
        known = {key for key, ranks in self._ranks.items() if ranks >> rank & 1}
        return {key: key in there for key in there ^ known}
