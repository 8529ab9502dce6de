"""One unit of each of some rows, by which their leaves have grown in one step.

Between leaf_growth.py, which grows them, and whoever asks what they hold: the ledger, of single
ones, should a step fail; the announcer, which tells workers of all at once. Nothing is made before
it is asked for. Refuses to know where the units' blocks are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, int32_array
from kvcache.commands import Label
from kvcache.extents.published import Segment, extra_keys_of
from kvcache.extents.rows import Int64Array, Row
from kvcache.labels import extra_keys_bytes
from kvcache.request import Namespace
from kvcache.request_content import namespace_name

NO_SLOT = -1
"""The slot of a block whose request has none."""


class GrownSegments(Sequence[Segment]):
    """One unit of each of some rows, as segments that are made when somebody asks.

    Most are never asked for: where nobody is told of contents and no step fails.
    """

    def __init__(
        self, rows: list[Row], units: Int64Array, contents: Int32Array, digests: list[bytes]
    ) -> None:
        """Note whose they are: `units[i]` is the last one of row `i` now; `contents[i]` are the
        digest before it and its tokens, as int32."""
        self.rows = rows
        self.digests = digests
        self._units = units
        self._contents = contents
        self._tokens_at = len(digests[0]) // contents.itemsize

    def __len__(self) -> int:
        return len(self.digests)

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...

    def __getitem__(self, index: int | slice) -> Segment | list[Segment]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row, unit = self.rows[index], self.unit(index)
        return Segment(
            row.run,
            unit,
            1,
            row.request.request_id,
            row.request.namespace,
            unit,
            self._contents[index, self._tokens_at :].tobytes(),
            self.digests[index],
            self.parent(index),
            extra_keys_of(row.request),
        )

    def unit(self, index: int) -> int:
        """Return the number of a row's unit."""
        return int(self._units[index])

    def parent(self, index: int) -> bytes:
        """Return the digest before a row's unit."""
        return self._contents[index, : self._tokens_at].tobytes()

    def label(
        self,
        group: int,
        block_ids: IndexArray,
        chosen: IndexArray | None,
        slots: Mapping[str, int],
    ) -> Label:
        """Return the label of a group's blocks, each one of the `chosen` units, all without.

        `slots` are those of the requests that have one.
        """
        rows, digests, contents, units = self.rows, self.digests, self._contents, self._units
        if chosen is not None:
            rows, digests = [rows[i] for i in chosen.tolist()], [digests[i] for i in chosen]
            contents, units = contents[chosen], units[chosen]
        count, block_size = len(rows), contents.shape[1] - self._tokens_at
        requests = [row.request for row in rows]
        numbers: dict[Namespace, int] = {}
        namespaces = [numbers.setdefault(each.namespace, len(numbers)) for each in requests]
        extra_keys: dict[int, bytes] = {}
        for i, request in enumerate(requests):
            if (keys_of := extra_keys_of(request)) is not None:
                start = int(units[i]) * block_size
                if (keys := keys_of(start, start + block_size)) is not None:
                    extra_keys[i] = extra_keys_bytes(keys)
        return Label(
            block_ids=int32_array(block_ids),
            groups=np.full(count, group, dtype=np.int32),
            slots=int32_array([slots.get(each.request_id, NO_SLOT) for each in requests]),
            digests=b"".join(digests),
            parent_digests=contents[:, : self._tokens_at].tobytes(),
            token_counts=np.full(count, block_size, dtype=np.int32),
            token_ids=contents[:, self._tokens_at :].ravel(),
            namespaces=int32_array(namespaces),
            namespace_names=tuple(map(namespace_name, numbers)),
            extra_keys=extra_keys,
        )
