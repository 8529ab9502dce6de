"""The names of the columns' entries, in capitals: `c.block[b, REF]` is block `b`'s reference count.

The modules of the core import all of them. `columns.py` has the picture.
"""

from __future__ import annotations

REF, PREV, NEXT, NODE = range(4)
"""Columns of a block: its reference count, its neighbours in the free list, its node."""

PARENT, CHILD, CHILDREN, ROWS, KEYS, BLOCK, OWNER = range(7)
"""Columns of a node. CHILD is one child, found without a search. ROWS counts the rows whose newest
node it is. KEYS is twice the number of its extra keys, plus 1 once it has its digest. BLOCK and
OWNER of group `g` are `2 * g` further."""

UNITS, LAST, ROOT, FLAGS, DUPLICATES, CAPACITY, SKIP_AT, GENERATION = range(8)
FIRST_KEYS, OTHER_KEYS, COLUMNS, KEPT = range(8, 12)
"""Columns of a row:

    UNITS LAST ROOT             its units in the tree, its newest node, its namespace's root
    FLAGS                       see IS_OPEN
    DUPLICATES                  its own blocks whose content the tree has in another block
    CAPACITY                    the number of tokens that it has slots for
    SKIP_AT                     the number of computed tokens at which it skips a block
    GENERATION                  how many requests had this row before
    FIRST_KEYS OTHER_KEYS       extra keys of its first unit, and of later ones without items
    COLUMNS KEPT                the length of its table, and how many leading columns are null;
                                those of group `g` are `2 * g` further
"""

OWN_END, LAST_END, ACCEPTED, NUM_ENCODER, ENDS = range(5)
"""Columns of `forward`, about a row's forwards: the number of own tokens at which the reserved
forward ends; the same of the previous forward (-1: there was none), and how many of its drafts were
accepted; the number of encoder tokens. From ENDS on, one entry per unit: whether the own tokens of
a forward ended with that unit."""

IS_OPEN, NO_CACHING, IS_SHARING, HAS_ITEMS = 1, 2, 4, 8
"""Flags of a row: it is in use; it caches nothing more; it may write blocks that others reference;
it has multimodal items."""

(
    FREE, BLANK, NEXT_NODE, SPARE_NODE, NUM_SPARE, SERIAL, SEALED_BELOW, EVICTED, SEED, NUM_INDEXED,
    NUM_CHANGES, NUM_IDS, NUM_NOTES, NUM_GONE, NUM_MOVED, STEP_TOKENS, IS_EAGLE, NUM_PREFIX_GROUPS,
    HAS_POLICY, LOGS_GONE, IS_FULL, OPENED, ROOM, HAS_GAPS, EVICTS, LOGS_USES, NUM_NUMBERS,
) = range(27)  # fmt: skip
"""Entries of `number`:

    FREE BLANK                  free blocks; those of them without content
    NEXT_NODE                   the first node that was never used
    SPARE_NODE NUM_SPARE        the list of nodes given back, and its length
    SERIAL SEALED_BELOW         the open step's serial (0: none); all serials below are sealed
    EVICTED                     blocks evicted so far
    SEED NUM_INDEXED            the secret seed of hashes in `index`; its number of entries
    NUM_CHANGES .. NUM_MOVED    lengths of the logs `change`, `ids`, `note`, `gone` and `moved`
    STEP_TOKENS IS_EAGLE        hits are a multiple of so many tokens; hits drop their last block
    NUM_PREFIX_GROUPS           groups that read the whole prefix
    HAS_POLICY                  a policy orders cached blocks (2: one per tenant; 3: with hints)
    LOGS_GONE                   forgotten contents are logged in `gone`
    IS_FULL                     a log was too short
    OPENED                      the first serial of the open step
    ROOM                        with tenants: how many more blocks the served one may reference
    HAS_GAPS                    a block of a prefix group may be referenced without those before it
    EVICTS                      the address of a function that lets the policy evict blocks
    LOGS_USES                   contents have names, and uses are logged while LRU evicts: so many
                                at least for one call of the policy
"""

INSERTED, REMOVED, DISCARDED, BLANKED = range(4)
"""Entries of `moved`, which a policy is told: a cached block became unused; it is used again; its
content was forgotten. With tenants or hints also: a block without content became free. While LRU
evicts, only INSERTED is logged, or REMOVED if the block was unused before with the same content."""

WAS_UNUSED = -1
"""PREV of a block in use that was in the free list with the same content."""

NUM_STEPS = 4096
"""How many serials may be open at once; a power of two."""

AGE_BOUNDS, AT_HIT, AT_EVICTION = range(3)
"""Lines of `ages`. The first has the upper bounds in seconds, the last one infinite, and then the
current time. The other two count cached blocks by their age when they were hit, and when they were
evicted; their last entry is the sum of the ages in seconds."""
