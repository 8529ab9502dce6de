"""A small cache that owns entries as a pool does, and answers its policy's questions.

Requests use contents along a tree: cached ones are removed from the policy, the others get entries,
for which room is made if needed. Leaf first: the cache drops no content that another continues.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvcache.policies import EntryInfo, EntryTable, EvictionPolicy
from tests.policies.slow import SlowPolicy
from tests.walks import Operation, random_walk

NAME_BYTES = 4


@dataclass
class Content:
    """A content, its parent, and its place."""

    number: int
    parent: Content | None
    entry: int | None = None
    num_users: int = 0
    children: list[Content] = field(default_factory=list)

    @property
    def num_cached_children(self) -> int:
        return sum(child.entry is not None for child in self.children)

    def path(self) -> list[Content]:
        return [*(self.parent.path() if self.parent else []), self]


class Cache:
    """Entries, contents and users; two policies that must agree, the second one slow."""

    def __init__(
        self,
        rng: random.Random,
        make: Callable[[int, EntryTable], EvictionPolicy],
        make_slow: Callable[[int, EntryTable], SlowPolicy],
        *,
        capacity: int,
        has_names: bool = True,
    ) -> None:
        self.rng = rng
        self.capacity = capacity
        self.has_names = has_names
        self.contents = self._draw_contents(3 * capacity)
        self.held_by: dict[int, Content] = {}
        self.users: list[list[Content]] = []
        self.policy = make(capacity, self)
        self.slow = make_slow(capacity, self)

    # --- the entry table ---

    def describe(self, entry: int) -> EntryInfo:
        content = self.held_by[entry]
        parent = content.parent
        return EntryInfo(
            parent=None if parent is None else parent.entry,
            content=content.number.to_bytes(NAME_BYTES, "big") if self.has_names else None,
            num_children=content.num_cached_children,
        )

    # --- operations ---

    def walk(self, num_operations: int) -> None:
        """Apply operations, and compare both policies after each."""
        operations: dict[Operation, float] = {
            self.use: 8,
            self.release: 8,
            self.forget: 1,
            self.forget_in_use: 0.5,
            self.try_evicting: 2,
        }
        random_walk("of a cache", self.rng, operations, num_operations, self.compare)

    def use(self) -> None:
        """Let a request use a content and all that it continues."""
        path = self.rng.choice(self.contents).path()
        found = [content for content in path if content.entry is not None]
        self.hold(found)
        missing = path[len(found) :]
        while self.num_free() < len(missing) and len(self.policy):
            self.evict(self.rng.randrange(1, 6))
        for content in missing:
            if not self.num_free():
                break
            content.num_users = 1
            self.place(content)
            found.append(content)
        self.users.append(found)

    def release(self) -> None:
        """End a request: unused contents come out of use, the tail first."""
        if not self.users:
            return
        path = self.users.pop(self.rng.randrange(len(self.users)))
        unused = []
        for content in reversed(path):
            content.num_users -= 1
            if not content.num_users and content.entry is not None:
                unused.append(content.entry)
        self.tell("insert", unused)

    def forget(self) -> None:
        """Drop an unused content, and all that continue it."""
        unused = [c for c in self.contents if c.entry is not None and not c.num_users]
        if not unused:
            return
        doomed = [c for c in unused if unused[-1] in c.path()]
        entries = [c.entry for c in doomed if c.entry is not None]
        for content in doomed:
            self.drop(content)
        self.tell("discard", entries)

    def forget_in_use(self) -> None:
        """Drop a content in use: the policy is not told."""
        leaves = [c for c in self.contents if c.num_users and not c.num_cached_children]
        if leaves:
            content = self.rng.choice(leaves)
            for path in self.users:
                if content in path:
                    path.remove(content)
            content.num_users = 0
            self.drop(content)

    def try_evicting(self) -> None:
        """Choose victims; some of them stay."""
        self.evict(self.rng.randrange(1, 9), num_kept=self.rng.randrange(4))

    def evict(self, num_entries: int, num_kept: int = 0) -> None:
        entries = [int(entry) for entry in self.policy.choose(num_entries)]
        assert entries == self.slow.choose(num_entries)
        kept = entries[max(0, len(entries) - num_kept) :]
        for entry in entries[: len(entries) - len(kept)]:
            content = self.held_by[entry]
            if not content.num_cached_children:
                self.drop(content)
                continue
            # A victim may have children only if no other is left, and those are in use.
            assert not len(self.policy)
            kept = [*kept, entry]
        self.tell("put_back", kept)

    # --- inside ---

    def tell(self, name: str, entries: list[int]) -> None:
        arrays = np.array(entries, dtype=np.intp)
        getattr(self.policy, name)(arrays if self.rng.random() < 0.5 else entries)
        getattr(self.slow, name)(entries)

    def hold(self, found: list[Content]) -> None:
        """Add a user to each of these cached contents."""
        unused = [content for content in found if not content.num_users]
        self.tell("remove", [content.entry for content in unused if content.entry is not None])
        for content in found:
            content.num_users += 1

    def place(self, content: Content) -> None:
        """Give a content any free entry."""
        free = [entry for entry in range(self.capacity) if entry not in self.held_by]
        content.entry = self.rng.choice(free)
        self.held_by[content.entry] = content

    def drop(self, content: Content) -> None:
        assert content.entry is not None
        del self.held_by[content.entry]
        content.entry = None

    def num_free(self) -> int:
        return self.capacity - len(self.held_by)

    def compare(self) -> None:
        order = self.policy.order()
        assert order == self.slow.order()
        inserted = [e for e, content in self.held_by.items() if not content.num_users]
        assert sorted(order) == sorted(inserted)
        assert len(self.policy) == len(inserted)
        assert [e for e in range(self.capacity) if e in self.policy] == sorted(inserted)

    def _draw_contents(self, count: int) -> list[Content]:
        contents: list[Content] = []
        for number in range(count):
            parent = self.rng.choice([None, *contents]) if contents else None
            if parent is not None and len(parent.path()) > 4:
                parent = None
            content = Content(number, parent)
            if parent is not None:
                parent.children.append(content)
            contents.append(content)
        return contents
