"""The ends of a copy: blocks of the device, slots of host memory, files.

A tier states the places, handlers copy. A spec checks that its ids and counts fit together; whether
a block exists is checked by the memory's owner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache.base.arguments import MAX_INT32, as_byte_strings, as_integers
from kvcache.base.arrays import Int32Array
from kvcache.base.errors import InvalidInputError, shown
from kvcache.offload.keys import GROUP_BYTES, OffloadKey

DEVICE_MEDIUM = "device"
HOST_MEDIUM = "host"
FILE_MEDIUM = "file"


class LoadStoreSpec(ABC):
    """One end of a copy, in one medium. Immutable."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the medium's name. The same for all specs of a class."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many blocks are copied."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks of a medium by number: `block_ids` is `(n,)` int32, a read-only copy.

    Raises InvalidInputError unless they are integers from 0 to 2147483647.
    """

    def __init__(self, block_ids: Sequence[int] | npt.NDArray[np.integer]) -> None:
        self.block_ids = _checked(block_ids, "block_ids")

    def __len__(self) -> int:
        return len(self.block_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self.block_ids.tolist())})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the device, ordered by KV cache group.

    The first `group_sizes[0]` ids are of group 0, the next `group_sizes[1]` of group 1, and so on;
    None: one group. `block_indices[g]` is the index of group `g`'s first block in its sequence, in
    device blocks: if a host block holds several device blocks, it says where in the first host
    block the copy begins. None: at its start.

        host blocks of 4     | 0 1 2 3 | 4 5 6 7 |     block_indices[g] = 2, group_sizes[g] = 4:
        device blocks              2 3   4 5           the first one is entered in its middle

    Raises InvalidInputError if sizes do not sum to the number of ids, or a group has no entry.
    """

    def __init__(
        self,
        block_ids: Sequence[int] | npt.NDArray[np.integer],
        group_sizes: Sequence[int] | npt.NDArray[np.integer] | None = None,
        block_indices: Sequence[int] | npt.NDArray[np.integer] | None = None,
    ) -> None:
        super().__init__(block_ids)
        count = len(self.block_ids)
        sizes = [count] if group_sizes is None else group_sizes
        self.group_sizes = _checked(sizes, "group_sizes")
        total = int(self.group_sizes.sum(dtype=np.int64))
        if total != count:
            raise InvalidInputError(
                f"group sizes {shown(self.group_sizes.tolist())} sum to {total}, but there are "
                f"{count} block ids: say of every id which group it is of"
            )
        num_groups = len(self.group_sizes)
        indices = np.zeros(num_groups, np.int32) if block_indices is None else block_indices
        self.block_indices = _checked(indices, "block_indices")
        if len(self.block_indices) != num_groups:
            raise InvalidInputError(
                f"{len(self.block_indices)} block indices for {num_groups} groups: pass the index "
                "of each group's first block"
            )

    @staticmethod
    def medium() -> str:
        return DEVICE_MEDIUM


class HostLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of host memory, each as large as a device block."""

    @staticmethod
    def medium() -> str:
        return HOST_MEDIUM


class FileLoadStoreSpec(LoadStoreSpec):
    """Files, one per block, by the keys of their blocks.

    Raises InvalidInputError for an invalid key, or keys of unequal length.
    """

    def __init__(self, keys: Sequence[OffloadKey]) -> None:
        self.keys = tuple(as_byte_strings("keys", keys))
        lengths = set(map(len, self.keys))
        if len(lengths) > 1 or any(length <= GROUP_BYTES for length in lengths):
            raise InvalidInputError(
                f"offload keys of {', '.join(map(str, sorted(lengths)))} bytes: pass keys of one "
                f"length, a digest followed by {GROUP_BYTES} bytes of group index"
            )

    @staticmethod
    def medium() -> str:
        return FILE_MEDIUM

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"FileLoadStoreSpec({len(self.keys)} keys)"


def _checked(values: Sequence[int] | npt.NDArray[np.integer], what: str) -> Int32Array:
    """Return a read-only copy; raises InvalidInputError unless all are integers of 31 bits."""
    result = as_integers(what, values, at_most=MAX_INT32).astype(np.int32)
    result.flags.writeable = False
    return result
