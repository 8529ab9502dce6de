"""Random per-request calls, and random changes of the whole cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.agreement import operations as ops
from tests.agreement.configurations import Operation
from tests.agreement.content import Forward, Origin
from tests.agreement.engine import CALLER, Live

if TYPE_CHECKING:
    from tests.agreement.walk import Walk


class CallChoice:
    """Chooses and applies the calls of a walk."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    # --- requests ---

    def admit(self) -> None:
        walk = self._walk
        skips = walk.allows(Operation.SKIPPED_READING, 0.05)
        origin, tokens = walk.prompts.prompt()
        delays_caching = walk.allows(Operation.DELAYED_CACHING, 0.15)
        self._admit(origin, tokens, skips_reading=skips, delays_caching=delays_caching)

    def _admit(
        self, origin: Origin, tokens: tuple[int, ...], *, skips_reading: bool, delays_caching: bool
    ) -> Live | None:
        """Admit a request with these tokens; None if there is no room."""
        walk, rng = self._walk, self._walk.rng
        num_external = rng.randrange(12) if walk.allows(Operation.EXTERNAL, 0.15) else 0
        admit = ops.Admit(
            walk.name(),
            origin,
            tokens,
            walk.max_new(),
            num_external=num_external,
            num_lookahead=walk.num_lookahead(),
            num_encoder=walk.num_encoder(),
            delays_caching=delays_caching,
            skips_reading=skips_reading,
            hints=walk.hints(),
        )
        facts = walk.do(admit, may_fail=walk.sides[0].manager.is_draining)
        forwards: list[Forward] = []
        if facts.get("has room"):
            slot = walk.sides[0].manager.slot_of(admit.name)
            assert slot is not None
            forwards = walk.engine.follow_admit(admit, facts, slot)
            walk.engine.live[admit.name].skips_reading = skips_reading
        walk.finish(forwards)
        if not forwards:
            return None
        walk.remember(walk.engine.live[admit.name])
        return walk.engine.live[admit.name]

    def callers(self) -> list[Live]:
        return self._walk.engine.of(CALLER, running=True)

    def extend(self) -> None:
        if self.callers():
            self._extend(self._walk.rng.choice(self.callers()))

    def _extend(self, request: Live) -> None:
        rng = self._walk.rng
        row = self._walk.steps.row(request)
        if row is None or not row.num_new:
            self.free()
            return
        extend = ops.Extend(
            request.name,
            request.computed - row.num_rejected,
            row.appended,
            row.num_new,
            len(row.drafts),
            num_lookahead=self._walk.num_lookahead(),
            delays_caching=self._walk.allows(Operation.DELAYED_CACHING, 0.1),
        )
        facts = self._walk.do(extend)
        forwards = self._walk.engine.follow_extend(extend, row.drafts, facts["has room"] is True)
        self._walk.finish(forwards)
        if not forwards and rng.random() < 0.5:
            self.free()

    def free(self) -> None:
        if self.callers():
            self._free(self._walk.rng.choice(self.callers()))

    def _free(self, request: Live) -> None:
        self._walk.remember(request)
        self._walk.do(ops.Free(request.name, self._walk.hints()))
        del self._walk.engine.live[request.name]
        self._walk.finish([])

    def cache_blocks(self) -> None:
        if self.callers():
            self._cache_blocks(self._walk.rng.choice(self.callers()))

    def _cache_blocks(self, request: Live) -> None:
        # Drafts are not the request's own, and there are no bytes after its last forward.
        end = min(request.last_own, len(request.tokens), request.computed)
        self._walk.do(ops.CacheBlocks(request.name, end))
        self._walk.finish([])

    def forget_hashes(self) -> None:
        if self.callers():
            self._walk.do(ops.FreeBlockHashes(self._walk.rng.choice(self.callers()).name))
            self._walk.finish([])

    def fork(self) -> None:
        parents = [r for r in self.callers() if min(r.computed, len(r.tokens)) > 0]
        if parents:
            self._fork(self._walk.rng.choice(parents))

    def _fork(self, parent: Live) -> Live | None:
        """Fork a request; None if there is no room."""
        computed = min(parent.computed, len(parent.tokens))
        if not computed or parent.origin.crosses_image(computed):
            return None
        tokens = parent.tokens[:computed]
        tokens += self._walk.prompts.output(tokens, self._walk.rng.randint(1, 4))
        call = ops.ForkCall(
            parent.name, self._walk.name(), parent.origin.cut(computed), tuple(tokens)
        )
        has_room = self._walk.do(call)["has room"]
        if has_room:
            slot = self._walk.sides[0].manager.slot_of(call.child)
            assert slot is not None
            self._walk.engine.follow_fork(call, slot)
        self._walk.finish([])
        return self._walk.engine.live[call.child] if has_room else None

    def delay_and_fork(self) -> None:
        """Admit without caching, fork, fork a fork; another request may compute the same and cache
        it; then some of the family cache, by a call or in a step, and some end."""
        walk, rng = self._walk, self._walk.rng
        origin, tokens = walk.prompts.prompt()
        first = self._admit(origin, tokens, skips_reading=False, delays_caching=True)
        if first is None:
            return
        family = [first]
        for _ in range(rng.randint(1, 3)):
            child = self._fork(rng.choice(family))
            family += [] if child is None else [child]
        if rng.random() < 0.6:
            tail = walk.prompts.output(list(tokens), rng.randint(0, 2))
            end = rng.choice([len(tokens), rng.randint(1, len(tokens))])
            if end == len(tokens) or not origin.crosses_image(end):
                same = (*tokens, *tail) if end == len(tokens) else tokens[:end]
                self._admit(origin.cut(len(same)), same, skips_reading=False, delays_caching=False)
        for _ in range(rng.randint(1, 4)):
            present = [one for one in family if one.name in walk.engine.live]
            if present:
                act = rng.choice([self._cache_blocks, self._cache_blocks, self._extend, self._free])
                act(rng.choice(present))

    # --- the cache as a whole ---

    def look_up(self) -> None:
        origin, tokens = self._walk.prompts.continued() or self._walk.prompts.prompt()
        self._walk.do(ops.LookUp(origin, tokens))
        self._walk.finish([])

    def pin(self) -> None:
        found = self._walk.prompts.continued()
        if found is not None:
            ttl = float(self._walk.rng.randint(1, 20))
            self._walk.do(ops.PinPrefix(self._walk.name(), *found, ttl), may_fail=True)
            self._walk.finish([])

    def unpin(self) -> None:
        if self._walk.sides[0].pins:
            self._walk.do(ops.Unpin(self._walk.rng.choice(sorted(self._walk.sides[0].pins))))
            self._walk.finish([])

    def wait(self) -> None:
        self._walk.do(ops.Wait(float(self._walk.rng.randint(1, 8))))
        self._walk.finish([])

    def evict(self) -> None:
        rng, num_groups = self._walk.rng, len(self._walk.configuration.specs)
        places = tuple(
            (rng.randrange(num_groups), rng.randrange(12)) for _ in range(rng.randint(1, 3))
        )
        running = sorted(r.name for r in self._walk.engine.live.values() if r.is_running)
        found = self._walk.prompts.continued()
        if running and rng.random() < 0.5:
            self._walk.do(ops.EvictBlocks(places, rng.choice(running)))
        elif found is not None:
            self._walk.do(ops.EvictBlocks(places, "", *found))
        self._walk.finish([])

    def reset(self) -> None:
        self._walk.do(ops.ResetPrefixCache(drain=False))
        self._walk.finish([])

    def drain(self) -> None:
        self._walk.do(ops.ResetPrefixCache(drain=True))
        self._walk.finish([])

    def change_weights(self) -> None:
        self._walk.do(ops.BeginModelEpoch())
        self._walk.finish([])

    def mistake(self) -> None:
        self._walk.do(ops.Mistake(self._walk.rng.choice(sorted(ops.MISTAKES))), may_fail=True)
        self._walk.finish([])
