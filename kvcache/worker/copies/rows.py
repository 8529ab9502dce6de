"""Copies rows of bytes between memories of the CPU, and hashes them in the same pass.

`Side` and `RowMover` check what the compiled code `move_rows` assumes. A row is read once: 64 bytes
at a time, a *stripe*, are written and added to the hash, which is xxh3 with 64 bits and without
seed (github.com/Cyan4973/xxHash, doc/xxhash_spec.md). Large copies bypass the processor's cache,
which a concurrent step needs.

The kernel hashes blocks of whole stripes that are longer than `SHORTEST_HASHED`; the hash has other
rules for shorter ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic, register_jitable

from kvcache.base.arrays import BoolArray, Int32Array, UInt64Array, are_below
from kvcache.base.compiled import array_type, compiled

STRIPE_BYTES = 64
SHORTEST_HASHED = 241
"""Bytes from which blocks are hashed in stripes."""

PREFETCHED_BYTES = 1 << 16
"""Up to this length of a row, the next row is prefetched during a copy if it is elsewhere, together
with the address translation of its destination: the processor does not prefetch beyond a page.
Speed of storing with hash, both sides scattered, relative to a plain copy: .51 with rows of 4 KiB,
.77 with the first, .89 with both; .66, .78 and .91 with 16 KiB. Prefetches go to the second-level
cache, because the first is too small for so many."""

COPIED, STREAMED, ONLY_READ = range(3)
"""How bytes are written: through the cache, past it, or not at all."""

cgutils: Any = untyped_cgutils  # numba has types, but not for these functions


_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_STRIPES_PER_BLOCK = (len(_SECRET) - STRIPE_BYTES) // 8


def _keys(*starts: int) -> UInt64Array:
    """Return the 8 words of the secret at each of these offsets: `(len(starts), 8)`."""
    return np.array([np.frombuffer(_SECRET, "<u8", 8, start) for start in starts])


# Of stripe i of a block row i; then of the block's end, of the last stripe, and of the result.
_KEYS = _keys(*range(0, 8 * _STRIPES_PER_BLOCK, 8), len(_SECRET) - 64, len(_SECRET) - 64 - 7, 11)
_BLOCK_END, _LAST, _RESULT = range(_STRIPES_PER_BLOCK, _STRIPES_PER_BLOCK + 3)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_FIRST_LANES = np.array(
    (
        *(_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3),
        *(_PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1),
    ),
    np.uint64,
)
_LENGTH_PRIME = np.uint64(_PRIME64_1)
_END_PRIME = np.uint64(0x165667919E3779F9)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF, _37 = np.uint64(32), np.uint64(37)

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_LANES = ir.VectorType(_I64, 8)
_NEIGHBOURS = ir.Constant(ir.VectorType(_I32, 8), [1, 0, 3, 2, 5, 4, 7, 6])


def _all_lanes(value: int) -> Any:
    return ir.Constant(_LANES, [value] * 8)


def _stripes(way: int, hashes: bool) -> Any:
    """Make the loop over stripes that copies in one `way`, with or without a hash.

    The loop takes addresses: `(source, destination, ahead, num_stripes, keys, lanes)`. It
    prefetches from `ahead`, 64 bytes per stripe.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        source, destination, ahead, num_stripes, keys, lanes = arguments
        lanes_at = _LANES.as_pointer()
        products, sums = (cgutils.alloca_once_value(builder, _all_lanes(0)) for _ in range(2))
        with cgutils.for_range(builder, num_stripes, intp=_I64) as loop:
            offset = builder.mul(loop.index, ir.Constant(_I64, STRIPE_BYTES))

            def at(address: Any) -> Any:
                return builder.inttoptr(builder.add(address, offset), lanes_at)

            _prefetch(builder, builder.inttoptr(builder.add(ahead, offset), _I8.as_pointer()))
            words = builder.load(at(source), align=1)
            if way != ONLY_READ:
                is_streamed = way == STREAMED
                store = builder.store(
                    words, at(destination), align=STRIPE_BYTES if is_streamed else 1
                )
                if is_streamed:
                    mark = builder.module.add_metadata([ir.Constant(_I32, 1)])
                    store.set_metadata("nontemporal", mark)
            if hashes:
                keyed = builder.xor(words, builder.load(at(keys), align=8))
                low = builder.and_(keyed, _all_lanes(0xFFFFFFFF))
                product = builder.mul(low, builder.lshr(keyed, _all_lanes(32)))
                builder.store(builder.add(builder.load(products), product), products)
                builder.store(builder.add(builder.load(sums), words), sums)
        if hashes:
            here = builder.inttoptr(lanes, lanes_at)
            none = ir.Constant(_LANES, ir.Undefined)
            crossed = builder.shuffle_vector(builder.load(sums), none, _NEIGHBOURS)
            lane = builder.add(builder.load(here, align=8), builder.load(products))
            builder.store(builder.add(lane, crossed), here, align=8)

    def stripes(  # type: ignore[no-untyped-def]  # numba's # noqa: PLR0917 (a call's arguments)
        typing_context, source, destination, ahead, num_stripes, keys, lanes
    ):
        signature = types.void(*(types.intp,) * 6)
        return signature, generate

    return intrinsic(stripes)


def _prefetch(builder: Any, pointer: Any) -> None:
    """Prefetch these bytes into the second-level cache, for reading."""
    numbers = [ir.Constant(_I32, number) for number in (0, 2, 1)]
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, *numbers])


def _copying(  # type: ignore[no-untyped-def]  # numba's
    typing_context, source, destination, num_bytes
):
    """Copy bytes that do not overlap, by the system's library."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        source, destination, num_bytes = arguments
        pointer = _I8.as_pointer()
        read, written = (builder.inttoptr(a, pointer) for a in (source, destination))
        cgutils.raw_memcpy(builder, written, read, num_bytes, 1)

    return types.void(*(types.intp,) * 3), generate


def _ending(typing_context, lanes, key):  # type: ignore[no-untyped-def]  # numba's
    """Mix the lanes at one address with the key at another, as at the end of every block.

    All eight at once, in the size in which they are written and read elsewhere. A read in another
    size than the write would wait until that write, and all earlier writes past the cache, are
    done.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        here, key_at = (builder.inttoptr(a, _LANES.as_pointer()) for a in arguments)
        lane = builder.load(here, align=8)
        mixed = builder.xor(lane, builder.lshr(lane, _all_lanes(47)))
        mixed = builder.xor(mixed, builder.load(key_at, align=8))
        builder.store(builder.mul(mixed, _all_lanes(_PRIME32_1)), here, align=8)

    return types.void(*(types.intp,) * 2), generate


def _fetching(typing_context, address):  # type: ignore[no-untyped-def]  # numba's
    """Prefetch the bytes at an address, and so the translation of its page."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        _prefetch(builder, builder.inttoptr(arguments[0], _I8.as_pointer()))

    return types.void(types.intp), generate


def _finishing(typing_context):  # type: ignore[no-untyped-def]  # numba's
    """Make writes past the cache visible to other threads before anything that follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        builder.fence("seq_cst")

    return types.void(), generate


_copy: Any = intrinsic(_copying)
_end_block: Any = intrinsic(_ending)
_fetch: Any = intrinsic(_fetching)
_finish_writes: Any = intrinsic(_finishing)
_copy_and_hash = _stripes(COPIED, True)
_stream_and_hash = _stripes(STREAMED, True)
_hash = _stripes(ONLY_READ, True)
_stream = _stripes(STREAMED, False)


# Indices, not slices of `lanes`: numba counts references to a slice, and such an atomic operation
# waits until all writes past the cache have arrived.


@register_jitable  # type: ignore[untyped-decorator]  # numba's
def _hash_of(lanes: UInt64Array, row: int, num_bytes: int) -> Any:
    """Return the hash of that many bytes; all their stripes were hashed."""
    result = np.uint64(num_bytes) * _LENGTH_PRIME
    for i in range(0, 8, 2):
        a, b = lanes[row, i] ^ _KEYS[_RESULT, i], lanes[row, i + 1] ^ _KEYS[_RESULT, i + 1]
        a_low, a_high, b_low, b_high = a & _LOW_HALF, a >> _HALF, b & _LOW_HALF, b >> _HALF
        # The product of 128 bits, from products of halves.
        low, cross = a_low * b_low, a_high * b_low
        middle = (low >> _HALF) + (cross & _LOW_HALF) + a_low * b_high
        high = (cross >> _HALF) + (middle >> _HALF) + a_high * b_high
        result += high ^ (middle << _HALF | low & _LOW_HALF)
    result = (result ^ (result >> _37)) * _END_PRIME
    return result ^ (result >> _HALF)


_READ_IDS = array_type("int32", is_read=True)


@compiled(
    types.void(
        *(types.intp, types.intp, _READ_IDS),
        *(types.intp, types.intp, _READ_IDS),
        *(types.intp,) * 6,
        array_type("boolean", is_read=True),
        *(array_type("uint64", 2), array_type("uint64")),
        types.intp,
    )
)
def move_rows(  # noqa: PLR0917 (compiled code has no others)
    source: int,
    source_stride: int,
    source_ids: Int32Array,
    destination: int,
    stride: int,
    ids: Int32Array,
    first: int,
    end: int,
    low: int,
    high: int,
    start: int,
    total: int,
    is_hashed: BoolArray,
    lanes: UInt64Array,
    digests: UInt64Array,
    way: int,
) -> None:
    """Copy bytes `[low, high)` of rows `[first, end)` of both ids, and hash those `is_hashed`.

    Rows of the destination begin at address `destination`, `stride` bytes apart; those of sources
    likewise. A block has `total` bytes, possibly in several memories; a row is the part from
    `start` on. `lanes[i - first]` keeps the state between calls for a block's parts, which come in
    order; the last call sets `digests[i]`. For hashed or streamed rows `low`, `high` and `start`
    are between stripes, and streamed ones are aligned in the destination.
    """
    num_bytes = high - low
    key_at, lanes_at = _KEYS.ctypes.data, lanes.ctypes.data
    for place in range(first, end):
        here = source + source_ids[place] * source_stride + low
        there = destination + ids[place] * stride + low
        ahead = here
        if num_bytes <= PREFETCHED_BYTES and place + 1 < end:
            following = source_ids[place + 1]
            if following != source_ids[place] + 1:
                ahead = source + following * source_stride + low
            _fetch(destination + ids[place + 1] * stride + low)
        if not is_hashed[place]:
            if way == COPIED:
                _copy(here, there, num_bytes)
            elif way == STREAMED:
                _stream(here, there, ahead, num_bytes // STRIPE_BYTES, key_at, lanes_at)
            continue
        row = place - first
        lane_at = lanes_at + row * STRIPE_BYTES
        if start + low == 0:
            for i in range(8):
                lanes[row, i] = _FIRST_LANES[i]
        # The last stripe is hashed with another key, and ends no block.
        stripe, last = (start + low) // STRIPE_BYTES, total // STRIPE_BYTES - 1
        stripe_end = (start + high) // STRIPE_BYTES
        while stripe < stripe_end:
            of_block = stripe % _STRIPES_PER_BLOCK
            key, count = key_at + of_block * STRIPE_BYTES, 1
            if stripe == last:
                key = key_at + _LAST * STRIPE_BYTES
            else:
                count = min(_STRIPES_PER_BLOCK - of_block, min(stripe_end, last) - stripe)
            if way == STREAMED:
                _stream_and_hash(here, there, ahead, count, key, lane_at)
            elif way == COPIED:
                _copy_and_hash(here, there, ahead, count, key, lane_at)
            else:
                _hash(here, there, ahead, count, key, lane_at)
            if stripe < last and of_block + count == _STRIPES_PER_BLOCK:
                _end_block(lane_at, key_at + _BLOCK_END * STRIPE_BYTES)
            stripe += count
            here += count * STRIPE_BYTES
            there += count * STRIPE_BYTES
            ahead += count * STRIPE_BYTES
        if start + high == total:
            digests[place] = _hash_of(lanes, row, total)
    if way == STREAMED:
        _finish_writes()


def can_hash(widths: Sequence[int]) -> bool:
    """Say whether the kernel can hash blocks with parts of these widths."""
    return sum(widths) >= SHORTEST_HASHED and not any(width % STRIPE_BYTES for width in widths)


ByteRows = npt.NDArray[np.uint8]

STREAMED_BYTES = 1 << 20
"""Copies of at least this many bytes bypass the cache: they would evict other data, and most of
them is not read soon."""

_NO_LANES = np.empty((0, 8), np.uint64)
_NO_DIGESTS = np.empty(0, np.uint64)


@dataclass(frozen=True, eq=False)
class Side:
    """Rows `ids[i]` of `(num_rows, width)` uint8; each row is contiguous.

    Raises IndexError for a missing row, ValueError for rows that are not contiguous.
    """

    rows: ByteRows
    ids: Int32Array

    def __post_init__(self) -> None:
        if not are_below(self.ids, len(self.rows)):
            least, most = int(self.ids.min()), int(self.ids.max())
            raise IndexError(f"rows {least} to {most} of {len(self.rows)}: ids begin at 0")
        if self.rows.shape[1] > 1 and self.rows.strides[1] != 1:
            raise ValueError(
                f"bytes of a row are {self.rows.strides[1]} apart: none may be between"
            )

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return int(self.rows.shape[1])

    @property
    def is_aligned(self) -> bool:
        """Whether every row begins and ends at a stripe."""
        address: int = self.rows.ctypes.data
        return not (address | self.rows.strides[0] | self.width) % STRIPE_BYTES

    def places(self) -> tuple[int, int, Int32Array]:
        """Return the kernel's arguments: address of row 0, bytes from row to row, and ids."""
        ids = np.ascontiguousarray(self.ids, np.int32)
        return self.rows.ctypes.data, self.rows.strides[0], ids


class PieceHashes:
    """Hashes of blocks `[first, end)`; one thread hashes their parts in order, others hash other
    blocks at the same time.

    Of all blocks, `is_hashed` says which to hash, and `digests[i]` is valid when all parts of block
    `i` were hashed. Both are contiguous, `(n,)`.
    """

    def __init__(self, is_hashed: BoolArray, digests: UInt64Array, first: int, end: int) -> None:
        self.is_hashed = is_hashed
        self.digests = digests
        self.first = first
        self.end = end
        # One cache line each.
        memory = np.empty(8 * (end - first) + 7, np.uint64)
        start = -memory.ctypes.data % STRIPE_BYTES // 8
        self.lanes = memory[start : start + 8 * (end - first)].reshape(-1, 8)


class RowMover:
    """Copies row `i` of one side to row `i` of the other. Threads may copy different rows.

    Both sides have the same width. Destinations are distinct, and none is a source.
    """

    def __init__(self, source: Side, destination: Side, start: int = 0, total: int = 0) -> None:
        """Prepare a copy. Rows are the part from `start` on of blocks of `total` bytes.

        Raises ValueError if the sides differ.
        """
        if source.width != destination.width:
            raise ValueError(f"rows of {source.width} bytes to rows of {destination.width}")
        if len(source.ids) != len(destination.ids):
            raise ValueError(f"{len(source.ids)} rows to {len(destination.ids)}")
        if not destination.rows.flags.writeable:
            raise ValueError("the rows to write are read-only")
        is_streamed = destination.is_aligned and len(source.ids) * source.width >= STREAMED_BYTES
        self._start = start
        self._total = total
        self._way = STREAMED if is_streamed else COPIED
        self._memories = source.rows, destination.rows  # keeps their addresses valid
        self._from, self._to = source.places(), destination.places()
        self._not_hashed = np.zeros(len(source.ids), np.bool_)

    def copy(self, first: int, end: int, low: int, high: int) -> None:
        """Copy bytes `[low, high)` of these rows."""
        bounds = (first, end, low, high, 0, 0)
        hashes = self._not_hashed, _NO_LANES, _NO_DIGESTS
        move_rows(*self._from, *self._to, *bounds, *hashes, self._way)

    def copy_hashed(self, piece: PieceHashes, low: int, high: int) -> None:
        """Copy bytes `[low, high)` of a piece's rows, and hash those that need it. `low` is between
        stripes, and the kernel can hash the blocks."""
        bounds = (piece.first, piece.end, low, high, self._start, self._total)
        hashes = piece.is_hashed, piece.lanes, piece.digests
        move_rows(*self._from, *self._to, *bounds, *hashes, self._way)


def copy_rows(sources: ByteRows, source_ids: Int32Array, to: ByteRows, ids: Int32Array) -> None:
    """Copy row `source_ids[i]` to row `ids[i]` of `to`; see `RowMover`."""
    mover = RowMover(Side(sources, source_ids), Side(to, ids))
    mover.copy(0, len(ids), 0, sources.shape[1])


def hashes_of_rows(parts: Sequence[ByteRows], ids: Int32Array) -> UInt64Array:
    """Return the hash of each block: row `i` of every part, in order. `can_hash` must be true of
    their widths. Copies nothing."""
    count = len(ids)
    piece = PieceHashes(np.ones(count, np.bool_), np.zeros(count, np.uint64), 0, count)
    hashes = piece.is_hashed, piece.lanes, piece.digests
    start, total = 0, sum(part.shape[1] for part in parts)
    for part in parts:
        places, width = Side(part, ids).places(), part.shape[1]
        move_rows(*places, *places, 0, count, 0, width, start, total, *hashes, ONLY_READ)
        start += width
    return piece.digests
