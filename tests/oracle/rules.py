"""The deliberate differences between this package and the peer, each a rule of its contract.

Each rule can be removed: the slow core, which behaves like the flat one (`tests/agreement`), then
behaves like the peer, and must agree with it in every answer of a whole walk. So a rule excuses
exactly its own consequences, and a remaining difference is a mistake of one side. That the slow
core with all rules answers like the flat one is checked here as well. side. That the slow core
without any rule answers as the flat one does is compared here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.requests.request import Request
from tests.core.slow_core import Block, Column, Row, SlowCore


@dataclass(frozen=True)
class Rule:
    """One rule: its name, what each side does, and a core that behaves like the peer."""

    name: str
    ours: str
    theirs: str
    because: str
    core: type[SlowCore]


class KeepsCopies(SlowCore):
    """Cache every block, even if another has its content, and evict in order alone."""

    keeps_copies = True

    def is_continued(self, block: Block) -> bool:
        return False


class FreesGroupByGroup(SlowCore):
    """Free a request's blocks one group after the other, each tail first."""

    def tail_first(self, tables: Sequence[Sequence[Block | None]]) -> list[Column]:
        return [
            (g, index)
            for g, table in enumerate(tables)
            for index in reversed(range(len(table)))
            if table[index] is not None
        ]


class MatchesBehindTheLimit(SlowCore):
    """Let EAGLE in a hybrid match one block beyond the limit of a look-up, and drop that one."""

    def longest(self, request: Request) -> int:
        limit = super().longest(request)
        if not self.use_eagle or len(self.groups) < 2:
            return limit
        end = request.num_tokens // self.hash_block_size * self.hash_block_size
        return min(limit + self.groups[0].block_size, end)


class CachesWholeSteps(SlowCore):
    """Make blocks hittable only up to a multiple of the least common block size."""

    def publish(self, row: Row, num_tokens: int) -> None:
        super().publish(row, num_tokens - num_tokens % self.step_tokens)


def core_of(rules: Sequence[Rule]) -> type[SlowCore]:
    """Return a slow core that behaves like the peer in place of these rules."""
    return type("PeerLike", (*[rule.core for rule in rules], SlowCore), {})


RULES = (
    Rule(
        name="one block for each content",
        ours="a request that recomputes cached content keeps a private block and, with full "
        "attention, also references the cached one: fewer blocks are free while it runs, and its "
        "own is blank when it ends",
        theirs="caches the second block, too: both are evicted, each at its time",
        because="each content is cached once, and no content is evicted before its continuations",
        core=KeepsCopies,
    ),
    Rule(
        name="tail first over all groups",
        ours="`free` releases the blocks of all groups together, last tokens first",
        theirs="frees one group after the other, so that all of the first group is evicted before "
        "any of the second",
        because="`free` releases tail first: a freed request is evicted from its end, not one "
        "group before the other, because a prefix hits only if every group still has it",
        core=FreesGroupByGroup,
    ),
    Rule(
        name="EAGLE drops inside the limit",
        ours="a hit is at most `num_tokens - 1` tokens, and the last matched block of it is "
        "dropped: in hybrids as with one group",
        theirs="does so with one group; in hybrids it first matches one block after the limit "
        "and drops that one, which hits one block more if the prompt ends in a cached block",
        because="the longest hit is at most `num_tokens - 1` tokens; EAGLE drops the last matched "
        "block. One rule for one group and for several",
        core=MatchesBehindTheLimit,
    ),
    Rule(
        name="every full block is cached",
        ours="with differing block sizes, every block is cached in the step that fills it",
        theirs="caches a finer block only once the coarser one around it is full, since no hit "
        "could end there yet; a request freed before leaves it without a hash, first to be reused",
        because="a block is hittable from the step that schedules its last token, whatever the "
        "blocks of other groups",
        core=CachesWholeSteps,
    ),
)
