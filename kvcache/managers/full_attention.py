"""Full attention (MLA too): every token reads all tokens before it, so no block is ever skipped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvcache.arguments import as_int
from kvcache.arrays import Ids
from kvcache.blocks.contents import Finder
from kvcache.blocks.pool import BlockPool
from kvcache.core import ReferenceKind
from kvcache.errors import RequestError
from kvcache.hashing import BlockHash
from kvcache.managers.base import MatchLimits, SingleTypeKVCacheManager
from kvcache.request import Namespace
from kvcache.specs import KVCacheSpec


class FullAttentionManager(SingleTypeKVCacheManager):
    """Hits are the blocks from the left until the first miss."""

    @classmethod
    def match_groups(  # noqa: PLR0917 - see the base
        cls,
        pool: BlockPool,
        namespace: Namespace,
        group_ids: Sequence[int],
        digests: Sequence[BlockHash],
        spec: KVCacheSpec,
        limits: MatchLimits,
    ) -> tuple[Ids, ...]:
        if len(group_ids) == 1:
            contents = pool.contents
            match = contents.leading_blocks(namespace, group_ids[0], digests, limits.max_blocks)
            if match is not None:
                return (match[: len(match) - len(match) % limits.alignment_blocks],)
        return super().match_groups(pool, namespace, group_ids, digests, spec, limits)

    @classmethod
    def longest_match(
        cls,
        find: Finder,
        digests: Sequence[BlockHash],
        spec: KVCacheSpec,
        limits: MatchLimits,
    ) -> list[int]:
        # iter(callable, sentinel) stops at the first miss without a Python loop.
        match = [*iter(map(find, islice(digests, limits.max_blocks)).__next__, None)]
        del match[len(match) - len(match) % limits.alignment_blocks :]
        return match

    def get_num_common_prefix_blocks(self, request_id: str, num_running_requests: int) -> int:
        """Count leading blocks whose request references equal the running requests."""
        what = "num_running_requests"
        num_running_requests = as_int(what, num_running_requests, error=RequestError)
        count = 0
        for block_id in self.table(request_id):
            if self._pool.num_references(block_id, ReferenceKind.REQUEST) != num_running_requests:
                break
            count += 1
        return count
