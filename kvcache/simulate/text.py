"""Real text as a workload: several questions about each document.

A token is a byte of the file, shifted by a few reserved ids. A document is cut into parts that fit
into a prompt; every part gets the same questions, after one instruction:

    [instruction][part 1][question 1]      all prompts share the instruction,
    [instruction][part 1][question 2]      a part's questions share it
    [instruction][part 2][question 1]

Files are read when their turn comes, as bytes, whatever their encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import TraceError
from kvcache.simulate.workload import WorkloadRequest

NUM_RESERVED_TOKENS = 3
"""Ids below this one are not bytes: 0 padding, 1 begin, 2 separator."""

_BEGIN = 1
_SEPARATOR = 2
_SNIFFED_BYTES = 4096


@dataclass(frozen=True)
class ReadingOptions:
    """How documents become prompts. `part_tokens`: most tokens of a document in one prompt.

    Raises TraceError for a number below 1, or no question.
    """

    part_tokens: int = 8_192
    num_output_tokens: int = 64
    instruction: str = (
        "You read a passage and answer one question about it. Use only what the passage says, "
        "quote it where that helps, and say so when it does not answer the question."
    )
    questions: tuple[str, ...] = (
        "What is this passage about, in two sentences?",
        "Which names, numbers and dates does the passage mention?",
    )

    def __post_init__(self) -> None:
        for name in ("part_tokens", "num_output_tokens"):
            if getattr(self, name) < 1:
                raise TraceError(f"text: {name} is {getattr(self, name)}: give at least 1")
        if not self.questions:
            raise TraceError("text: no questions to ask: give at least one")


@dataclass(frozen=True)
class _Document:
    path: Path
    name: str
    num_bytes: int


class TextDocuments:
    """The text files at `path`: one file, or all of a directory, sorted by name.

    Searches directories recursively; leaves out hidden, empty and binary files (with a zero byte
    near the start).

    Raises TraceError if the path does not exist, cannot be read, or has no text.
    """

    def __init__(self, path: Path, options: ReadingOptions | None = None) -> None:
        self.path = path
        self.options = ReadingOptions() if options is None else options
        self._documents = _find_documents(path)

    @property
    def name(self) -> str:
        """The path of the text."""
        count = len(self._documents)
        return f"{self.path} ({count:,} text file{'s' if count > 1 else ''})"

    @property
    def num_requests(self) -> int:
        """One request per part and question."""
        parts = sum(
            -(-document.num_bytes // self.options.part_tokens) for document in self._documents
        )
        return parts * len(self.options.questions)

    @property
    def total_input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        questions = self.options.questions
        framing = sum(len(self._head()) + len(_question_tokens(question)) for question in questions)
        num_bytes = sum(document.num_bytes for document in self._documents)
        return num_bytes * len(questions) + framing * (self.num_requests // len(questions))

    @property
    def block_size(self) -> int:
        """Tokens per block by default."""
        return 16

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield the requests, document by document. Raises TraceError if a file has changed."""
        for document in self._documents:
            try:
                content = document.path.read_bytes()
            except OSError as error:
                raise _unreadable(document.path, error) from error
            if len(content) != document.num_bytes:
                raise TraceError(
                    f"{document.path}: {len(content)} bytes now, {document.num_bytes} when the "
                    "workload was opened: leave files alone while they are played"
                )
            yield from self._requests(document, content)

    def _requests(self, document: _Document, content: bytes) -> Iterator[WorkloadRequest]:
        size = self.options.part_tokens
        for part_index, start in enumerate(range(0, len(content), size)):
            passage = byte_token_ids(content[start : start + size])
            for index, question in enumerate(self.options.questions):
                parts = (self._head(), passage, _question_tokens(question))
                yield WorkloadRequest(
                    request_id=f"{document.name}#{part_index + 1}.{index + 1}",
                    num_prompt_tokens=sum(len(part) for part in parts),
                    num_output_tokens=self.options.num_output_tokens,
                    make_token_ids=partial(np.concatenate, parts),
                )

    def _head(self) -> Int32Array:
        instruction = byte_token_ids(self.options.instruction.encode())
        return np.concatenate(([_BEGIN], instruction, [_SEPARATOR])).astype(np.int32)


def byte_token_ids(content: bytes) -> Int32Array:
    """Return one token per byte, after the reserved ids."""
    return np.add(np.frombuffer(content, np.uint8), NUM_RESERVED_TOKENS, dtype=np.int32)


def _question_tokens(question: str) -> Int32Array:
    return np.concatenate(([_SEPARATOR], byte_token_ids(question.encode()))).astype(np.int32)


def _find_documents(path: Path) -> Sequence[_Document]:
    try:
        if not path.exists():
            raise TraceError(f"{path}: no such file or directory: name a text file or a directory")
        if path.is_dir():
            documents = list(_walk(path))
        else:
            documents = [_Document(path, path.name, path.stat().st_size)]
    except OSError as error:
        raise _unreadable(path, error) from error
    documents = [document for document in documents if document.num_bytes]
    if not documents:
        raise TraceError(f"{path}: no text in there: name a text file or a directory of them")
    return documents


def _walk(directory: Path) -> Iterator[_Document]:
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        with path.open("rb") as file:
            if b"\0" in file.read(_SNIFFED_BYTES):
                continue
        yield _Document(path, relative.as_posix(), path.stat().st_size)


def _unreadable(path: Path, error: OSError) -> TraceError:
    return TraceError(f"{path}: cannot be read ({error.strerror or error}): check the permissions")
