"""One sequence of a batch, as the cache sees it.

columns of the batch     0 . . pad . . . . . . . . . . length
tokens of the row              0 . . . . . . . . . . .
                               | confirmed | drafts  | known ahead (the prompt it was opened with)
                               |<---- num_held ----->|
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.requests.request import Request


@dataclass
class Row:
    """A row of the batch. `request.num_computed_tokens` are confirmed: never taken back by a crop.

    Attributes:
        request: its tokens and, once it is seated, its blocks.
        pad: columns before its first token.
        num_held: tokens [0, n) whose keys and values are in blocks; drafts included.
        num_known: tokens [0, n) that are what they are; those of a forward that failed are not.
        num_published: tokens [0, n) of `num_held` that lie in blocks which others can find.
    """

    request: Request
    pad: int
    num_held: int = 0
    num_known: int = 0
    num_published: int = 0

    def tokens_at(self, length: int) -> int:
        """How many of its tokens lie in the first `length` columns."""
        return max(0, length - self.pad)
