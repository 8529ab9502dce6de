"""The rows of one batch and their blocks: opening, extending, cropping and selecting rows.

The rows connect the cache, which has the interface of `transformers`, with the memory, which works
on requests. Every check precedes the first change.

    open ─▶ extend (slots, tables) ─▶ the model's forward ─▶ settle (others can find the blocks)
                                        crop, select ─▶ rows that share, copies before writes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvcache.base.errors import OutOfBlocksError, RequestError
from kvcache.integrations.transformers.paged_memory import ContentScope, PagedMemory
from kvcache.requests.request import Request
from kvcache.specs import KVCacheGroupSpec


@dataclass(frozen=True)
class GroupPlaces:
    """Positions of one group: block id and offset in the block, each an int64 tensor.

    `read_*` are `(rows of the batch, columns)` for columns `[first_column, length + new)`; the
    `written_*` are flat, with the batch row and the new column that each is written from.
    """

    read_blocks: torch.Tensor
    read_offsets: torch.Tensor
    written_blocks: torch.Tensor
    written_offsets: torch.Tensor
    written_rows: torch.Tensor
    written_columns: torch.Tensor


@dataclass(frozen=True)
class Forward:
    """A forward of `num_new` columns behind `length`, by `batch_size` rows.

    Row i of the batch is row `i // repeats` of the cache: `generate` repeats every prompt for each
    beam or sequence, but its keys and values are stored once. `groups` are by layer name.
    """

    length: int
    num_new: int
    batch_size: int
    repeats: int
    groups: Mapping[str, GroupPlaces]


def first_column(window: int | None, length: int) -> int:
    """First column that tokens behind `length` see: a token sees `window`, itself included."""
    return 0 if window is None else max(0, length - window + 1)


def plan_forward(
    memory: PagedMemory, rows: Sequence[Row], length: int, num_new: int, repeats: int
) -> Forward:
    """Return the positions of a forward, from the worker's current block tables."""
    slots = [memory.slot_of(row.request) for row in rows]
    groups = {}
    for index, group in enumerate(memory.config.kv_cache_groups):
        table = memory.block_table(index, slots)
        places = _group_places(group, table, rows, range(length, length + num_new), repeats)
        groups.update(dict.fromkeys(group.layer_names, places))
    return Forward(length, num_new, len(rows) * repeats, repeats, groups)


def _group_places(
    group: KVCacheGroupSpec,
    table: torch.Tensor,
    rows: Sequence[Row],
    new_columns: range,
    repeats: int,
) -> GroupPlaces:
    length = new_columns.start
    spec = group.kv_cache_spec
    device, block_size = table.device, spec.block_size
    start = first_column(getattr(spec, "sliding_window", None), length)
    pads = torch.tensor([row.pad for row in rows], device=device)[:, None]
    tokens = torch.arange(start, new_columns.stop, device=device)[None] - pads
    places = tokens.clamp(min=0)
    blocks = table.gather(1, places // block_size) * (tokens >= 0)
    offsets = places % block_size
    # Tokens that a row has already are not written: other rows may read them.
    held = torch.tensor([row.num_held for row in rows], device=device)[:, None]
    new = tokens[:, length - start :]
    lead_rows, columns = torch.nonzero((new >= 0) & (new >= held), as_tuple=True)
    return GroupPlaces(
        blocks.repeat_interleave(repeats, 0),
        offsets.repeat_interleave(repeats, 0),
        blocks[:, length - start :][lead_rows, columns],
        offsets[:, length - start :][lead_rows, columns],
        lead_rows * repeats,
        columns,
    )


@dataclass
class Row:
    """A row of the batch. `request.num_computed_tokens` are confirmed: no crop removes them.

    Attributes:
        request: its tokens and, once it has a slot, its blocks.
        pad: columns before its first token.
        num_held: tokens [0, n) whose keys and values are in blocks; drafts included.
        num_known: tokens [0, n) that are certain; those of a failed forward are not.
        num_published: tokens [0, n) of `num_held` in blocks that other requests can find.
    """

    request: Request
    pad: int
    num_held: int = 0
    num_known: int = 0
    num_published: int = 0

    def tokens_at(self, length: int) -> int:
        """Return how many of its tokens are in the first `length` columns."""
        return max(0, length - self.pad)


class BatchRows:
    """Rows that advance together. `length`: columns of the batch whose tokens are in blocks.

    While `is_recording`, columns behind `num_confirmed` are drafts: they may be cropped, and no
    other request finds them. `has_settled`: a forward was completed.
    """

    def __init__(
        self, memory: PagedMemory, scope: ContentScope, windows: Sequence[int | None]
    ) -> None:
        self.rows: list[Row] = []
        self.length = 0
        self.num_confirmed = 0
        self.is_recording = False
        self.has_settled = False
        self._memory = memory
        self._scope = scope
        self._windows = sorted({window for window in windows if window is not None})

    def open(self, tokens: Sequence[Sequence[int]], pads: Sequence[int]) -> int:
        """Make rows and adopt their cached prefixes; return how many tokens need not be computed.

        The batch continues after the last column up to which every row is cached.

        Raises:
            OutOfBlocksError: there are too many rows; nothing was changed.
        """
        hits = [self._memory.find(row, self._scope) for row in tokens]
        length = self._agree(tokens, pads, hits)
        rows: list[Row] = []
        try:
            for row_tokens, pad, hit in zip(tokens, pads, hits, strict=True):
                adopted = self._memory.adopt(row_tokens, hit, self._scope)
                rows.append(Row(adopted, pad, hit, len(row_tokens), hit))
        except OutOfBlocksError:
            for row in rows:
                self._memory.free(row.request)
            raise
        self.rows, self.length, self.num_confirmed = rows, length, length
        return sum(row.tokens_at(length) for row in rows)

    def start(self, tokens: Sequence[Sequence[int]], pads: Sequence[int]) -> None:
        """Make rows without a look-up."""
        self.rows = [
            Row(self._memory.new_request(row, self._scope), pad, 0, len(row))
            for row, pad in zip(tokens, pads, strict=True)
        ]

    def _agree(self, tokens: Sequence[Sequence[int]], pads: Sequence[int], hits: list[int]) -> int:
        """Return the number of columns to skip; shorten hits that cannot be used.

        A row with more cached tokens computes some of them again with the other rows, and does not
        write them. With windows it cannot, since the tokens before the window are not kept. Then
        all hits must end with the same column.
        """
        while True:
            length = min(pad + hit for pad, hit in zip(pads, hits, strict=True))
            if not self._windows:
                return length
            wanted = [max(0, length - pad) for pad in pads]
            if hits == wanted:
                return length
            for index, num_tokens in enumerate(wanted):
                if hits[index] != num_tokens:
                    probe = tokens[index][: num_tokens + 1]
                    hits[index] = self._memory.find(probe, self._scope) if num_tokens else 0

    # A forward.

    def extend(self, tokens: Sequence[Sequence[int]], num_new: int, repeats: int) -> None:
        """Give each row slots for `num_new` columns; `tokens` are its tokens in them, without pads.

        Afterwards each row is to become `repeats` rows, see `settle`.

        Raises:
            RequestError: a row has other tokens there already.
            OutOfBlocksError: there is no room. Rows keep what they got, and may try again.
        """
        self._require_slots(len(self.rows) * (repeats - 1))
        start = self.length
        for index, (row, new) in enumerate(zip(self.rows, tokens, strict=True)):
            self._require_known(index, row, new)
        for row, new in zip(self.rows, tokens, strict=True):
            first, end = row.tokens_at(start), row.tokens_at(start + num_new)
            self._set_tokens(row, first, new)
            if end > row.num_held:
                self._memory.reserve(row.request, end)

    def _require_known(self, index: int, row: Row, new: Sequence[int]) -> None:
        first = row.tokens_at(self.length)
        known = row.request.all_token_ids[first : row.num_known].tolist()
        for place, (old, other) in enumerate(zip(known, new, strict=False)):
            if old != other:
                raise RequestError(
                    f"row {index}: token {first + place} is {other}, the cache was opened with "
                    f"{old}: open another cache for another prompt"
                )

    def _set_tokens(self, row: Row, first: int, new: Sequence[int]) -> None:
        """Set a row's tokens to its known ones, followed by `new` from `first` on."""
        known = row.num_known
        tail = list(new[max(0, known - first) :])
        if known:
            row.request.truncate_tokens(known)
            row.request.append_output_token_ids(tail)
        elif tail:
            self._memory.free(row.request)  # has slots if a forward failed
            row.request = self._memory.new_request(tail, self._scope)

    def settle(self, num_new: int, repeats: int) -> int:
        """End a forward: its tokens are in blocks. Return how many of them were written.

        With `repeats` above 1, each row becomes `repeats` rows that share its blocks.
        """
        self.length += num_new
        self.has_settled = True
        num_written = 0
        for row in self.rows:
            end = row.tokens_at(self.length)
            num_written += max(0, end - row.num_held)
            row.num_held = max(row.num_held, end)
            row.num_known = max(row.num_known, end)
        if not self.is_recording or repeats > 1:
            self.confirm()
        if repeats > 1:
            self._select([index // repeats for index in range(len(self.rows) * repeats)])
        return num_written

    def confirm(self) -> None:
        """Make all drafts ordinary tokens that other requests can find."""
        self.num_confirmed = self.length
        for row in self.rows:
            if not row.num_held:
                continue
            row.request.num_computed_tokens = row.num_held
            if self._scope.is_shared:
                row.num_published = self._memory.publish(row.request, row.num_held)

    # Rows as a whole.

    def select(self, indices: Sequence[int]) -> None:
        """Replace row i by row `indices[i]`; a row selected twice shares its blocks.

        Raises:
            RequestError: there is no such row; nothing was changed.
            OutOfBlocksError: there are too many rows; nothing was changed.
        """
        wrong = [index for index in indices if not 0 <= index < len(self.rows)]
        if wrong:
            raise RequestError(
                f"row {wrong[0]} is chosen, the cache has rows 0 to {len(self.rows) - 1}: choose "
                "among those"
            )
        if list(indices) == list(range(len(self.rows))):
            return
        num_unused = len(self.rows) - len(set(indices))
        self._require_slots(len(indices) - len(set(indices)) - num_unused)
        self.confirm()
        self._select(indices)

    def _select(self, indices: Sequence[int]) -> None:
        used = set(indices)
        for index, row in enumerate(self.rows):
            if index not in used:
                self._memory.free(row.request)
        chosen: list[Row] = []
        taken: set[int] = set()
        for index in indices:
            row = self.rows[index]
            chosen.append(self._copy(row) if index in taken else row)
            taken.add(index)
        self.rows = chosen

    def _copy(self, row: Row) -> Row:
        """Return a row that shares the blocks of `row`, or only its tokens without blocks."""
        known = row.request.all_token_ids[: row.num_known].tolist()
        if not row.num_held:
            return Row(self._memory.new_request(known, self._scope), row.pad, 0, len(known))
        child = self._memory.fork(row.request, self._scope)
        child.append_output_token_ids(known[row.num_held :])
        return Row(child, row.pad, row.num_held, row.num_known, row.num_published)

    def crop(self, num_columns: int) -> None:
        """Remove the last `num_columns` columns, and confirm the rest.

        Blocks that other requests can find are never written again: a row cut inside such a block
        continues in a copy.

        Raises:
            RequestError: there are fewer columns, or a window has moved on; nothing was changed.
            OutOfBlocksError: no room for a copy; nothing was changed.
        """
        length = self.length - num_columns
        self._require_croppable(length)
        branches = {}
        try:
            for index, row in enumerate(self.rows):
                num_tokens = row.tokens_at(length)
                if 0 < num_tokens < row.num_published:
                    branches[index] = self._memory.branch(row.request, num_tokens, self._scope)
        except OutOfBlocksError:
            for request in branches.values():
                self._memory.free(request)
            raise
        for index, row in enumerate(self.rows):
            num_tokens = row.tokens_at(length)
            if num_columns and num_tokens < row.num_known:
                self._cut(row, num_tokens, index in branches)
            if index in branches:
                self._memory.free(row.request)
                row.request = branches[index]
        self.length = length
        self.confirm()

    def _require_croppable(self, length: int) -> None:
        if length < 0:
            raise RequestError(
                f"{self.length - length} columns are to be taken back, the cache has "
                f"{self.length}: take back no more than that"
            )
        window = self._windows[0] if self._windows else None
        if length < self.num_confirmed and window is not None and self.num_confirmed >= window:
            raise RequestError(
                f"columns {length} to {self.length - 1} are to be taken back, but what {length} "
                f"sees of a window of {window} was given up: call activate_past_recording() before "
                "the forwards that may be taken back"
            )

    def _cut(self, row: Row, num_tokens: int, is_branched: bool) -> None:
        if not num_tokens:
            self._memory.free(row.request)
            row.num_published = 0
        elif not is_branched:
            row.request.truncate_tokens(num_tokens)
        row.num_held = min(row.num_held, num_tokens)
        row.num_known = num_tokens

    def free(self) -> None:
        """Free all blocks; cached ones can still be found."""
        if self.is_recording:
            self.confirm()
        for row in self.rows:
            self._memory.free(row.request)
        self.rows, self.length, self.num_confirmed = [], 0, 0
        self.has_settled = False

    def _require_slots(self, num_rows: int) -> None:
        free = self._memory.manager.statistics().num_free_slots
        if num_rows > free:
            raise OutOfBlocksError(
                f"{num_rows} more rows are wanted, {free} are free: close caches, use fewer beams "
                "or sequences, or make the store with a larger max_rows"
            )
