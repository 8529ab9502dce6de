"""The events of one manager, checked as a stream that routers could follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcache.core import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from kvcache.specs import KVCacheSpec

Happening = tuple[object, ...]


class EventStream:
    """The stored contents according to the events so far.

    Removed events have no namespace, and tenants share digests: so contents are counted.
    """

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self._specs = tuple(specs)
        self.stored: Counter[tuple[int, bytes]] = Counter()
        self._parents: dict[tuple[int, bytes], bytes | None] = {}

    def take(self, events: Sequence[CacheEvent]) -> Counter[Happening]:
        """Check events in order; return their blocks one by one."""
        happenings: Counter[Happening] = Counter()
        for event in events:
            if isinstance(event, BlocksStored):
                happenings.update(self._store(event))
            elif isinstance(event, BlocksRemoved):
                for digest in event.digests:
                    key = event.group, digest
                    assert self.stored[key] > 0, f"removed, but not stored: {digest.hex()[:12]}"
                    self.stored[key] -= 1
                    happenings["removed", event.group, event.medium, digest] += 1
            elif isinstance(event, AllBlocksCleared):
                self.stored.clear()
                happenings["cleared",] += 1
        self._require_parents()
        return happenings

    def _store(self, event: BlocksStored) -> list[Happening]:
        spec, size = self._specs[event.group], event.block_size
        assert size == spec.block_size
        assert len(event.token_ids) == size * len(event.digests)
        parent: bytes | None = event.parent_digest
        happenings: list[Happening] = []
        for i, digest in enumerate(event.digests):
            if spec.reads_whole_prefix:
                assert parent is None or self.stored[event.group, parent] > 0, (
                    f"{digest.hex()[:12]} is stored before its parent"
                )
            self.stored[event.group, digest] += 1
            self._parents[event.group, digest] = parent
            tokens = tuple(event.token_ids[i * size : (i + 1) * size].tolist())
            keys = event.extra_keys[i] if event.extra_keys else None
            what = (event.group, event.medium, digest, parent, tokens, event.namespace, keys)
            happenings.append(("stored", *what))
            parent = digest
        return happenings

    def _require_parents(self) -> None:
        """Check that no child is stored without its parent in groups that read whole prefixes."""
        for (group, digest), count in self.stored.items():
            parent = self._parents[group, digest]
            if count and parent is not None and self._specs[group].reads_whole_prefix:
                assert self.stored[group, parent] >= count, (
                    f"{digest.hex()[:12]} stays stored without its parent"
                )
