"""Which block is in which host slot of every rank: the scheduler's part of the connector.

Knows requests by vLLM's own block hashes. A block is a hit once every rank has said that it holds
it; until then it is pending. One instance, in the scheduler's thread. Refuses to touch bytes, and
to read a clock: the time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcache.base.errors import ConfigurationError
from kvcache.integrations.vllm.options import EngineSetting
from kvcache.integrations.vllm.step_messages import Inventory, RankReports, StepCommands
from kvcache.offload.keys import OffloadKey
from kvcache.offload.options import TierOptions
from kvcache.offload.slots import READY
from kvcache.offload.specs import HOST_MEDIUM
from kvcache.offload.tier_manager import TierManager

NO_PARENT = bytes(32)


@dataclass
class _Tracked:
    """A request that vLLM has allocated blocks for. `next_block`: the first not looked at yet."""

    request: Any
    next_block: int = 0
    num_local_blocks: int = 0


@dataclass
class _Transfer:
    """Blocks on their way in one step. `num_ranks` have said that they are through."""

    keys: list[OffloadKey]
    slots: tuple[int, ...]
    begun_s: float
    num_ranks: int = 0


@dataclass
class _Commands:
    """What the next step is going to tell the ranks."""

    forgets_all: bool = False
    forgotten: list[int] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    loads: list[tuple[OffloadKey, int, int]] = field(default_factory=list)  # key, slot, block


class BlockStore:
    """The block table of one engine's host tier.

    Invariant: a key is READY in the tier exactly when all ranks have stored it and none has lost
    it. A rank obeys steps in order, so a slot may be given to another block in the step after.
    """

    def __init__(self, setting: EngineSetting, now: Callable[[], float]) -> None:
        """Know nothing, and store nothing, until `adopt`."""
        self._setting = setting
        self._now = now
        self._tier: TierManager | None = None
        self._requests: dict[str, _Tracked] = {}
        self._storing: dict[int, _Transfer] = {}
        self._loading: dict[int, _Transfer] = {}
        self._next = _Commands()
        self._step = 0

    @property
    def num_ready(self) -> int:
        """Blocks that can be loaded now."""
        return 0 if self._tier is None else self._tier.statistics().num_ready

    @property
    def has_unsent_commands(self) -> bool:
        """Whether ranks must be told something although no request needs a step."""
        following = self._next
        is_due = following.forgets_all or following.forgotten or following.sealed
        return bool(is_due or self._storing)

    def adopt(self, inventories: Mapping[int, Inventory]) -> int:
        """Begin with what all ranks have in the same slots; return how many blocks that is.

        What they disagree about is forgotten on all of them. Raises ConfigurationError unless each
        rank is there and has as many slots.
        """
        sizes = {inventory.num_slots for inventory in inventories.values()}
        if len(inventories) != self._setting.num_ranks or len(sizes) != 1:
            raise ConfigurationError(
                f"{len(inventories)} of {self._setting.num_ranks} ranks have told of host memory, "
                f"of {sorted(sizes)} slots: give every rank the same offload.host_memory_per_rank"
            )
        options = self._setting.options.offload
        (num_slots,) = sizes
        tier = TierManager(
            TierOptions(
                HOST_MEDIUM, num_slots, policy=options.policy, store_after=options.store_after
            )
        )
        first, *others = [inventory.digests for inventory in inventories.values()]
        agreed = {
            slot: OffloadKey(digest)
            for slot, digest in sorted(first.items())
            if all(other.get(slot) == digest for other in others)
        }
        slots = list(agreed)
        refused = {slots[i] for i in tier.adopt(list(agreed.values()), slots).tolist()}
        kept = agreed.keys() - refused
        known = {slot for inventory in inventories.values() for slot in inventory.digests}
        self._next.forgotten += sorted(known - kept)
        self._tier = tier
        return len(kept)

    # --- a request's way

    def num_matched(self, request: Any, num_computed_tokens: int) -> int:
        """Return how many tokens behind `num_computed_tokens` can be loaded. One token at least is
        left to be computed."""
        tokens = self._setting.block_tokens
        first, last = num_computed_tokens // tokens, (request.num_tokens - 1) // tokens
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        tracked.num_local_blocks = first
        if self._tier is None or not self._has_whole_hashes(request):
            return 0
        states = self._tier.states_of(request.block_hashes[first:last])
        is_missing = states != READY
        count = int(is_missing.argmax()) if is_missing.any() else len(states)
        num_tokens = count * tokens
        return num_tokens if num_tokens >= self._setting.options.offload.min_load_tokens else 0

    def allocated(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Take note of a request's blocks; the next step loads its `num_external_tokens`."""
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        if not num_external_tokens or self._tier is None:
            return
        first = tracked.num_local_blocks
        end = first + num_external_tokens // self._setting.block_tokens
        keys = [OffloadKey(digest) for digest in request.block_hashes[first:end]]
        slots = self._tier.hold(keys).tolist()
        self._tier.count_look_up(len(keys), 0)
        self._next.loads += zip(keys, slots, block_ids[first:end], strict=True)

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    # --- a step's way

    def commands(
        self,
        num_scheduled_tokens: Mapping[str, int],
        block_ids_of: Callable[[str], Sequence[Sequence[int]] | None],
    ) -> StepCommands:
        """Return what the ranks do in the step that schedules so many tokens of these requests."""
        self._step += 1
        self._give_up_late()
        following, self._next = self._next, _Commands()
        load_keys = [key for key, _, _ in following.loads]
        load_slots = tuple(slot for _, slot, _ in following.loads)
        if load_keys:
            self._loading[self._step] = _Transfer(load_keys, load_slots, self._now())
        keys, slots, blocks, parents = self._new_stores(num_scheduled_tokens, block_ids_of)
        if keys:
            self._storing[self._step] = _Transfer(keys, slots, self._now())
        return StepCommands(
            self._step,
            following.forgets_all,
            tuple(following.forgotten),
            tuple(following.sealed),
            load_slots,
            tuple(block for _, _, block in following.loads),
            tuple(load_keys),
            slots,
            blocks,
            tuple(keys),
            parents,
        )

    def reported(self, reports: RankReports) -> None:
        """Take note of what ranks have done."""
        if self._tier is None:
            return
        for step, count in reports.loaded.items():
            if self._is_through(self._loading, step, count):
                self._tier.complete_load(self._loading.pop(step).keys)
        if reports.lost:
            self._lose(reports.lost)
        for step in reports.not_stored:
            self._give_up(step)
        for step, count in reports.stored.items():
            if self._is_through(self._storing, step, count):
                stored = self._storing.pop(step)
                self._tier.complete_store(stored.keys)
                self._next.sealed += stored.slots

    def reset(self) -> None:
        """Forget everything, here now and on the ranks before their next step's loads."""
        if self._tier is None:
            return
        for step in list(self._storing):
            self._give_up(step)
        self._tier.reset_cache()
        self._next = _Commands(forgets_all=True)

    # --- stores

    def _new_stores(
        self,
        num_scheduled_tokens: Mapping[str, int],
        block_ids_of: Callable[[str], Sequence[Sequence[int]] | None],
    ) -> tuple[list[OffloadKey], tuple[int, ...], tuple[int, ...], tuple[bytes, ...]]:
        """Reserve slots for the blocks that this step fills and no slot holds.

        A block counts as filled when vLLM has hashed it: then all its tokens are known, and none is
        a draft that may be rejected.
        """
        tokens = self._setting.block_tokens
        keys: list[OffloadKey] = []
        blocks: list[int] = []
        parents: list[bytes] = []
        for request_id, num_tokens in num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            request, first = tracked.request, tracked.next_block
            hashes = request.block_hashes
            end = min((request.num_computed_tokens + num_tokens) // tokens, len(hashes))
            if end <= first or not self._has_whole_hashes(request):
                continue
            found = block_ids_of(request_id)
            if found is None:
                continue
            tracked.next_block = end
            keys += hashes[first:end]
            blocks += found[0][first:end]
            parents += [NO_PARENT, *hashes[: end - 1]][first:end]
        if not keys or self._tier is None:
            return [], (), (), ()
        self._tier.see(keys)
        reserved = self._tier.reserve(keys)
        places = [] if reserved is None else reserved.positions.tolist()
        slots = () if reserved is None else tuple(reserved.addresses.tolist())
        return (
            [keys[i] for i in places],
            slots,
            tuple(blocks[i] for i in places),
            tuple(parents[i] for i in places),
        )

    def _give_up(self, step: int) -> None:
        """Let a store be as if it had never been. Its slots are not sealed."""
        given_up = self._storing.pop(step, None)
        if given_up is not None and self._tier is not None:
            self._tier.complete_store(given_up.keys, success=False)

    def _give_up_late(self) -> None:
        """Give stores up that ranks have not answered in time."""
        before_s = self._now() - self._setting.options.offload.job_s
        for step, transfer in list(self._storing.items()):
            if transfer.begun_s > before_s:
                return
            self._give_up(step)

    def _lose(self, digests: frozenset[bytes]) -> None:
        """Forget blocks that a rank could not load, and every store that has not ended.

        What was computed in a step with a failed load, or in one that was scheduled before the
        failure was known, may follow from wrong bytes, on all ranks.
        """
        assert self._tier is not None
        for step in list(self._storing):
            self._give_up(step)
        keys = [OffloadKey(digest) for digest in digests]
        slots = self._tier.addresses_of(keys)
        self._next.forgotten += slots[slots >= 0].tolist()
        self._tier.forget(keys)
        for tracked in self._requests.values():
            tracked.next_block = 0  # what was lost is stored again when it has been computed

    def _is_through(self, transfers: Mapping[int, _Transfer], step: int, count: int) -> bool:
        """Count ranks; say whether all are through with a step's transfer."""
        transfer = transfers.get(step)
        if transfer is None:
            return False
        transfer.num_ranks += count
        return transfer.num_ranks == self._setting.num_ranks

    def _has_whole_hashes(self, request: Any) -> bool:
        """Say whether there is one hash for each block, as this class takes for granted."""
        return bool(len(request.block_hashes) == request.num_tokens // self._setting.block_tokens)
