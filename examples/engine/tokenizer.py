"""Text as bytes, a token each: enough for models of 256 tokens and more.

An engine for real models passes another one to `Engine.launch`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Makes text of one sample's tokens as they come."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens add. An incomplete letter is kept for the next call."""


class Tokenizer(Protocol):
    """Between text and tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`."""

    def detokenizer(self) -> Detokenizer:
        """Return what makes the text of one sample."""


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
