"""Text as bytes, one token per byte: enough for models with at least 256 tokens.

An engine for real models passes another one to `Engine.launch`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Converts one sample's tokens to text, step by step."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens. An incomplete character is kept for the next call."""


class Tokenizer(Protocol):
    """Converts between text and tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`."""

    def detokenizer(self) -> Detokenizer:
        """Return the detokenizer of one sample."""


class ByteTokenizer:
    """UTF-8; ids from 256 on have no text."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())

    def detokenizer(self) -> Detokenizer:
        """Return a new decoder, which replaces invalid UTF-8."""
        return _ByteDetokenizer()


class _ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(bytes(token for token in token_ids if token < 256))
