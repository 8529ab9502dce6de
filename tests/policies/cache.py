"""A small cache that owns entries as a pool does, and answers its policy's questions.

Requests use contents along a tree: those that are cached are taken out of the policy, the others
get entries, for which room is made if need be. Leaf first: the cache forgets no content that
another continues. Entries of several blocks are cut, and get other numbers while they are in use,
as runs do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvcache.arrays import IndexArray, index_array
from kvcache.policies import EntryBook, EntryInfo, EvictionPolicy
from tests.policies.slow import SlowPolicy

NAME_BYTES = 4


@dataclass
class Content:
    """A content, what it continues, and where it is. `num_blocks` shrinks when its tail goes.

    Its blocks' names count up from `first_name`.
    """

    first_name: int
    parent: Content | None
    size: int
    num_blocks: int = 0
    entry: int | None = None
    num_users: int = 0
    cut_from: bytes | None = None
    children: list[Content] = field(default_factory=list)

    @property
    def num_cached_children(self) -> int:
        return sum(child.entry is not None for child in self.children)

    def path(self) -> list[Content]:
        return [*(self.parent.path() if self.parent else []), self]

    def names(self) -> bytes:
        return b"".join(
            (self.first_name + i).to_bytes(NAME_BYTES, "big") for i in range(self.num_blocks)
        )


class Cache:
    """Entries, contents and users; two policies that must agree, the second one slow."""

    def __init__(
        self,
        rng: random.Random,
        make: Callable[[int, EntryBook], EvictionPolicy],
        make_slow: Callable[[int, EntryBook], SlowPolicy],
        *,
        capacity: int,
        is_uniform: bool,
        has_names: bool = True,
    ) -> None:
        self.rng = rng
        self.capacity = capacity
        self.is_uniform = is_uniform
        self.has_names = has_names
        self.contents = self._draw_contents(3 * capacity)
        self.held_by: dict[int, Content] = {}
        self.users: list[list[Content]] = []
        self.policy = make(capacity, self)
        self.slow = make_slow(capacity, self)

    # --- the book ---

    def describe(self, entry: int) -> EntryInfo:
        content = self.held_by[entry]
        names = content.names()
        parent = content.parent
        return EntryInfo(
            content.num_blocks,
            parent=None if parent is None else parent.entry,
            content=names[-NAME_BYTES:] if self.has_names else None,
            num_children=content.num_cached_children,
            contents=names if self.has_names and not self.is_uniform else None,
            cut_from=content.cut_from,
        )

    def weight(self, entry: int) -> int:
        return self.held_by[entry].num_blocks

    def weights(self, entries: IndexArray) -> IndexArray:
        return index_array([self.held_by[entry].num_blocks for entry in entries.tolist()])

    # --- operations ---

    def operate(self) -> None:
        """Do something, then see whether both policies say the same."""
        acts = [self.use, self.release, self.forget, self.forget_in_use, self.try_evicting]
        chances = [8, 8, 1, 0.5, 2]
        if not self.is_uniform:
            acts.append(self.cut)
            chances.append(2)
        self.rng.choices(acts, chances)[0]()
        self.compare()

    def use(self) -> None:
        """A request uses a content and all it continues."""
        path = self.rng.choice(self.contents).path()
        found = [content for content in path if content.entry is not None]
        self.hold(found)
        missing = path[len(found) :]
        while self.num_free() < len(missing) and len(self.policy):
            self.evict(self.rng.randrange(1, 6))
        for content in missing:
            if not self.num_free():
                break
            content.num_blocks = content.size
            content.num_users = 1
            self.place(content)
            found.append(content)
        self.users.append(found)

    def release(self) -> None:
        """A request ends: what nobody uses any more comes out of use, the tail first."""
        if not self.users:
            return
        path = self.users.pop(self.rng.randrange(len(self.users)))
        unused = []
        for content in reversed(path):
            content.num_users -= 1
            if not content.num_users and content.entry is not None:
                if not self.is_uniform:
                    del self.held_by[content.entry]
                    self.place(content)
                unused.append(content.entry)
        self.tell("insert", unused)

    def cut(self) -> None:
        """A request uses the first part of a content only: it becomes one of its own."""
        long = [c for c in self.held_by.values() if not c.num_users and c.num_blocks > 1]
        if not long or not self.num_free():
            return
        whole = self.rng.choice(long)
        size = self.rng.randrange(1, whole.num_blocks)
        name = whole.names()[-NAME_BYTES:]
        head = Content(whole.first_name, whole.parent, size, size, cut_from=name)
        head.children = [whole]
        if whole.parent is not None:
            whole.parent.children.remove(whole)
            whole.parent.children.append(head)
        whole.parent = head
        whole.first_name += size
        whole.size -= size
        whole.num_blocks -= size
        self.contents.append(head)
        path = head.path()
        self.hold(path[:-1])
        self.place(head)
        head.num_users = 1
        self.users.append(path)

    def forget(self) -> None:
        """A content that nobody uses is void, and what continues it."""
        unused = [c for c in self.contents if c.entry is not None and not c.num_users]
        if not unused:
            return
        doomed = [c for c in unused if unused[-1] in c.path()]
        entries = [c.entry for c in doomed if c.entry is not None]
        for content in doomed:
            self.drop(content)
        self.tell("discard", entries)

    def forget_in_use(self) -> None:
        """A content is void although somebody uses it: the policy is not told."""
        leaves = [c for c in self.contents if c.num_users and not c.num_cached_children]
        if leaves:
            content = self.rng.choice(leaves)
            for path in self.users:
                if content in path:
                    path.remove(content)
            content.num_users = 0
            self.drop(content)

    def try_evicting(self) -> None:
        """Choose victims, of which some stay."""
        self.evict(self.rng.randrange(1, 9), num_kept=self.rng.randrange(4))

    def evict(self, num_blocks: int, num_kept: int = 0) -> None:
        victims = self.policy.choose(num_blocks)
        entries = [int(entry) for entry in victims.entries]
        slow_entries, num_of_last = self.slow.choose(num_blocks)
        assert entries == slow_entries
        assert not entries or victims.num_blocks_of_last == num_of_last
        kept = entries[max(0, len(entries) - num_kept) :]
        going = entries[: len(entries) - len(kept)]
        for entry in going:
            content = self.held_by[entry]
            is_needed = content.num_cached_children > 0
            # Only where nothing else is left may a victim have children, and those are in use.
            assert not is_needed or not len(self.policy)
            num_gone = victims.num_blocks_of_last if entry == entries[-1] else content.num_blocks
            if is_needed:
                kept = [*kept, entry]
            elif num_gone < content.num_blocks:
                content.num_blocks -= num_gone
                kept = [entry, *kept]
            else:
                self.drop(content)
        self.tell("put_back", kept)

    # --- inside ---

    def tell(self, name: str, entries: list[int]) -> None:
        arrays = np.array(entries, dtype=np.intp)
        getattr(self.policy, name)(arrays if self.rng.random() < 0.5 else entries)
        getattr(self.slow, name)(entries)

    def hold(self, found: list[Content]) -> None:
        """One user more of each of these, which are cached."""
        unused = [content for content in found if not content.num_users]
        self.tell("remove", [content.entry for content in unused if content.entry is not None])
        for content in found:
            content.num_users += 1

    def place(self, content: Content) -> None:
        """Give a content an entry, any that is free."""
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
            size = 1 if self.is_uniform else self.rng.randrange(1, 6)
            content = Content(1000 * number, parent, size)
            if parent is not None:
                parent.children.append(content)
            contents.append(content)
        return contents
