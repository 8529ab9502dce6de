"""Digests of nodes, which are made when they are needed, a whole path in one call.

A node's digest covers its parent's digest, its tokens, and its extra keys as CBOR. Labels, events,
tiers and audits need digests; look-ups do not. A node's ancestors live as long as the node, so its
digest can be made late. SHA-256 comes from libcrypto and XXH3 from the xxhash module, both called
by address after a test vector has matched. If that fails, and for CBOR digests, the package's own
functions make digests one by one.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import partial
from typing import Any

import numpy as np
import xxhash  # noqa: F401 - its module is looked up by name

from kvcache.base.compiled import IS_PLAIN, array_type
from kvcache.core.columns import ColumnStore, columns_of, grown, logs_of, search_of
from kvcache.core.machine import (
    CORE,
    INT,
    INTS,
    NEW_BYTE_ROWS,
    NEW_INT_ROWS,
    NEW_INTS,
    NOTHING,
    address_of,
    call_3,
    call_for_pair,
    copy,
    kernel,
    routine,
)
from kvcache.core.names import *
from kvcache.requests.hash_algorithms import (
    BlockHash,
    ExtraKeys,
    HashFn,
    canonical_cbor,
    quick_chains,
)

logger = logging.getLogger(__name__)

BYTES, NEW_WORDS = array_type("uint8", is_read=True), array_type("uint64")

BY_PYTHON, SHA256, XXH3 = range(3)
"""How digests are made: entry 0 of `word`. For SHA-256, the next entries are the algorithm, the
context, and the functions that begin, feed and end a digest. For XXH3, entry 1 is the function."""


class Sha256:
    """SHA-256 of libcrypto 3: `EVP_MD_fetch`, `EVP_MD_CTX_new`, `EVP_DigestInit_ex2`,
    `EVP_DigestUpdate`, `EVP_DigestFinal_ex`. One context, for one thread."""

    def __init__(self) -> None:
        """Find the functions; raises OSError or AttributeError if they are missing."""
        library = ctypes.CDLL("libcrypto.so.3")
        library.EVP_MD_fetch.restype = library.EVP_MD_CTX_new.restype = ctypes.c_void_p
        library.EVP_MD_fetch.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
        library.EVP_MD_free.argtypes = library.EVP_MD_CTX_free.argtypes = [ctypes.c_void_p]
        self._library = library
        self._algorithm = library.EVP_MD_fetch(None, b"SHA2-256", None)
        self._context = library.EVP_MD_CTX_new()
        if not self._algorithm or not self._context:
            raise OSError("libcrypto has no SHA-256")
        names = "EVP_DigestInit_ex2", "EVP_DigestUpdate", "EVP_DigestFinal_ex"
        functions = [_address(library, name) for name in names]
        self.words = [SHA256, self._algorithm, self._context, *functions]

    def __del__(self) -> None:
        library = getattr(self, "_library", None)
        if library is not None:
            library.EVP_MD_CTX_free(getattr(self, "_context", None))
            library.EVP_MD_free(getattr(self, "_algorithm", None))


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


@routine
def _swapped(x: int) -> int:
    """Return a word with its bytes reversed."""
    y = np.uint64(0)
    for i in range(8):
        y = (y << np.uint64(8)) | ((np.uint64(x) >> np.uint64(8 * i)) & np.uint64(255))
    return y


@routine
def _hash(word: Any, data: int, num_bytes: int, digest: int, words: Any) -> None:
    """Hash the bytes at `data`, and write the digest to an address. `words` is scratch, two
    long."""
    if word[0] == SHA256:
        call_3(word[3], (word[2], word[1], np.int64(0)))
        call_3(word[4], (word[2], data, num_bytes))
        call_3(word[5], (word[2], digest, np.int64(0)))
    else:
        low, high = call_for_pair(word[1], data, num_bytes)
        words[0], words[1] = _swapped(high), _swapped(low)
        copy(digest, words.ctypes.data, np.int64(16))


@routine
def _make(core: Any, n: int, buffer: Any, words: Any) -> None:
    """Make the digest of a node whose parent has one."""
    c = columns_of(core)
    s = search_of(core)
    log = logs_of(core)
    size, unit_bytes = s.digest.shape[1], np.int64(4) * c.tokens.shape[1]
    at, keys = np.int64(buffer.ctypes.data), c.node[n, KEYS] >> 1
    copy(at, address_of(s.digest, c.node[n, PARENT]), size)
    copy(at + size, address_of(c.tokens, n), unit_bytes)
    num_bytes = size + unit_bytes
    if keys:
        copy(at + num_bytes, address_of(log.tail, log.tail_at[keys, 0]), log.tail_at[keys, 1])
        num_bytes += log.tail_at[keys, 1]
    _hash(log.word, at, num_bytes, address_of(s.digest, n), words)
    c.node[n, KEYS] |= 1


@kernel(
    NOTHING, array_type("int64"), BYTES, NEW_BYTE_ROWS, array_type("uint8"), NEW_WORDS,
    checks_types=True,
)  # fmt: skip
def _chain(word: Any, tokens: Any, digests: Any, buffer: Any, words: Any) -> None:
    """Make the digests of consecutive units without extra keys. Row 0 of `digests` is the parent of
    the first unit. `buffer` (one digest and one unit) and `words` (two words) are scratch."""
    size = np.int64(digests.shape[1])
    at, unit_bytes = np.int64(buffer.ctypes.data), np.int64(len(buffer)) - size
    for i in range(len(digests) - 1):
        copy(at, address_of(digests, i), size)
        copy(at + size, address_of(tokens, i * unit_bytes), unit_bytes)
        _hash(word, at, size + unit_bytes, address_of(digests, i + 1), words)


@kernel(NOTHING, CORE, INTS, array_type("uint8"), NEW_WORDS, NEW_INTS)
def _make_all(core: Any, nodes: Any, buffer: Any, words: Any, way: Any) -> None:
    """Make the digests that the nodes and their ancestors lack. The other arguments are scratch:
    the hashed bytes of one unit, two words, and as many nodes as the deepest path has."""
    c = columns_of(core)
    for k in range(len(nodes)):
        n, length = np.int64(nodes[k]), 0
        while c.node[n, KEYS] & 1 == 0:
            way[length] = n
            length += 1
            n = np.int64(c.node[n, PARENT])
        for i in range(length - 1, -1, -1):
            _make(core, np.int64(way[i]), buffer, words)


@kernel(
    NOTHING, CORE, NEW_INT_ROWS, INT, NEW_INTS, NEW_BYTE_ROWS, NEW_BYTE_ROWS, NEW_INT_ROWS,
    NEW_INT_ROWS, NEW_INTS,
)  # fmt: skip
def describe(
    core: Any, notes: Any, length: int, ids: Any, digests: Any, parents: Any, tokens: Any,
    keys: Any, follows: Any,
) -> None:  # fmt: skip
    """Describe blocks of one group, `length` units each, noted by node and group: their ids,
    digests, parents' digests, tokens, extra keys by unit, and whether each continues the previous
    one."""
    c = columns_of(core)
    s = search_of(core)
    unit, size = c.tokens.shape[1], s.digest.shape[1]
    for i in range(len(notes)):
        n = np.int64(notes[i, 0])
        ids[i] = c.node[n, BLOCK + 2 * notes[i, 1]]
        copy(address_of(digests, i), address_of(s.digest, n), size)
        for k in range(length - 1, -1, -1):
            copy(address_of(tokens, i) + 4 * unit * k, address_of(c.tokens, n), 4 * unit)
            keys[i, k] = c.node[n, KEYS] >> 1
            n = np.int64(c.node[n, PARENT])
        copy(address_of(parents, i), address_of(s.digest, n), size)
        follows[i] = i > 0 and notes[i - 1, 0] == n


class Digester:
    """Makes the digests of one core's nodes, and numbers extra keys."""

    def __init__(self, store: ColumnStore, hash_fn: HashFn) -> None:
        """Use the fastest way to make the digests of `hash_fn`."""
        self._store = store
        self._hash_fn = hash_fn
        self._numbers: dict[ExtraKeys, int] = {}
        self._keys: list[ExtraKeys | None] = [None]
        self._spare_numbers: list[int] = []
        self._tail_bytes = 0
        self._library: Sha256 | None = None
        self._use_addresses()

    def keys_of(self, number: int) -> ExtraKeys | None:
        """Return the extra keys with this number."""
        return self._keys[number]

    def known_number(self, keys: ExtraKeys | None) -> int:
        """Return the number of extra keys, or -1 if they have none: nothing cached has them."""
        return self._numbers.get(keys, -1) if keys else 0

    def number_of(self, keys: ExtraKeys | None) -> int:
        """Return the number of extra keys, and give them one if they have none."""
        if not keys:
            return 0
        number = self._numbers.get(keys)
        if number is None:
            if not self._spare_numbers:
                self._spare_numbers.append(len(self._keys))
                self._keys.append(None)
            number = self._numbers[keys] = self._spare_numbers.pop()
            self._keys[number] = keys
            self._add_tail(number, canonical_cbor(keys))
        return number

    @property
    def num_keys(self) -> int:
        """How many extra keys have a number."""
        return len(self._numbers)

    def keep_only(self, used: set[int]) -> None:
        """Forget all extra keys except those with the numbers `used`, and reuse the other
        numbers."""
        self._store.columns.tail_at[:] = self._tail_bytes = 0
        for keys, n in list(self._numbers.items()):
            if n in used:
                self._add_tail(n, canonical_cbor(keys))
            else:
                del self._numbers[keys]
                self._keys[n] = None
                self._spare_numbers.append(n)

    def make(self, nodes: Any) -> None:
        """Make the digests that the nodes and their ancestors lack."""
        if not len(nodes):
            return
        c = self._store.columns
        if c.word[0] != BY_PYTHON:
            num_bytes = c.digest.shape[1] + 4 * c.tokens.shape[1] + int(c.tail_at[:, 1].max())
            buffer, words = np.empty(num_bytes, np.uint8), np.empty(2, np.uint64)
            _make_all(self._store.address, nodes, buffer, words, np.empty(len(c.node), np.int32))
            return
        node = c.node
        for n in nodes.tolist():
            way = []
            while not node.item(n, KEYS) & 1:
                way.append(n)
                n = node.item(n, PARENT)  # noqa: PLW2901
            for each in reversed(way):
                self._make_one(each)

    def set_root(self, n: int, digest: bytes) -> None:
        """Give a root the digest that precedes every first block."""
        c = self._store.columns
        c.digest[n] = np.frombuffer(digest, np.uint8)
        c.node[n, KEYS] = 1

    def _make_one(self, n: int) -> None:
        c = self._store.columns
        parent = BlockHash(c.digest[c.node[n, PARENT]].tobytes())
        keys = self._keys[int(c.node[n, KEYS]) >> 1]
        made = self._hash_fn.hash_block(parent, c.tokens[n].tobytes(), keys)
        c.digest[n] = np.frombuffer(made, np.uint8)
        c.node[n, KEYS] |= 1

    def _add_tail(self, number: int, data: bytes) -> None:
        c = self._store.columns
        if number >= len(c.tail_at):
            self._store.replace(tail_at=grown(c.tail_at, 2 * number + 16))
        start, self._tail_bytes = self._tail_bytes, self._tail_bytes + len(data)
        if self._tail_bytes > len(c.tail):
            self._store.replace(tail=grown(c.tail, 2 * self._tail_bytes))
        c = self._store.columns
        c.tail[start : self._tail_bytes] = np.frombuffer(data, np.uint8)
        c.tail_at[number] = start, len(data)

    def _use_addresses(self) -> None:
        """Find hash functions by address, and use them only if a test vector matches."""
        if IS_PLAIN:
            return
        word = self._store.columns.word
        try:
            if self._hash_fn.name == "sha256":
                self._library = Sha256()
                word[:] = self._library.words
            elif self._hash_fn.name == "xxh3_128":
                library = ctypes.CDLL(str(sys.modules["xxhash._xxhash"].__file__))
                word[:2] = XXH3, _address(library, "XXH3_128bits")
            else:
                return
        except (OSError, AttributeError, KeyError) as error:
            logger.info("digests are made by Python: %s", error)
            word[0] = BY_PYTHON
            return
        if not self._is_right():
            logger.warning(
                "digests are made by Python: %s, found by address, fails its test vector",
                self._hash_fn.name,
            )
            word[0] = BY_PYTHON
            return
        quick_chains.setdefault(self._hash_fn.name, partial(_chained, word.copy(), self._library))

    def _is_right(self) -> bool:
        """Check a digest against the package's own function."""
        parent = BlockHash(bytes(range(self._hash_fn.digest_bytes)))
        tokens = (np.arange(self._store.unit_tokens, dtype=np.int32) * 7919).tobytes()
        made = _chained(self._store.columns.word, self._library, parent, tokens, len(tokens), 1)
        return made == self._hash_fn.hash_block(parent, tokens)


def _chained(
    word: Any, library: Sha256 | None, parent: bytes, tokens: bytes, unit_bytes: int, count: int
) -> bytes:
    """Return the digests of `count` units, joined. `library` keeps the functions behind the
    addresses loaded."""
    digests = np.empty((count + 1, len(parent)), np.uint8)
    digests[0] = np.frombuffer(parent, np.uint8)
    buffer, words = np.empty(len(parent) + unit_bytes, np.uint8), np.empty(2, np.uint64)
    _chain(word, np.frombuffer(tokens, np.uint8), digests, buffer, words)
    return digests[1:].tobytes()
