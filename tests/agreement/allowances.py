"""Exactly what two cores may differ in, by the family of the workload. Everything else is equal.

Why there is anything at all: the reference core maps a digest to blocks, and keeps a second block
of a content as a *copy* of the first, cached and evictable like any other. A core whose cache is a
tree has one place per content. Whoever computes a content that has its place there holds a
*private* block, and gives it back empty when it goes.

    EXACT, EXACT_PRESSURE    No content is computed while another block holds it: every prompt ends
        in tokens of its own behind a prefix that is sealed and found by its look-up, a request is
        resumed only where nothing behind its hit is cached, every output token is unique.
        Nothing may differ: neither with room for all nor with evictions under LRU.
    DUPLICATES    Contents are computed twice, and there is room for all, so that nothing is ever
        evicted. Let *surplus* be the blocks of the reference core that hold a content which another
        block holds as well, held by somebody or cached. Then
        - free blocks differ by no more than surplus: private blocks are not kept, but what a
          request computes again stays held in the tree beside its own block until its step is
          complete, or until it has gone where others hold it too;
        - cached and sealed blocks are up to surplus fewer, and as many as there are contents;
        - references differ by no more than surplus;
        - labels name the same contents, each as often as there are cached blocks of it;
        - places that share a block may be others, and with them the leading blocks in common;
        - zeroed and copied blocks differ by no more than surplus;
        - of the states behind a request's newest one the tree's tables keep fewer: a state that has
          its place in the tree is private to who computes it again, and moves on with his next long
          forward, where the reference core has cached it as a copy.
        Hits, admissions, scheduled tokens, table shapes, events: equal. For that the owners of
        requests (each client, and the caller of single calls) have salts of their own: where two
        owners compute a content while a step of one is not complete, each block of the reference
        core is sealed by its own owner's step, but the one place in a tree by the step that made
        it, and so events and hits of others come earlier or later.
    DUPLICATES_PRESSURE    As surplus blocks take room in one core only, from the first eviction on
        hits and admissions differ. Each core walks alone: what it hits must be what its tokens
        demand, block by block, its labels, tables and events must be true, its books add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.agreement.configurations import Family

EQUAL_AS_SETS = frozenset({"labels"})
"""With duplicates: the same contents, of which there may be fewer blocks."""

WITHIN_SURPLUS = frozenset(
    {
        "free blocks",
        "core.num_cached_blocks",
        "core.num_sealed_blocks",
        "zeroed blocks",
        "copied blocks",
    }
)
"""With duplicates: figures that differ by surplus blocks at most."""

DIRECTION = {"core.num_cached_blocks": -1, "core.num_sealed_blocks": -1}
"""Of those, which may only be more (1) or fewer (-1) in the second core."""

MAY_BE_NULL = frozenset({"state tables"})
"""With duplicates: where the second core may have null for a block."""

NOT_COMPARED = frozenset(
    {"tenants", "blocks in use when reset", "sharing", "common prefix", "usage", "core.references"}
)
"""With duplicates: follows from which of several blocks of one content a table holds."""


def differences(
    family: Family, reference: Mapping[str, object], other: Mapping[str, object], surplus: int
) -> list[str]:
    """Return what is not allowed between the facts of two cores, a line each."""
    if reference.keys() != other.keys():
        return [f"facts {sorted(reference.keys() ^ other.keys())} on one side only"]
    surplus += _num_unsealed(reference)
    return [
        f"{name}:\n    {_short(reference[name], other[name])}"
        for name in reference
        if not _is_allowed(family, name, reference[name], other[name], surplus)
    ]


def _num_unsealed(facts: Mapping[str, object]) -> int:
    """Return how many cached blocks wait for their forward: no bytes tell them from others yet."""
    cached, sealed = facts.get("core.num_cached_blocks"), facts.get("core.num_sealed_blocks")
    return cached - sealed if isinstance(cached, int) and isinstance(sealed, int) else 0


def _is_allowed(family: Family, name: str, one: object, two: object, surplus: int) -> bool:
    if one == two:
        return True
    if family.is_unique:
        return False
    if name in NOT_COMPARED:
        return True
    if name in EQUAL_AS_SETS and isinstance(one, Mapping) and isinstance(two, Mapping):
        return set(one) == set(two) and all(two[key] <= one[key] for key in one)
    if name in MAY_BE_NULL and isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(_has_less(one[key], two[key]) for key in one)
    if name in WITHIN_SURPLUS and isinstance(one, int) and isinstance(two, int):
        difference = two - one
        is_right_way = difference * DIRECTION.get(name, difference) >= 0
        return is_right_way and abs(difference) <= surplus
    return False


def _has_less(one: list[list[bool]], two: list[list[bool]]) -> bool:
    """Say whether tables are equally long, and the second has no block where the first has none."""
    return [len(table) for table in one] == [len(table) for table in two] and all(
        kept >= other
        for table, others in zip(one, two, strict=True)
        for kept, other in zip(table, others, strict=True)
    )


def _short(one: object, two: object) -> str:
    """Say what is on one side only, as far as that can be said shortly."""
    if isinstance(one, Counter) and isinstance(two, Counter):
        return f"reference only {one - two}\n    other only {two - one}"
    if isinstance(one, set) and isinstance(two, set):
        return f"reference only {one - two}\n    other only {two - one}"
    if isinstance(one, dict) and isinstance(two, dict):
        keys = [key for key in one | two if one.get(key) != two.get(key)]
        return "\n    ".join(f"{key}: {one.get(key)} and {two.get(key)}" for key in keys)
    return f"{one} and {two}"
