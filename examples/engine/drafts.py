"""Guesses the next tokens from the sequence itself: those that followed the same n-gram before.

Needs no model. A wrong guess costs a position of a forward, a right one saves a forward.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_MATCH = 3
"""Longest n-gram at the end to look for; if it is not found, shorter ones are tried."""


def propose(tokens: Sequence[int], most: int) -> tuple[int, ...]:
    """Return at most `most` tokens that followed the last occurrence of the sequence's end."""
    if most <= 0:
        return ()
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        end = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == end:
                return tuple(tokens[start + length : start + length + most])
    return ()
