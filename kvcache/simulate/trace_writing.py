"""Writes traces in Mooncake's format.

A line per request, as `mooncake.py` reads it. A file whose name ends with .gz is compressed; the
same requests give the same bytes. Block ids are numbers in order of appearance: they show which
requests share blocks, but not their content.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, cast

from kvcache.base.errors import TraceError
from kvcache.requests.hints import CacheHint
from kvcache.simulate.generators import SyntheticWorkload
from kvcache.simulate.mooncake import MOONCAKE_BLOCK_SIZE, TRACE_ENDS
from kvcache.simulate.passages import BlockNames


@dataclass(frozen=True)
class TraceLine:
    """One request of a trace. `block_ids` names its blocks, including a partial last one.

    The line has a `block_size` unless it is the readers' default, and `hints` if there are any.
    """

    timestamp_ms: int
    input_length: int
    output_length: int
    block_ids: Sequence[int]
    tenant: str | None = None
    block_size: int = MOONCAKE_BLOCK_SIZE
    hints: tuple[CacheHint, ...] = ()

    def to_json(self) -> bytes:
        """Return the line, with its line break."""
        values: dict[str, object] = {
            "timestamp": self.timestamp_ms,
            "input_length": self.input_length,
            "output_length": self.output_length,
            "hash_ids": list(self.block_ids),
        }
        if self.block_size != MOONCAKE_BLOCK_SIZE:
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


def trace_lines(
    workload: SyntheticWorkload, block_size: int = MOONCAKE_BLOCK_SIZE
) -> Iterator[TraceLine]:
    """Yield the lines of a workload's trace."""
    names = BlockNames(block_size)
    for request in workload.script():
        yield TraceLine(
            timestamp_ms=int(request.arrival_s * 1000),
            input_length=request.num_prompt_tokens,
            output_length=request.num_output_tokens,
            block_ids=names.name(request.passages),
            block_size=block_size,
            hints=request.hints,
        )


def require_trace_name(path: Path) -> None:
    """Raise TraceError unless readers will recognise the file as a trace by its name."""
    if not path.name.endswith(TRACE_ENDS):
        raise TraceError(
            f"{path}: names of traces end with {' or '.join(TRACE_ENDS)}, others are read as text: "
            "name it so"
        )


def write_trace(path: Path, lines: Iterable[TraceLine]) -> int:
    """Write a trace and return its number of lines. Raises TraceError if that fails."""
    require_trace_name(path)
    try:
        with _created(path) as file:
            num_lines = 0
            for line in lines:
                file.write(line.to_json())
                num_lines += 1
            return num_lines
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be written ({error.strerror or error}): name a file in a directory "
            "that exists"
        ) from error


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    with path.open("wb") as plain:
        if path.suffix != ".gz":
            yield plain
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=plain, mtime=0) as packed:
            yield cast(BinaryIO, packed)  # only its type differs
