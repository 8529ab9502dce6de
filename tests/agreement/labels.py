"""The workers' labels, compared with the bytes below them.

Part of the truth of one core. A label must name a block that holds its tokens, in order, after its
parent's prefix; equal digests of a namespace must mean equal prefixes. Knows nothing of cores;
raises AssertionError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvcache.protocol.commands import Label
from kvcache.protocol.labels import LabelTable
from kvcache.specs import KVCacheSpec
from tests.agreement.content import Chains, Numbers

LabelContent = tuple[int, bytes, bytes, tuple[int, ...], bytes, bytes]
"""Group, digest, parent digest, tokens, namespace, extra keys."""

DIGEST_BYTES = 32


class Labels:
    """A worker's label table, and the number of blocks labelled with each content."""

    def __init__(self, specs: Sequence[KVCacheSpec], num_blocks: int, chains: Chains) -> None:
        width = max(spec.block_size for spec in specs)
        self.counts: Counter[LabelContent] = Counter()
        self._specs = tuple(specs)
        self._chains = chains
        self._table = LabelTable(num_blocks, DIGEST_BYTES, width)
        self._contents: dict[int, LabelContent] = {}
        self._prefixes: dict[tuple[int, bytes, bytes], int] = {}
        self._digests: dict[tuple[int, int], bytes] = {}

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._contents

    def blocks(self) -> list[int]:
        """Return the blocks that have a label."""
        return list(self._contents)

    def apply(self, label: Label) -> None:
        """Apply a label command; an old label must have been dropped before."""
        self._table.validate(label)
        self._table.apply(label)
        starts = [0, *label.token_counts.cumsum().tolist()]
        for i, block in enumerate(label.block_ids.tolist()):
            assert block not in self._contents, f"block {block} is labelled twice"
            digests = slice(i * DIGEST_BYTES, (i + 1) * DIGEST_BYTES)
            content = (
                int(label.groups[i]),
                label.digests[digests],
                label.parent_digests[digests],
                tuple(label.token_ids[starts[i] : starts[i + 1]].tolist()),
                label.namespace_names[int(label.namespaces[i])],
                label.extra_keys.get(i, b""),
            )
            self._contents[block] = content
            self.counts[content] += 1

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Drop labels; each of them must exist."""
        for block in block_ids:
            assert block in self._contents, f"block {block} is unlabelled but has no label"
            content = self._contents.pop(block)
            self.counts[content] -= 1
            if not self.counts[content]:
                del self.counts[content]

    def reset(self) -> None:
        """Drop every label."""
        self._contents.clear()
        self.counts.clear()

    def check(self, block_ids: Iterable[int], cells: Numbers) -> None:
        """Check that labelled blocks have the bytes that their labels say."""
        for block in block_ids:
            group, digest, _, tokens, namespace, _ = self._contents[block]
            spec = self._specs[group]
            is_state = spec.num_state_blocks is not None
            last = int(cells[block, 0 if is_state else spec.block_size - 1])
            number = last // len(self._specs)
            assert last > 0 and last % len(self._specs) == group, (
                f"block {block} is labelled for group {group} and holds {last}"
            )
            assert self._chains.last_tokens(number, spec.block_size) == tokens, (
                f"block {block} is labelled with tokens {tokens} and holds others"
            )
            if not is_state:
                found = [int(c) // len(self._specs) for c in cells[block, : spec.block_size]]
                wanted = self._chains.last_numbers(number, spec.block_size)
                assert found == wanted, f"block {block} of group {group} holds a broken prefix"
            known = self._prefixes.setdefault((group, namespace, digest), number)
            assert known == number, f"one digest stands for two prefixes: block {block}"
            same = self._digests.setdefault((group, number), digest)
            assert same == digest, f"one prefix has two digests: block {block}"
