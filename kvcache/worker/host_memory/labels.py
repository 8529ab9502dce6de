"""Labels of host slots, next to the bytes, in memory that outlives the process.

As everywhere, a label is withdrawn before the first byte is written, and sealed by a command after
every rank has finished:

    EMPTY ──begin──▶ WRITING ──finish──▶ WRITTEN ──seal──▶ SEALED ──withdraw──▶ EMPTY
                     store or fetch      done on this      done on
                     runs                rank              every rank

A process that attaches to the memory keeps SEALED slots with a valid checksum, and forgets all
others. Not thread-safe: the worker locks around it.

A label is a row of fixed width, and cells for its unbounded parts: namespace and extra keys. Their
first bytes are in the row, the rest in a chain of cells that all rows share. A row has a checksum
over itself and its chain, so a torn row is recognised. A label for which there are not enough cells
is not written at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import BoolArray, Int32Array, Int64Array, int32_array
from kvcache.base.errors import InvariantError
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import UNLABELLED

INLINE_BYTES = 48
"""Bytes of namespace and extra keys together that need no cell: enough for most requests."""

MAX_NAMES_BYTES = 1 << 16
"""Longest namespace and extra keys of one label, together."""

CELL_BYTES = 256
_CELL = np.dtype([("next", "<i4"), ("data", "u1", (CELL_BYTES - 4,))])
_CELL_DATA_BYTES = CELL_BYTES - 4

NO_CELL = -1

Rows = npt.NDArray[np.void]
"""A structured array: `row_type`'s fields for each slot."""


class SlotState(IntEnum):
    """The state of a host slot's bytes."""

    EMPTY = 0
    WRITING = 1
    WRITTEN = 2
    SEALED = 3


def row_type(digest_bytes: int, max_block_tokens: int) -> np.dtype[Any]:
    """Return the layout of a row. `group` is -1 if the bytes have no label. `generation` is higher
    the later the slot was written or withdrawn."""
    return np.dtype(
        [
            ("state", "u1"),
            ("pad", "u1", (3,)),
            ("row_crc", "<u4"),
            ("generation", "<u4"),
            ("group", "<i4"),
            ("token_count", "<i4"),
            ("namespace_bytes", "<i4"),
            ("extra_bytes", "<i4"),
            ("first_cell", "<i4"),
            ("checksum", "<i8"),
            ("digest", "u1", (digest_bytes,)),
            ("parent", "u1", (digest_bytes,)),
            ("tokens", "<i4", (max_block_tokens,)),
            ("inline", "u1", (INLINE_BYTES,)),
        ]
    )


def row_checksum(row: bytes, chain: bytes) -> int:
    """Return the CRC-32C of a row and its cells, without the state and the CRC."""
    crc: int = google_crc32c.value(row[8:] + chain)
    return crc


class CellChains:
    """Cells shared by all rows: a free list in this process, links in the memory.

    Invariant: a cell is on the free list or in exactly one row's chain.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        """Use `memory`, a whole number of cells, all free."""
        self._cells: npt.NDArray[np.void] = memory.view(_CELL)
        self._is_free = np.ones(len(self._cells), dtype=np.bool_)
        self._free = list(range(len(self._cells) - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of unused cells."""
        return len(self._free)

    @property
    def num_cells(self) -> int:
        return len(self._cells)

    @staticmethod
    def cells_for(num_bytes: int) -> int:
        """Return the number of cells for a label with so many variable bytes."""
        return -(-max(0, num_bytes - INLINE_BYTES) // _CELL_DATA_BYTES)

    def write(self, data: bytes) -> list[int]:
        """Write the part that does not fit into the row; return the chain of cells, in order.

        The caller has checked that there are enough cells.
        """
        rest = data[INLINE_BYTES:]
        chain = [self._free.pop() for _ in range(self.cells_for(len(data)))]
        self._is_free[chain] = False
        for place, cell in enumerate(chain):
            piece = rest[place * _CELL_DATA_BYTES : (place + 1) * _CELL_DATA_BYTES]
            self._cells["data"][cell, : len(piece)] = np.frombuffer(piece, np.uint8)
            self._cells["next"][cell] = NO_CELL if cell == chain[-1] else chain[place + 1]
        return chain

    def read(self, chain: Sequence[int], num_bytes: int) -> bytes:
        """Return what `write` stored for a label of `num_bytes` variable bytes."""
        pieces = [self._cells["data"][cell].tobytes() for cell in chain]
        return b"".join(pieces)[: max(0, num_bytes - INLINE_BYTES)]

    def follow(self, first: int, num_bytes: int) -> list[int] | None:
        """Return the chain that begins at `first` in the memory; None if it is invalid."""
        if not 0 <= num_bytes <= MAX_NAMES_BYTES:
            return None
        chain: list[int] = []
        cell = first
        for _ in range(self.cells_for(num_bytes)):
            if not 0 <= cell < len(self._cells) or not self._is_free[cell] or cell in chain:
                return None
            chain.append(cell)
            cell = int(self._cells["next"][cell])
        return chain if cell == NO_CELL else None

    def take(self, chain: Sequence[int]) -> None:
        """Take cells that `follow` returned; call `list_free` once afterwards."""
        self._is_free[list(chain)] = False

    def list_free(self) -> None:
        self._free = np.flatnonzero(self._is_free)[::-1].tolist()

    def release(self, chain: Sequence[int]) -> None:
        self._is_free[list(chain)] = True
        self._free.extend(chain)


NO_CHECKSUM = -1
_MAX_GENERATION = 2**32 - 1

Generations = npt.NDArray[np.uint32]


class SealedLabels(NamedTuple):
    """Labels, the checksums of their blocks (little-endian int64), and the generations of their
    slots (little-endian uint32), if they have any."""

    labels: Label
    checksums: bytes
    generations: bytes = b""


class HostLabels:
    """The labels of one rank's host slots. `checksums` and states live in the same rows.

    Invariants: an EMPTY slot has no cells; a row's chain of cells is its own; `SEALED` rows have a
    group, a checksum and a valid row checksum.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.uint8],
        cells: npt.NDArray[np.uint8],
        *,
        digest_bytes: int,
        max_block_tokens: int,
    ) -> None:
        """Use this memory; its rows are zero (EMPTY) or another process's.

        Of another process's rows, only sealed ones with a valid checksum are kept.
        """
        self.digest_bytes = digest_bytes
        self.max_block_tokens = max_block_tokens
        self._rows: npt.NDArray[np.void] = rows.view(row_type(digest_bytes, max_block_tokens))
        self._cells = CellChains(cells)
        self._chains: dict[int, list[int]] = {}
        self.num_damaged_rows = 0
        self.num_without_room = 0
        self.num_seals_refused = 0
        self._generation = int(self._rows["generation"].max(initial=0))
        self._adopt()

    @property
    def num_slots(self) -> int:
        return len(self._rows)

    @property
    def label_bytes(self) -> int:
        """Maximum bytes of a label in a label set, without namespace and extra keys."""
        return 2 * self.digest_bytes + 4 * (self.max_block_tokens + 6) + 8

    def state(self, slot: int) -> SlotState:
        return SlotState(int(self._rows["state"][slot]))

    def num_in(self, state: SlotState) -> int:
        return int(np.count_nonzero(self._rows["state"] == state))

    def are_readable(self, slots: Int32Array) -> BoolArray:
        """Say of each slot whether its bytes are complete on this rank."""
        readable: BoolArray = self._rows["state"][slots] >= SlotState.WRITTEN
        return readable

    def are_labelled(self, slots: Int32Array) -> BoolArray:
        """Say of each slot whether it has a label, or will get one."""
        is_used = self._rows["state"][slots] != SlotState.EMPTY
        labelled: BoolArray = is_used & (self._rows["group"][slots] != UNLABELLED)
        return labelled

    def are_whole(self, slots: Int32Array) -> BoolArray:
        """Say of each slot whether its row can be read: that of a SEALED slot has the checksum of
        its bytes, and any other one has as many cells as its lengths say."""
        rows = self._rows[slots]
        lengths = (rows["namespace_bytes"] + rows["extra_bytes"]).tolist()
        chains = [self._chains.get(slot, ()) for slot in slots.tolist()]
        whole: BoolArray = np.array(
            [
                CellChains.cells_for(num_bytes) == len(chain)
                for num_bytes, chain in zip(lengths, chains, strict=True)
            ],
            np.bool_,
        )
        sealed = np.flatnonzero(whole & (rows["state"] == SlotState.SEALED))
        whole[sealed] = rows["row_crc"][sealed] == self._row_checksums(slots[sealed])
        return whole

    def checksums(self, slots: Int32Array) -> Int64Array:
        """Return the checksum of each slot's bytes, `NO_CHECKSUM` if there is none."""
        found: Int64Array = self._rows["checksum"][slots].astype(np.int64)
        return found

    def generations(self, slots: Int32Array) -> Generations:
        """Return the generation of each slot: higher the later it was written."""
        found: Generations = self._rows["generation"][slots]
        return found

    def are_awaited(self, slots: Int32Array, generations: Generations) -> BoolArray:
        """Say of each slot whether it is still WRITING since the `begin` that returned these."""
        rows = self._rows
        is_same: BoolArray = rows["generation"][slots] == generations
        is_same &= rows["state"][slots] == SlotState.WRITING
        return is_same

    # --- changes

    def begin(self, slots: Int32Array) -> Generations:
        """Withdraw the slots' labels before a write. Return the argument for `finish`."""
        self.withdraw(slots)
        self._rows["group"][slots] = UNLABELLED
        self._rows["checksum"][slots] = NO_CHECKSUM
        self._rows["state"][slots] = SlotState.WRITING
        generations: Generations = self._rows["generation"][slots].copy()
        return generations

    def describe(self, slots: Int32Array, labels: Label) -> None:
        """Set the labels of WRITING slots, one for each slot.

        A label that is too long for the remaining cells is not written: its slot can be loaded in
        this process, but not sealed (counted).
        """
        rows, size = self._rows, self.digest_bytes
        if not len(slots):
            return
        rows["digest"][slots] = np.frombuffer(labels.digests, np.uint8).reshape(-1, size)
        rows["parent"][slots] = np.frombuffer(labels.parent_digests, np.uint8).reshape(-1, size)
        rows["token_count"][slots] = labels.token_counts
        self._write_tokens(slots, labels)
        self._write_short_names(slots, labels)
        groups = labels.groups
        for place in self._long_named(labels):
            name = labels.namespace_names[int(labels.namespaces[place])]
            if not self._write_names(int(slots[place]), name, labels.extra_keys.get(place, b"")):
                groups = groups.copy()
                groups[place] = UNLABELLED
                self.num_without_room += 1
        rows["group"][slots] = groups

    def finish(self, slots: Int32Array, generations: Generations, checksums: Int64Array) -> None:
        """Record that the bytes of slots have arrived; slots withdrawn since `begin` do not
        change."""
        is_same = self.are_awaited(slots, generations)
        arrived = slots[is_same]
        self._rows["checksum"][arrived] = checksums[is_same]
        self._rows["state"][arrived] = SlotState.WRITTEN

    def seal(self, slots: Int32Array) -> None:
        """Seal slots that are WRITTEN and have a label; others do not change (counted)."""
        rows = self._rows
        states = rows["state"][slots]
        can_be = (states == SlotState.WRITTEN) & (rows["group"][slots] != UNLABELLED)
        self.num_seals_refused += int(np.count_nonzero(~can_be & (states != SlotState.SEALED)))
        ready = slots[can_be]
        rows["row_crc"][ready] = self._row_checksums(ready)
        rows["state"][ready] = SlotState.SEALED

    def withdraw(self, slots: Int32Array) -> None:
        """Forget the content of slots."""
        self._generation = (self._generation + 1) & _MAX_GENERATION
        self._rows["state"][slots] = SlotState.EMPTY
        self._rows["generation"][slots] = self._generation
        if self._chains:
            for slot in slots.tolist():
                self._cells.release(self._chains.pop(slot, ()))

    def withdraw_unsealed(self) -> None:
        """Forget every slot that is not SEALED, as none of them will be sealed. No job runs."""
        states = self._rows["state"]
        is_unsealed = (states != SlotState.SEALED) & (states != SlotState.EMPTY)
        self.withdraw(int32_array(np.flatnonzero(is_unsealed)))

    def withdraw_all(self) -> None:
        """Forget every slot."""
        self.withdraw(int32_array(np.flatnonzero(self._rows["state"] != SlotState.EMPTY)))

    # --- reading

    def labels_of(self, slots: Int32Array) -> Label:
        """Return a copy of the labels of slots that have one, in this order. `block_ids` are slots,
        including 0; their owners' slots are unknown: -1."""
        rows = self._rows[slots]
        counts = rows["token_count"].astype(np.int32)
        columns = np.arange(self.max_block_tokens)[None, :] < counts[:, None]
        names: dict[bytes, int] = {}
        namespaces: list[int] = []
        extra_keys: dict[int, bytes] = {}
        for place, (name, keys) in enumerate(self._names_of(slots)):
            namespaces.append(names.setdefault(name, len(names)))
            if keys:
                extra_keys[place] = keys
        return Label(
            block_ids=slots,
            groups=int32_array(rows["group"]),
            slots=np.full(len(slots), UNLABELLED, dtype=np.int32),
            digests=rows["digest"].tobytes(),
            parent_digests=rows["parent"].tobytes(),
            token_counts=counts,
            token_ids=int32_array(rows["tokens"][columns]),
            namespaces=int32_array(namespaces),
            namespace_names=tuple(names),
            extra_keys=extra_keys,
        )

    def sealed(self, first_slot: int = 0, end_slot: int | None = None) -> SealedLabels:
        """Return a copy of the labels of the SEALED slots of `[first_slot, end_slot)`, by slot.

        Without `end_slot`: up to the last slot.
        """
        states = self._rows["state"][first_slot:end_slot]
        slots = int32_array(np.flatnonzero(states == SlotState.SEALED) + first_slot)
        return SealedLabels(
            self.labels_of(slots),
            self.checksums(slots).astype("<i8").tobytes(),
            self.generations(slots).astype("<u4").tobytes(),
        )

    def check(self) -> None:
        """Raise `InvariantError` if rows and cells are inconsistent. Changes nothing."""
        rows = self._rows
        empty = [slot for slot in self._chains if rows["state"][slot] == SlotState.EMPTY]
        if empty:
            raise InvariantError(f"empty host slots {empty[:5]} have cells of labels")
        uses = Counter(cell for chain in self._chains.values() for cell in chain)
        if any(count > 1 for count in uses.values()):
            raise InvariantError(f"cells {sorted(uses)[:5]} belong to two host labels")
        if len(uses) + self._cells.num_free != self._cells.num_cells:
            raise InvariantError(
                f"{len(uses)} cells of host labels are used and {self._cells.num_free} free, of "
                f"{self._cells.num_cells}"
            )
        sealed = np.flatnonzero(rows["state"] == SlotState.SEALED)
        wrong = sealed[rows["row_crc"][sealed] != self._row_checksums(int32_array(sealed))]
        if len(wrong):
            raise InvariantError(f"labels of sealed host slots {wrong[:5].tolist()} were changed")

    # --- rows

    def _adopt(self) -> None:
        """Keep the slots that another process has sealed, and make all other rows empty."""
        self.withdraw_unsealed()
        damaged: list[int] = []
        for slot in np.flatnonzero(self._rows["state"] == SlotState.SEALED).tolist():
            row = self._rows[slot]
            lengths = int(row["namespace_bytes"]), int(row["extra_bytes"])
            chain = self._cells.follow(int(row["first_cell"]), sum(lengths))
            is_possible = (
                chain is not None
                and min(lengths) >= 0
                and 0 <= int(row["token_count"]) <= self.max_block_tokens
            )
            if is_possible and int(row["row_crc"]) == self._checksum_of(slot, chain or []):
                if chain:
                    self._cells.take(chain)
                    self._chains[slot] = chain
            else:
                damaged.append(slot)
        self._cells.list_free()
        self.withdraw(int32_array(damaged))
        self.num_damaged_rows = len(damaged)

    def _row_checksums(self, slots: Int32Array) -> npt.NDArray[np.uint32]:
        """Return the checksums of the present rows."""
        data, size = self._rows[slots].tobytes(), self._rows.itemsize
        found = np.empty(len(slots), dtype=np.uint32)
        for place, slot in enumerate(slots.tolist()):
            row, chain = data[place * size : (place + 1) * size], self._chains.get(slot)
            found[place] = self._checksum_of(slot, chain) if chain else row_checksum(row, b"")
        return found

    def _checksum_of(self, slot: int, chain: list[int]) -> int:
        row = self._rows[slot]
        num_bytes = int(row["namespace_bytes"]) + int(row["extra_bytes"])
        return row_checksum(row.tobytes(), self._cells.read(chain, num_bytes))

    def _write_names(self, slot: int, namespace: bytes, extra_keys: bytes) -> bool:
        """Write the unbounded parts; return False, unchanged, if there are not enough cells."""
        data, row = namespace + extra_keys, self._rows[slot]
        is_too_long = len(data) > MAX_NAMES_BYTES
        if is_too_long or CellChains.cells_for(len(data)) > self._cells.num_free:
            return False
        chain = self._cells.write(data)
        if chain:
            self._chains[slot] = chain
        row["namespace_bytes"], row["extra_bytes"] = len(namespace), len(extra_keys)
        row["first_cell"] = chain[0] if chain else NO_CELL
        inline = data[:INLINE_BYTES]
        row["inline"][: len(inline)] = np.frombuffer(inline, np.uint8)
        return True

    def _names_of(self, slots: Int32Array) -> Iterator[tuple[bytes, bytes]]:
        """Yield namespace and extra keys of slots that have a label."""
        rows = self._rows[slots]
        inline = rows["inline"].tobytes()
        lengths = rows["namespace_bytes"].tolist()
        totals = (rows["namespace_bytes"] + rows["extra_bytes"]).tolist()
        for place, slot in enumerate(slots.tolist()):
            start, total = place * INLINE_BYTES, totals[place]
            data = inline[start : start + min(total, INLINE_BYTES)]
            if total > INLINE_BYTES:
                data += self._cells.read(self._chains[slot], total)
            yield data[: lengths[place]], data[lengths[place] :]

    @staticmethod
    def _long_named(labels: Label) -> list[int]:
        """Return the places of labels with extra keys, or with a namespace that needs cells."""
        long = [i for i, name in enumerate(labels.namespace_names) if len(name) > INLINE_BYTES]
        if not long:
            return list(labels.extra_keys)
        places = set(np.flatnonzero(np.isin(labels.namespaces, long)).tolist())
        return sorted(places | set(labels.extra_keys))

    def _write_short_names(self, slots: Int32Array, labels: Label) -> None:
        """Write namespaces that fit into rows; extra keys and long names are written after it."""
        rows = self._rows
        rows["extra_bytes"][slots] = 0
        rows["first_cell"][slots] = NO_CELL
        for index, name in enumerate(labels.namespace_names):
            if len(name) <= INLINE_BYTES:
                named = slots[labels.namespaces == index]
                rows["namespace_bytes"][named] = len(name)
                rows["inline"][named, : len(name)] = np.frombuffer(name, np.uint8)

    def _write_tokens(self, slots: Int32Array, labels: Label) -> None:
        width = int(labels.token_counts.max())
        if len(labels.token_ids) == len(slots) * width:  # every block is full
            tokens = labels.token_ids.reshape(len(slots), width)
        else:
            tokens = np.zeros((len(slots), width), np.int32)
            tokens[np.arange(width) < labels.token_counts[:, None]] = labels.token_ids
        self._rows["tokens"][slots, :width] = tokens
