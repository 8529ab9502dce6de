"""A group's rule: the few numbers of its spec that compiled functions read.

A rule is an int32 array; the names below are its entries. The column `group` has one rule per
group; `rule_of` makes it from a spec.
"""

from __future__ import annotations

SIZE, LENGTH, KIND, SPAN, COLUMN, EXTRA, NUM_ENTRIES = range(7)
"""Tokens and units of a block; the kind; the tokens of its window or chunk. A table has one column
for every COLUMN tokens, and EXTRA more."""

FULL, WINDOW, CHUNK, STATE, ENCODER = range(5)
"""Kinds of groups."""

NEVER = (1 << 31) - 1
"""More tokens than any row has."""
