"""Random work on a core, damage to its ranks' labels, and cores rebuilt from the rest."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvcache.core import AllBlocksCleared, BlocksStored, CoreSettings, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.protocol.commands import Command
from kvcache.protocol.labels import BlockLabel, LabelSet
from kvcache.requests.hashing import get_request_block_hasher
from kvcache.requests.request import Request
from kvcache.requests.request_content import namespace_name
from tests.agreement.configurations import Configuration, Family, Operation
from tests.agreement.content import Origin
from tests.agreement.walk import FLAT_ALONE, Walk
from tests.core.builders import NONE_HASH, EventLog, eviction_order, plan
from tests.rebuild.model import HASH_FN, Name, RebuildModel
from tests.rebuild.ranks import Ranks
from tests.walks import random_walk

NUM_RANKS = 3

REST = 18
"""Operations between rebuilds."""


class RebuildWalk:
    """Walks of the agreement suite on one core, interrupted by rebuilds."""

    def __init__(
        self,
        configuration: Configuration,
        family: Family,
        seed: int,
        patch: pytest.MonkeyPatch,
    ) -> None:
        self.rng = random.Random(f"{configuration.name} {family.name} {seed}")
        self.configuration = configuration
        self.walk = Walk(configuration, family, seed, FLAT_ALONE)
        self.manager = self.walk.sides[0].manager
        self.model = RebuildModel(configuration.specs, configuration.use_eagle)
        self.num_blocks = self.manager.statistics().core.num_blocks + 1
        longest = max(spec.block_size for spec in configuration.specs)
        self.ranks = Ranks(NUM_RANKS, self.num_blocks, longest)
        self.seen: dict[tuple[Origin, tuple[int, ...]], None] = {}
        self.num_kept = self.num_dropped = self.num_hits = 0
        take_commands = self.manager.take_commands

        def tapped() -> list[Command]:
            commands = take_commands()
            self.ranks.obey(commands)
            return list(commands)

        patch.setattr(self.manager, "take_commands", tapped)

    def go(self, num_operations: int) -> None:
        """Work, and sometimes rebuild."""
        for _ in range(num_operations // REST):
            random_walk(
                self.walk.title, self.walk.rng, self.walk.operations(), REST, self.note_prompts
            )
            self.rebuild()
        self.walk.audits.make()

    def note_prompts(self) -> None:
        for request in self.walk.engine.live.values():
            self.seen[request.origin, tuple(request.tokens)] = None
        self.seen.update(dict.fromkeys(self.walk.prompts.library))

    def rebuild(self) -> None:
        """Rebuild a core, from ranks that agree completely, and from ranks that do not."""
        for num_damaged in (0, self.rng.randint(1, 12)):
            damaged = self.ranks.copy()
            damaged.damage(self.rng, num_damaged)
            labels = list(damaged.collect()[0])
            kept = self.restored(damaged)
            if not num_damaged:
                self.require_all(labels, kept)

    def require_all(self, labels: Sequence[BlockLabel], kept: dict[Name, int]) -> None:
        """Check that all useful sealed blocks on which ranks agree are kept.

        With tenants or hints, a window block may outlive the full-attention block that ends there,
        and its label those before it: nothing can hit it, and no label tells its place. The same
        holds for a window block or state that is sealed while full-attention blocks of another
        client's step before it are not.
        """
        groups = self.model.groups
        operations = self.configuration.operations
        is_plain = self.configuration.tenants is None and Operation.HINTS not in operations
        if self.is_complete and is_plain:
            assert len(labels) == self.manager.statistics().core.num_sealed_blocks
            ends = {(b.namespace, b.digest) for b in labels if groups[b.group].is_ordered}
            is_placed = [not ends or (b.namespace, b.digest) in ends for b in labels]
            assert len(kept) == sum(is_placed)
        elif self.is_complete or Operation.IMAGES not in operations:
            assert sum(groups[name[0]].is_ordered for name in kept) == sum(
                groups[label.group].is_ordered for label in labels
            )

    @property
    def is_complete(self) -> bool:
        """Return whether every unit has a label that stays as long as all after it."""
        sizes = [spec.block_size for spec in self.configuration.specs if spec.reads_whole_prefix]
        return not self.model.can_hit or sizes == [self.model.unit]

    def require_tails_first(self, some: FlatCore, labels: LabelSet, kept: dict[Name, int]) -> None:
        """Blocks that continue a prefix-group block are evicted before it."""
        turns = {block: turn for turn, block in enumerate(eviction_order(some))}
        assert turns.keys() == set(kept.values())
        for label in labels:
            above = kept.get((label.group, label.namespace, label.parent_digest))
            is_kept = label.block_id in turns and self.model.groups[label.group].is_ordered
            assert not is_kept or above is None or turns[label.block_id] < turns[above]

    def restored(self, ranks: Ranks) -> dict[Name, int]:
        """Rebuild a core, compare it with the model, continue, and rebuild it once more."""
        some, log = self.make_core()
        kept = self.compare(some, log, ranks)
        self.work(some, ranks)
        again, log = self.make_core()
        num_sealed = some.statistics().num_sealed_blocks
        kept_again = self.compare(again, log, ranks)
        if self.is_complete:
            assert len(kept_again) == num_sealed
        return kept

    def compare(self, some: FlatCore, log: EventLog, ranks: Ranks) -> dict[Name, int]:
        """Rebuild an empty core; everything visible must match the model."""
        label_sets = ranks.collect()
        kept = self.model.kept(label_sets)
        labelled = {b for each in label_sets for b in each.labels.block_ids.tolist()}
        assert some.cache.restore(label_sets) == len(kept)
        some.check()
        ranks.obey(some.take_commands())
        for table in ranks.tables:
            left = table.collect(0, 1, 1, "layout").labels.block_ids.tolist()
            assert sorted(left) == sorted(kept.values())
        statistics = some.statistics()
        assert statistics.num_sealed_blocks == statistics.num_cached_blocks == len(kept)
        assert some.cache.num_free_blocks() == self.num_blocks - 1
        self.require_tails_first(some, label_sets[0], kept)
        self.compare_events(log, kept)
        for request in self.requests():
            expected = self.model.hit(request, kept)
            assert [ids.tolist() for ids in some.cache.look_up(request).block_ids] == expected
            self.num_hits += any(expected)
        self.num_kept += len(kept)
        self.num_dropped += len(labelled) - len(kept)
        return kept

    def compare_events(self, log: EventLog, kept: dict[Name, int]) -> None:
        """Check the events: cleared, then the whole state, parents first."""
        cleared, *stored = log.take()
        assert cleared == AllBlocksCleared()
        told: set[Name] = set()
        for event in stored:
            assert isinstance(event, BlocksStored)
            name = namespace_name(event.namespace)
            is_ordered = self.model.groups[event.group].is_ordered
            parent = NONE_HASH if event.parent_digest is None else event.parent_digest
            assert not is_ordered or parent == NONE_HASH or (event.group, name, parent) in told
            assert len(event.token_ids) == len(event.digests) * event.block_size
            told.update((event.group, name, digest) for digest in event.digests)
        assert told == set(kept)

    def work(self, some: FlatCore, ranks: Ranks) -> None:
        """Serve some sequences again, in steps, the last of them incomplete."""
        running: list[Request] = []
        for step, request in enumerate(self.requests()):
            some.open_step("engine", step)
            hit = some.cache.look_up(request)
            end = request.num_tokens
            wanted = self.rng.choice([end, max(hit.num_tokens, end - 3)])
            reservation = Reservation(hit.num_tokens, wanted, wanted)
            if some.reserve(request, reservation, hit) is not None:
                running.append(request)
            while running and self.rng.random() < 0.6:
                some.free(running.pop(self.rng.randrange(len(running))))
            if step > 2:
                some.complete_steps("engine", step - 2)
            some.close_step()
            ranks.obey(some.take_commands())
        some.check()

    def make_core(self) -> tuple[FlatCore, EventLog]:
        """Return an empty core and its event sink."""
        configuration, log = self.configuration, EventLog()
        config = plan(self.num_blocks, *configuration.specs)
        settings = CoreSettings(
            config,
            NONE_HASH,
            HASH_FN,
            enable_caching=configuration.enable_caching,
            use_eagle=configuration.use_eagle,
            events=log,
            publish_all_groups=True,
        )
        return FlatCore(settings), log

    def requests(self) -> Sequence[Request]:
        """Return requests for some earlier sequences, cut anywhere."""
        found = []
        chosen = self.rng.sample(list(self.seen), min(12, len(self.seen)))
        for number, (origin, tokens) in enumerate(chosen):
            end = self.rng.choice([len(tokens), self.rng.randint(1, len(tokens))])
            while origin.crosses_image(end):
                end -= 1
            request = origin.cut(end).request(
                f"again {number}", tokens[:end], self.manager.model_epoch
            )
            request.attach_block_hasher(get_request_block_hasher(self.model.unit, HASH_FN))
            found.append(request)
        return found
