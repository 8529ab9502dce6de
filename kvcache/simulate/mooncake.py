"""Mooncake's trace format as a workload: one JSON object per line, plain or gzip.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}

A hash id stands for a block of 512 tokens and all blocks before it; the last one of a line may be
partial. Lines of our own have the number of tokens if it is another (`"block_size": 16`), and may
name a tenant and hints (`"hints": [{"returns_in_s": 4.2}]`, the fields of `CacheHint`). Token ids
are made from the hash ids, so that two requests share exactly the blocks that the trace says. Reads
line by line, keeps nothing, and refuses an inconsistent line by number.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import RequestError, TraceError
from kvcache.requests.hints import CacheHint, hints_from_plain
from kvcache.simulate.tokens import block_token_ids
from kvcache.simulate.workload import WorkloadRequest

MOONCAKE_BLOCK_SIZE = 512
"""Tokens that one hash id stands for."""

TRACE_ENDS = (".jsonl", ".jsonl.gz")
"""Suffixes of trace files; other files are texts."""

_LARGEST_HASH_ID = 2**63 - 1
_MOST_TOKENS = 2**31 - 1
_LARGEST_TIMESTAMP_MS = 2**53  # floats are exact up to here
_LONGEST_LINE = 1 << 27  # at least four million hash ids
_GZIP_MAGIC = b"\x1f\x8b"
_Lines: TypeAlias = "BinaryIO | gzip.GzipFile"


@dataclass(frozen=True)
class MooncakeLine:
    """One line; `number` counts from 1. `hash_ids` names the prompt's blocks, including a partial
    last one. `block_size` is None if the line has none."""

    number: int
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: Sequence[int]
    block_size: int | None = None
    tenant: str | None = None
    hints: tuple[CacheHint, ...] = ()

    def to_json(self) -> bytes:
        """Return the line, with its line break; without a `block_size` that is the default."""
        values: dict[str, object] = {
            "timestamp": self.timestamp_ms,
            "input_length": self.input_length,
            "output_length": self.output_length,
            "hash_ids": list(self.hash_ids),
        }
        if self.block_size not in {None, MOONCAKE_BLOCK_SIZE}:
            values["block_size"] = self.block_size
        if self.tenant is not None:
            values["tenant"] = self.tenant
        if self.hints:
            values["hints"] = [_plain(hint) for hint in self.hints]
        return json.dumps(values, separators=(",", ":")).encode() + b"\n"


_NO_HINT = {field.name: field.default for field in fields(CacheHint)}


def _plain(hint: CacheHint) -> dict[str, object]:
    """Return the fields of a hint that it has."""
    return {name: value for name, value in asdict(hint).items() if value != _NO_HINT[name]}


class MooncakeTrace:
    """The trace in the file at `path`; gzip is recognised by its content.

    `block_size` None: that of the first line, by default 512. Raises TraceError at once if the file
    cannot be opened, and while iterating for an invalid line; the message names the file and the
    line.
    """

    def __init__(self, path: Path, block_size: int | None = None) -> None:
        if block_size is not None and block_size < 1:
            raise TraceError(
                f"{path}: {block_size} tokens per hash id: give at least 1 "
                f"(Mooncake's traces have {MOONCAKE_BLOCK_SIZE})"
            )
        self.path = path
        self._is_compressed = False
        with closing(self._open()):
            pass
        self._block_size = self._said_block_size() if block_size is None else block_size

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def num_requests(self) -> int | None:
        """Unknown before the file has been read."""
        return None

    @property
    def total_input_tokens(self) -> int | None:
        """Unknown before the file has been read."""
        return None

    @property
    def block_size(self) -> int:
        """Tokens that one hash id stands for."""
        return self._block_size

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield one request per line; empty lines are skipped."""
        return map(self._request, self.lines())

    def lines(self) -> Iterator[MooncakeLine]:
        """Yield the lines themselves; skips empty ones. Raises as iterating does."""
        for line in self._checked_lines():
            if line.block_size not in {None, self._block_size}:
                raise self._broken(
                    line.number,
                    f"has block_size {line.block_size}, this trace is read with {self._block_size}",
                )
            expected = -(-line.input_length // self._block_size)
            if len(line.hash_ids) != expected:
                raise self._broken(
                    line.number,
                    f"has {len(line.hash_ids)} hash_ids, but {line.input_length} input tokens take "
                    f"{expected} blocks of {self._block_size}",
                )
            yield line

    def _said_block_size(self) -> int:
        """Return the block size of the first line; errors are raised when the line is read."""
        with suppress(TraceError):
            first = next(self._checked_lines(), None)
            if first is not None and first.block_size is not None:
                return first.block_size
        return MOONCAKE_BLOCK_SIZE

    def _checked_lines(self) -> Iterator[MooncakeLine]:
        with closing(self._open()) as file:
            number = 0
            while True:
                number += 1
                text = self._read_line(file, number)
                if not text:
                    return
                if text.strip():
                    yield self._parse(number, text)

    def _open(self) -> _Lines:
        try:
            file = self.path.open("rb")
            magic = file.read(len(_GZIP_MAGIC))
            file.seek(0)
        except OSError as error:
            raise TraceError(
                f"{self.path}: cannot be read ({error.strerror or error}): name a Mooncake trace"
            ) from error
        if magic != _GZIP_MAGIC:
            return file
        file.close()
        self._is_compressed = True
        return gzip.open(self.path, "rb")

    def _read_line(self, file: _Lines, number: int) -> bytes:
        try:
            text = file.readline(_LONGEST_LINE + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(
                f"{self.path}, line {number}: the compressed file breaks off or is damaged "
                f"({error}): fetch it again"
            ) from error
        if len(text) > _LONGEST_LINE:
            raise self._broken(number, f"has more than {_LONGEST_LINE} bytes")
        return text

    def _parse(self, number: int, text: bytes) -> MooncakeLine:
        fail = partial(self._broken, number)
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            damaged = ", or the compressed file is damaged" if self._is_compressed else ""
            raise fail(f"is not JSON ({error}){damaged}") from error
        if not isinstance(values, dict):
            raise fail(f"holds {_shown(values)}, not an object")
        input_length = _count(values, "input_length", 1, fail)
        output_length = _count(values, "output_length", 0, fail)
        hash_ids = _hash_ids(values, fail)
        block_size = _count(values, "block_size", 1, fail) if "block_size" in values else None
        timestamp = values.get("timestamp", 0)
        if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
            raise fail(f"has timestamp {_shown(timestamp)}, not a number")
        if not 0 <= timestamp <= _LARGEST_TIMESTAMP_MS:
            raise fail(
                f"has timestamp {_shown(timestamp)}, not a number in 0 to {_LARGEST_TIMESTAMP_MS}"
            )
        tenant = values.get("tenant")
        if tenant is not None and not (isinstance(tenant, str) and tenant):
            raise fail(f"has tenant {_shown(tenant)}, not a name")
        hints: tuple[CacheHint, ...] = ()
        if "hints" in values:
            try:
                hints = hints_from_plain("the line", values["hints"])
            except RequestError as error:
                raise fail(f"has hints that are not valid ({error})") from error
        return MooncakeLine(
            number, timestamp, input_length, output_length, hash_ids, block_size, tenant, hints
        )

    def _request(self, line: MooncakeLine) -> WorkloadRequest:
        return WorkloadRequest(
            request_id=f"line-{line.number}",
            num_prompt_tokens=line.input_length,
            num_output_tokens=line.output_length,
            make_token_ids=partial(_prompt, line.hash_ids, line.input_length, self._block_size),
            arrival_s=line.timestamp_ms / 1000,
            tenant=line.tenant,
            hints=line.hints,
        )

    def _broken(self, number: int, what: str) -> TraceError:
        return TraceError(f"{self.path}, line {number}: {what}: repair or remove the line")


def _prompt(hash_ids: Sequence[int], input_length: int, block_size: int) -> Int32Array:
    return block_token_ids(np.array(hash_ids, np.int64), block_size)[:input_length]


def _count(
    values: dict[str, object], key: str, at_least: int, fail: Callable[[str], TraceError]
) -> int:
    """Return a whole number of at least `at_least`, an int32; raises the error of `fail`."""
    if key not in values:
        raise fail(f"has no {key}")
    value = values[key]
    if type(value) is not int:
        raise fail(f"has {key} {_shown(value)}, not a whole number")
    if value < at_least:
        raise fail(f"has {key} {_shown(value)}, below {at_least}")
    if value > _MOST_TOKENS:
        raise fail(f"has {key} {_shown(value)}, above {_MOST_TOKENS}")
    return value


def _hash_ids(values: dict[str, object], fail: Callable[[str], TraceError]) -> tuple[int, ...]:
    if "hash_ids" not in values:
        raise fail("has no hash_ids")
    ids = values["hash_ids"]
    if not isinstance(ids, list):
        raise fail(f"has hash_ids {_shown(ids)}, not a list")
    for value in ids:
        if type(value) is not int:
            raise fail(f"has hash id {_shown(value)}, not a whole number")
        if not 0 <= value <= _LARGEST_HASH_ID:
            raise fail(f"has hash id {_shown(value)}, not in 0 to {_LARGEST_HASH_ID}")
    return tuple(ids)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
