"""The protocol of eviction policies: an order over the entries that are not in use.

A policy serves the pool or a tier, which knows contents and references. It sees only opaque
entries. An entry is a block, or a slot of a tier. The policy proposes victims; the pool or tier
decides, and gives back those that must stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from xxhash import xxh3_64_intdigest

from kvcache.base.arrays import IndexArray, index_array
from kvcache.policies.entry_queue import Entries


@dataclass(frozen=True)
class EntryInfo:
    """What a policy may know of an entry.

    `parent` is the entry before it in its prefix (None for a first one, and while the parent is in
    use). `num_children` counts the cached contents that continue it; while there are any, it is no
    victim. `content` identifies the content even after its eviction, for policies with a memory;
    None if the caller does not name contents. Equal contents of several namespaces may have the
    same name.
    """

    parent: int | None = None
    content: bytes | None = None
    num_children: int = 0


class EntryTable(Protocol):
    """Answers a policy's questions about entries. Asking changes nothing."""

    def describe(self, entry: int) -> EntryInfo:
        """Return the data of an inserted entry."""


def columns_of(table: EntryTable, entries: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Return the names and parents of inserted entries, by `describe_all` of a table that has it.

    A name is a hash of the content, at least 0; without a content it is below 0, and of the entry
    itself. A parent is -1 if there is none.
    """
    if describe_all := getattr(table, "describe_all", None):
        columns: tuple[IndexArray, IndexArray] = describe_all(entries)
        return columns
    infos = [table.describe(entry) for entry in entries.tolist()]
    names = [
        -1 - entry if info.content is None else xxh3_64_intdigest(info.content) >> 1
        for entry, info in zip(entries.tolist(), infos, strict=True)
    ]
    parents = [-1 if info.parent is None else info.parent for info in infos]
    return index_array(names), index_array(parents)


class EvictionPolicy(Protocol):
    """An order over unused entries. For one pool or tier, in one thread.

    Entries are ints from 0 to below the policy's capacity. An entry is *inserted* while it is not
    in use; it is removed when it is used again or loses its content. An entry that comes out of use
    again is recognised by its content's name or, without names, by its number; meanwhile the number
    may have been given to another content. Arrays of entries are not checked: the caller has
    validated them.

    No entry is chosen before its children (`EntryInfo.num_children`), unless only such entries are
    left: the caller then puts it back, or drops the children too. A policy that evicts in the order
    of insertion need not ask, because callers insert children before parents.
    """

    @property
    def reads_contents(self) -> bool:
        """Whether it reads `EntryInfo.content`: callers then name contents."""

    def __len__(self) -> int:
        """Return the number of inserted entries."""

    def __contains__(self, entry: object) -> bool:
        """Return whether an entry is inserted."""

    def insert(self, entries: Entries) -> None:
        """Insert entries that have just come out of use; among equals the first is evicted first.

        None of them is inserted already.
        """

    def remove(self, entries: Entries) -> None:
        """Remove entries that are used again. All of them are inserted."""

    def discard(self, entries: Entries) -> None:
        """Remove entries whose content is dropped. All of them are inserted."""

    def choose(self, num_entries: int) -> Entries:
        """Remove and return up to `count` victims, the first one first."""

    def put_back(self, entries: Entries) -> None:
        """Return chosen entries that must stay to their places, in order.

        Call it before any entry is inserted or removed.
        """

    def order(self) -> list[int]:
        """Return all inserted entries, the next victim first. For audits; changes nothing."""


@runtime_checkable
class LooksAhead(Protocol):
    """A policy that can name the next victims without choosing, which is slow with a memory."""

    def look_ahead(self, num_entries: int) -> list[int]:
        """Return the first `num_entries` of each line of the policy, the next victim first. Unless
        lines are more than queues, the next victims are among them. Changes nothing. An entry costs
        O(log n) amortised when it comes near the end of its line, and almost nothing when it is
        returned again.
        """
