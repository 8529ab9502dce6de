"""The cache that a stock model is called with: `generate(..., past_key_values=cache)`.

The store announces each call of the model before it runs, and the cache passes it to its rows. It
refuses calls that could cache wrong bytes: a closed cache, another batch, other tokens than
announced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvcache.base.errors import RequestError
from kvcache.integrations.transformers.batch_rows import (
    BatchRows,
    Forward,
    GroupPlaces,
    first_column,
    plan_forward,
)
from kvcache.integrations.transformers.model_call import ModelCall, without_first
from kvcache.integrations.transformers.paged_memory import ContentScope

if TYPE_CHECKING:
    from kvcache.integrations.transformers.store import PagedCacheStore


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types for it
    """Layer `name`; `pages` is its tensor `(blocks, 2, block size, heads, head size)`."""

    is_croppable = True

    def __init__(
        self, name: str, window: int | None, pages: torch.Tensor, cache: PagedCache
    ) -> None:
        super().__init__()
        self.name = name
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = True
        self.dtype, self.device = pages.dtype, pages.device
        if window is not None:
            self.sliding_window = window
        self._pages = pages
        self._cache = cache
        self._written: Forward | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the store has allocated the tensors."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values; return all that they may see, including themselves.

        Both are `(batch, heads, new tokens, head size)`. The result is a copy,
        `(batch, heads, get_mask_sizes(new tokens)[0], head size)`.

        Raises:
            RequestError: no forward was announced, or the shapes are another model's.
        """
        forward = self._cache.open_forward
        self._require(key_states, forward)
        self._require(value_states, forward)
        places = forward.groups[self.name]
        self._write(0, key_states, places)
        self._write(1, value_states, places)
        self._written = forward
        return self._read(0, places), self._read(1, places)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns `update` will return, and the first one."""
        length = self._cache.length
        start = first_column(self.window, length)
        return length + query_length - start, start

    def get_seq_length(self) -> int:
        """Return the number of columns, with a running forward's once this layer has them."""
        length = self._cache.length
        written = self._written
        if written is not None and written.length == length:
            return length + written.num_new
        return length

    def get_max_length(self) -> int:
        """Return the window, -1 without one."""
        return -1 if self.window is None else self.window

    def settle(self) -> None:
        """Note that the forward has ended or failed."""
        self._written = None

    def _write(self, part: int, states: torch.Tensor, places: GroupPlaces) -> None:
        new = states.transpose(1, 2)[places.written_rows, places.written_columns]
        self._pages[places.written_blocks, part, places.written_offsets] = new

    def _read(self, part: int, places: GroupPlaces) -> torch.Tensor:
        return self._pages[places.read_blocks, part, places.read_offsets].transpose(1, 2)

    def _require(self, states: torch.Tensor, forward: Forward) -> None:
        """Refuse tensors that do not fit the pages, before anything is written."""
        num_heads, head_size = self._pages.shape[3:]
        wanted = (forward.batch_size, num_heads, forward.num_new, head_size)
        if tuple(states.shape) != wanted or states.dtype != self.dtype:
            raise RequestError(
                f"{self.name} brings keys or values of shape {tuple(states.shape)}, "
                f"{states.dtype}; the store was made for {wanted}, {self.dtype}: use the model it "
                "was made for, in the same dtype"
            )
        if states.requires_grad:
            raise RequestError(
                f"{self.name} brings keys or values that require a gradient, and blocks keep none: "
                "call the model under torch.no_grad()"
            )


class PagedCache(Cache):  # type: ignore[misc]  # transformers has no types for it
    """Keys and values of one batch, in blocks of a `PagedCacheStore`, which makes them.

    Close it, or use it as a context manager. It keeps its blocks until then; afterwards other
    requests can find them, and they can be evicted.
    """

    def __init__(self, store: PagedCacheStore, scope: ContentScope) -> None:
        """Use `PagedCacheStore.open` instead."""
        self._store = store
        self._rows = BatchRows(store.memory, scope, store.layers.windows)
        self._forward: Forward | None = None
        self.is_closed = False
        """Whether its blocks were freed."""
        pages = store.memory.worker.kv_caches
        super().__init__(
            layers=[
                PagedLayer(name, window, pages[name], self)
                for name, window in zip(store.layers.names, store.layers.windows, strict=True)
            ]
        )

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self.num_rows} rows, {self.length} long"
        return f"PagedCache({state})"

    @property
    def length(self) -> int:
        """Columns of the batch that are in the cache, pads included."""
        return self._rows.length

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 before the first forward of a cache that was opened without any."""
        return len(self._rows.rows)

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 while there are none."""
        return self.num_rows or -1

    @property
    def open_forward(self) -> Forward:
        """The running forward.

        Raises:
            RequestError: none was announced.
        """
        if self._forward is None:
            self.require_open()
            raise RequestError(
                "keys and values come without an announced forward: call the model that the store "
                "was made for, itself and not a part of it, while the store is open"
            )
        return self._forward

    def block_ids(self) -> list[tuple[list[int], ...]]:
        """Return the block tables: for each row the block ids of every KV cache group."""
        manager = self._store.memory.manager
        return [manager.get_block_ids(row.request.request_id) for row in self._rows.rows]

    # Called by the store.

    def start(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        """Make the rows of a batch and adopt their cached prefixes."""
        call = ModelCall.of({"input_ids": input_ids, "attention_mask": attention_mask})
        pads, tokens = call.rows()
        counters = self._store.counters
        num_hit = self._rows.open(tokens, pads)
        counters.num_asked_tokens += sum(map(len, tokens))
        counters.num_hit_tokens += num_hit

    def begin(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Announce a call of the model; return the arguments to call it with.

        These are the given ones, unless the whole sequence was passed again (assisted generation
        does so in its first call); then only the uncached part.

        Raises:
            RequestError: the call does not continue at the end of the cache; nothing was changed.
            OutOfBlocksError: there is no room.
        """
        self.require_open()
        self.abandon()
        arguments = dict(arguments)
        call = ModelCall.of(arguments)
        if not self._rows.rows:  # the batch was not passed to `open`
            pads, tokens = call.rows()
            self._rows.start(tokens, pads)
        rows, length = self._rows.rows, self.length
        repeats = self._repeats(call)
        pads = [row.pad for row in rows for _ in range(repeats)]
        if length and call.num_new > length and call.begins_at_front(pads):
            arguments = without_first(arguments, length)
            call = ModelCall.of(arguments)
        call.require_mask(pads, length)
        call.require_positions(pads, length)
        tokens = [
            row[max(0, pad - length) :]
            for row, pad in zip(call.input_ids.tolist(), pads, strict=True)
        ]
        for index, row_tokens in enumerate(tokens):
            if row_tokens != tokens[index - index % repeats]:
                raise RequestError(
                    f"row {index} of {call.batch_size} differs from row {index - index % repeats}, "
                    f"but the cache was opened with {len(rows)} rows: open it with the whole batch"
                )
        self._rows.extend(tokens[::repeats], call.num_new, repeats)
        self._store.memory.begin_forward()
        self._forward = plan_forward(self._store.memory, rows, length, call.num_new, repeats)
        return arguments

    def finish(self) -> None:
        """End the announced call: its tokens are in the cache."""
        forward = self.open_forward
        self.abandon()  # written bytes stay; settling counts them
        num_written = self._rows.settle(forward.num_new, forward.repeats)
        self._store.counters.num_computed_tokens += num_written

    def abandon(self) -> None:
        """End the announced call, if there is one, without its tokens."""
        if self._forward is not None:
            self._store.memory.end_forward()
            self._forward = None
            for layer in self.layers:
                assert isinstance(layer, PagedLayer)
                layer.settle()

    # Called by `transformers`.

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row i by row `beam_idx[i]`; beams with a common past share its blocks."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace every row by `repeats` adjacent rows."""
        self._select([index // repeats for index in range(self.num_rows * repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order; indices, or a mask of all rows."""
        if indices.dtype == torch.bool:
            indices = torch.nonzero(indices).flatten()
        self._select([index % max(1, self.num_rows) for index in indices.tolist()])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns: 0, or their number as a negative value, as in `transformers`.

        Raises:
            RequestError: a number above 0, more columns than there are, or windows have moved on.
            OutOfBlocksError: no room to copy a block that others can find.
        """
        self.require_open()
        self.abandon()
        if tokens_to_remove > 0:
            raise RequestError(
                f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative "
                "number"
            )
        self._rows.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Treat new tokens as drafts, which `crop` may remove, until a `crop` is called.

        Drafts cannot be hit, and windows keep the tokens before them.
        """
        self.require_open()
        self._rows.is_recording = True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether new tokens are drafts; equal for all layers."""
        return self._rows.is_recording

    def reset(self) -> None:
        """Free all blocks; the next forward begins a new batch without a look-up."""
        self.require_open()
        self.abandon()
        self._rows.free()

    def close(self) -> None:
        """Free all blocks and close the cache. Computed blocks stay cached while there is room."""
        if not self.is_closed:
            self.abandon()
            self._rows.free()
            self.is_closed = True
            self._store.forget(self)

    # Inside.

    def _select(self, indices: list[int]) -> None:
        self.require_open()
        self.abandon()
        self._rows.select(indices)

    def _repeats(self, call: ModelCall) -> int:
        """Return the number of the batch's rows per row of the cache: beams, or sequences."""
        repeats, rest = divmod(call.batch_size, self.num_rows)
        if rest or not repeats or (repeats > 1 and self._rows.has_settled):
            raise RequestError(
                f"the model is called with {call.batch_size} rows, the cache has {self.num_rows}: "
                "use a cache for one batch only"
            )
        return repeats

    def require_open(self) -> None:
        """Raise RequestError if it is closed."""
        if self.is_closed:
            raise RequestError("the cache is closed: open another one from its store")
