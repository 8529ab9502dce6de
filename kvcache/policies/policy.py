"""What an eviction policy is: it orders the entries that are not in use, and says which goes first.

Serves a pool, or a tier below it, which knows contents and references. A policy sees opaque
entries only. One entry is a block, or a slot of a tier. Refuses to evict: it
proposes, the owner of the bytes decides, and gives back what must stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvcache.policies.entry_queue import Entries


@dataclass(frozen=True)
class EntryInfo:
    """What a policy may know of an entry.

    `parent` is the entry it continues (None for a first one, and while that is in use).
    `num_children` counts the cached contents that cannot outlive it: while there are any it is no
    victim. `content` names what it holds beyond its own life, for policies that remember what was
    used and what they evicted; None: the owner names nothing. Equal contents of several namespaces
    may share a name.
    """

    parent: int | None = None
    content: bytes | None = None
    num_children: int = 0


class EntryBook(Protocol):
    """Where a policy asks about entries. The owner answers; asking changes nothing."""

    def describe(self, entry: int) -> EntryInfo:
        """Say what is known of an entry that was inserted."""


class EvictionPolicy(Protocol):
    """An order over unused entries. One owner, one thread.

    Entries are ints from 0 to below the capacity the policy was made with. An entry is *inserted*
    while it is not in use; using it again, or losing its content, removes it. What was used and
    comes out of use again is known by its content, or, where the owner names none, by its entry;
    the entry of a content in use may be given to another meanwhile. Arguments are trusted where
    they come in bulk: the owner has validated them.

    No entry is given out before its children, of which `EntryInfo.num_children` tells, unless
    nothing else is left: then the owner puts it back, or forgets the children too. A policy that
    evicts in the order of insertion need not ask: owners insert children before parents.
    """

    @property
    def reads_contents(self) -> bool:
        """Whether it tells contents apart: the owner then names them."""

    def __len__(self) -> int:
        """Return how many entries are inserted."""

    def __contains__(self, entry: object) -> bool:
        """Say whether an entry is inserted."""

    def insert(self, entries: Entries) -> None:
        """Take entries that have just come out of use; of equal ones the first goes first.

        None of them is inserted already.
        """

    def remove(self, entries: Entries) -> None:
        """Take entries out, because they are used again. All of them are inserted."""

    def discard(self, entries: Entries) -> None:
        """Take entries out, because their content is forgotten. All of them are inserted."""

    def choose(self, num_entries: int) -> Entries:
        """Take out and return what to evict, the first one first; less if there is less."""

    def put_back(self, entries: Entries) -> None:
        """Return entries from `choose` that must stay for now to where they were, in order.

        Before any entry is inserted or removed.
        """

    def order(self) -> list[int]:
        """Return all inserted entries, the next victim first. For audits; changes nothing."""


@runtime_checkable
class LooksAhead(Protocol):
    """A policy that knows who may go next without choosing, which is dear where there is a past."""

    def look_ahead(self, num_entries: int) -> list[int]:
        """Return the first `num_entries` of each line that the policy has, the next first: unless
        lines are more than queues, the next victims are among them. Nothing is chosen, the order is
        the same afterwards. An entry costs O(log n) amortised when it comes so near the end of its
        line, and next to nothing when it is returned again.
        """
