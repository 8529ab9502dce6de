"""Writes traces in Mooncake's format.

A line per request, as `mooncake.py` reads it. A file whose name ends with .gz is compressed; the
same requests give the same bytes. Block ids are numbers in order of appearance: they show which
requests share blocks, but not their content.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from kvcache.base.errors import TraceError
from kvcache.simulate.generators import SyntheticWorkload
from kvcache.simulate.mooncake import MOONCAKE_BLOCK_SIZE, TRACE_ENDS, MooncakeLine
from kvcache.simulate.passages import BlockNames


def trace_lines(
    workload: SyntheticWorkload, block_size: int = MOONCAKE_BLOCK_SIZE
) -> Iterator[MooncakeLine]:
    names = BlockNames(block_size)
    for number, request in enumerate(workload.script(), start=1):
        yield MooncakeLine(
            number,
            timestamp_ms=int(request.arrival_s * 1000),
            input_length=request.num_prompt_tokens,
            output_length=request.num_output_tokens,
            hash_ids=names.name(request.passages),
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


def write_trace(path: Path, lines: Iterable[MooncakeLine]) -> int:
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
