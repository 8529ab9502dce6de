"""Guesses at what comes next, from the sequence itself: what followed the same words before.

Costs no model. A wrong guess costs a position of a forward, a right one saves a forward.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_MATCH = 3
"""Tokens at the end that must have been there before; shorter ones are tried when they were not."""


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
