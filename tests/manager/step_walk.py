"""A random engine that talks to a manager in steps, with a slow model beside it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvcache.manager import KVCacheManager
from kvcache.step import (
    EMPTY_RUNNING,
    NO_SLOT,
    NO_STEP,
    NewRequest,
    ResumedRequest,
    RunningRequests,
    StepRequest,
    StepResult,
)
from tests.manager.slow_model import ModelRequest, SlowModel, Wanted


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass
class Row:
    request_id: str
    rejected: int
    appended: list[int]
    num_new: int
    num_draft: int


@dataclass
class Before:
    """How a client's requests stood before one of its steps, and which ran on in it."""

    step: int
    figures: dict[str, tuple[int, int, int]]
    rows: set[str] = field(default_factory=set)


@dataclass
class Client:
    name: str
    last_step: int = 0
    unfinished: list[Before] = field(default_factory=list)


class StepWalk:
    """Random steps of some clients. Every answer is compared with the model's."""

    def __init__(
        self, manager: KVCacheManager, model: SlowModel, rng: random.Random, num_slots: int
    ) -> None:
        self.manager = manager
        self.model = model
        self.rng = rng
        self.num_slots = num_slots
        self.clients = [Client("a#1"), Client("b#1")]
        self.admissions: dict[str, int] = {}
        self.num_made = 0
        self.num_hit_tokens = 0
        self.num_no_room = 0
        self.num_failures = 0
        self.num_jumps = 0
        self.lookahead = rng.choice([0, 0, 3])
        self.templates = [[rng.randrange(3) for _ in range(48)] for _ in range(3)]
        self.worker: dict[tuple[int, int, int], int] = {}

    # Choosing.

    def prompt(self) -> list[int]:
        template = self.rng.choice(self.templates)
        shared = template[: self.rng.randrange(1, len(template))]
        return shared + [self.rng.randrange(3) for _ in range(self.rng.randrange(6))]

    def row(self, request_id: str, request: ModelRequest) -> Row | None:
        num_drafts = max(0, request.computed - len(request.tokens))
        rejected = self.rng.randint(0, num_drafts)
        is_prefill = request.computed < len(request.tokens)
        num_appended = 0 if is_prefill else num_drafts - rejected + 1
        if len(request.tokens) + num_appended > self.model.max_model_len:
            return None
        appended = [self.rng.randrange(3) for _ in range(num_appended)]
        owned = len(request.tokens) + num_appended - (request.computed - rejected)
        num_new = self.rng.randint(1, owned)
        num_draft = self.rng.choice([0, 0, 1, 2]) if num_new == owned else 0
        num_spare = self.model.max_model_len - len(request.tokens) - num_appended
        num_draft = min(num_draft, self.model.max_drafts, num_spare)
        if num_new == owned and self.model.keeps_states and self.rng.random() < 0.1:
            num_new = num_draft = 0  # only settles
        return Row(request_id, rejected, appended, num_new + num_draft, num_draft)

    def mine(self, client: Client, *, running: bool) -> list[str]:
        return [
            request_id
            for request_id, request in self.model.requests.items()
            if request.client == client.name and (request.slot is not None) == running
        ]

    # One step.

    def step(self, *, may_admit: bool = True, finish_all: bool = False) -> StepResult:
        rng = self.rng
        client = rng.choice(self.clients)
        failed = completed = NO_STEP
        steps = [before.step for before in client.unfinished]
        if steps and rng.random() < 0.12:
            failed = rng.choice(steps)
        elif steps and rng.random() < 0.7:
            completed = rng.choice(steps)
        withdrawn, rolled_back = self._fail(client, failed)
        if completed != NO_STEP:
            self.model.complete(client.name, completed)
            client.unfinished = [b for b in client.unfinished if b.step > completed]
        running = self.mine(client, running=True)
        waiting = self.mine(client, running=False)
        finished = [r for r in running + waiting if finish_all or rng.random() < 0.06]
        staying = [r for r in running if r not in finished]
        preempted = [r for r in staying if rng.random() < 0.05]
        staying = [r for r in staying if r not in preempted]
        chosen = [r for r in staying if rng.random() < 0.8]
        rows = [row for r in chosen if (row := self.row(r, self.model.requests[r])) is not None]
        rng.shuffle(rows)
        resumed = [r for r in waiting if r not in finished and rng.random() < 0.5 and may_admit]
        new = [self._new() for _ in range(rng.choice([0, 0, 1, 2]) if may_admit else 0)]
        client.last_step += rng.choice([1, 1, 2])
        request = StepRequest(
            client.name,
            client.last_step,
            1,
            completed,
            failed,
            tuple(finished),
            tuple(preempted[::2]),
            tuple(preempted[1::2]),
            self._arrays(rows),
            self.lookahead,
            tuple(ResumedRequest(r, rng.randint(1, 40)) for r in resumed),
            tuple(new),
        )
        result = self.manager.step(request)
        assert sorted(result.withdrawn) == sorted(withdrawn)
        self._compare_rolled_back(result, rolled_back)
        self._follow(client, request, rows, result)
        return result

    def _new(self) -> NewRequest:
        self.num_made += 1
        prompt = self.prompt()
        has_encoder = any(group.is_cross for group in self.model.groups)
        return NewRequest(
            f"r{self.num_made}",
            ints(prompt),
            max_new_tokens=self.rng.randint(1, 40),
            num_external_computed_tokens=self.rng.choice([0] * 5 + [len(prompt) // 2]),
            num_encoder_tokens=self.rng.choice([0, 4, 9, 30]) if has_encoder else 0,
            num_lookahead_tokens=self.lookahead,
            cache_salt=self.rng.choice([None, None, None, "salt"]),
            skip_reading_prefix_cache=self.rng.random() < 0.05,
        )

    def _arrays(self, rows: list[Row]) -> RunningRequests:
        if not rows:
            return EMPTY_RUNNING
        tokens = [token for row in rows for token in row.appended]
        offsets = np.cumsum([0] + [len(row.appended) for row in rows])
        return RunningRequests(
            ints([self.model.requests[row.request_id].slot or 0 for row in rows]),
            ints([row.num_new for row in rows]),
            ints([row.num_draft for row in rows]),
            ints([row.rejected for row in rows]),
            offsets.astype(np.int32),
            ints(tokens),
        )

    # What the model makes of it.

    def _fail(self, client: Client, step: int) -> tuple[list[str], dict[int, tuple[int, int]]]:
        if step == NO_STEP:
            return [], {}
        self.num_failures += 1
        model = self.model
        model.fail(client.name, step)
        void = [b for b in client.unfinished if b.step >= step]
        client.unfinished = [b for b in client.unfinished if b.step < step]
        withdrawn: list[str] = []
        rolled_back: dict[int, tuple[int, int]] = {}
        for request_id, request in list(model.requests.items()):
            if request.client != client.name:
                continue
            if request_id not in void[0].figures:
                withdrawn.append(request_id)
                del model.requests[request_id]
                continue
            num_tokens, computed, admissions = void[0].figures[request_id]
            del request.tokens[num_tokens:]
            if request.slot is None:
                continue
            if admissions != self.admissions[request_id]:
                withdrawn.append(request_id)
                model.release(request)
                request.computed = 0
            elif any(request_id in b.rows for b in void):
                if model.keeps_states:
                    withdrawn.append(request_id)
                    model.release(request)
                    request.computed = 0
                    request.num_preemptions += 1
                    continue
                request.computed = computed
                rolled_back[request.slot] = (computed, num_tokens)
        return withdrawn, rolled_back

    def _compare_rolled_back(
        self, result: StepResult, rolled_back: dict[int, tuple[int, int]]
    ) -> None:
        rows = zip(
            result.rolled_back_slots.tolist(),
            result.rolled_back_computed.tolist(),
            result.rolled_back_tokens.tolist(),
            strict=True,
        )
        assert {slot: (computed, tokens) for slot, computed, tokens in rows} == rolled_back

    def _follow(
        self, client: Client, request: StepRequest, rows: list[Row], result: StepResult
    ) -> None:
        model = self.model
        figures = {
            r: (len(m.tokens), m.computed, self.admissions[r])
            for r, m in model.requests.items()
            if m.client == client.name
        }
        before = Before(request.step, figures, {row.request_id for row in rows})
        for request_id in request.finished:
            del model.requests[request_id]
        for request_id in (*request.preempted_recompute, *request.preempted_swap):
            model.release(model.requests[request_id])
            model.requests[request_id].computed = 0
            model.requests[request_id].num_preemptions += 1
        since = model.open_step = (client.name, request.step)
        wanted = [self._settle_row(client, row) for row in rows]
        for i in self._order(rows, wanted):
            self._follow_row(rows[i], wanted[i], bool(result.running_scheduled[i]), since)
        for i, item in enumerate((*request.resumed, *request.new)):
            self._follow_admission(client, item, result, i, since)
        client.unfinished.append(before)
        self._compare(result)

    def _settle_row(self, client: Client, row: Row) -> Wanted:
        """All rows are settled, and free what they skip, before the first one is served."""
        model, request = self.model, self.model.requests[row.request_id]
        settled = request.computed - row.rejected
        # A failure of this step would make accepted drafts drafts again.
        confirmed = min(settled, len(request.tokens))
        for before in client.unfinished:
            if row.request_id in before.rows:
                tokens, computed, admissions = before.figures[row.request_id]
                if admissions == self.admissions[row.request_id]:
                    confirmed = min(confirmed, tokens, computed)
        request.tokens += row.appended
        request.computed = settled
        model.skip(request, confirmed)
        end = settled + row.num_new
        lookahead = self.lookahead if row.num_new else 0
        own = end - row.num_draft if row.num_new else request.num_own
        slots = min(end + lookahead, model.max_model_len)
        return Wanted(slots, confirmed, own, settled - request.num_own)

    def _order(self, rows: list[Row], wanted: list[Wanted]) -> list[int]:
        """Where there is room for all, rows whose tables jump come last."""
        requests = [self.model.requests[row.request_id] for row in rows]
        num_new = sum(map(self.model.num_new, requests, wanted))
        jumps = [self.model.jumps(r, w) for r, w in zip(requests, wanted, strict=True)]
        self.num_jumps += sum(jumps)
        has_room = num_new <= self.model.num_free()
        return sorted(range(len(rows)), key=lambda i: has_room and jumps[i])

    def _follow_row(
        self, row: Row, wanted: Wanted, was_scheduled: bool, since: tuple[str, int]
    ) -> None:
        model, request = self.model, self.model.requests[row.request_id]
        has_room = model.num_wanted(request, wanted)[0] <= model.num_free()
        assert was_scheduled == has_room
        real = self.manager.get_block_ids(row.request_id)
        if not has_room:
            self.num_no_room += 1
            assert request.tables == list(real)
            return
        model.extend(request, real, wanted)
        request.computed += row.num_new
        if row.num_new:
            model.ran(request, wanted.own, row.num_draft)
        model.cache(request, request.computed - row.num_draft, since)

    def _follow_admission(
        self,
        client: Client,
        item: NewRequest | ResumedRequest,
        result: StepResult,
        i: int,
        since: tuple[str, int],
    ) -> None:
        model = self.model
        if isinstance(item, NewRequest):
            request = ModelRequest(item.token_ids.tolist(), item.cache_salt, client.name)
            request.num_encoder = item.num_encoder_tokens
            external = item.num_external_computed_tokens
            reads = not item.skip_reading_prefix_cache
        else:
            request, external = model.requests[item.request_id], 0
            held = self.manager.get_request(item.request_id)
            assert held is not None
            reads = not held.skip_reading_prefix_cache
        hit = model.hit(request, client.name) if reads else 0
        start = min(hit + external, len(request.tokens) - 1)
        num_scheduled = min(item.max_new_tokens, len(request.tokens) - start)
        end = start + num_scheduled
        wanted = Wanted(min(end + self.lookahead, model.max_model_len), start, end)
        has_slot = sum(r.slot is not None for r in model.requests.values()) < self.num_slots
        needed = model.num_wanted(request, wanted, hit, client.name)
        has_room = int(result.admitted_slots[i]) != NO_SLOT
        could = [has_slot and num <= model.num_free() for num in needed]
        assert has_room in could, item
        assert (item.request_id in result.no_room) == (not has_room)
        if not has_room:
            self.num_no_room += 1
            return
        assert int(result.num_hit_tokens[i]) == hit
        assert int(result.num_scheduled_tokens[i]) == num_scheduled
        self.num_hit_tokens += hit
        real = self.manager.get_block_ids(item.request_id)
        model.adopt(request, hit, real, client.name, skip=start)
        model.requests[item.request_id] = request
        model.extend(request, real, wanted)
        request.slot = int(result.admitted_slots[i])
        request.computed = end
        model.ran(request, end, 0)
        model.cache(request, end, since)
        self.admissions[item.request_id] = self.admissions.get(item.request_id, 0) + 1

    def _compare(self, result: StepResult) -> None:
        """Everything that can be seen from outside is as the model has it."""
        self._apply_patches(result)
        statistics = self.manager.statistics()
        assert statistics.core.num_free_blocks == self.model.num_free()
        running = [r for r in self.model.requests.values() if r.slot is not None]
        assert statistics.num_running_requests == len(running)
        assert len({r.slot for r in running}) == len(running)
        for request_id, request in self.model.requests.items():
            held = self.manager.get_request(request_id)
            assert held is not None
            assert held.all_token_ids.tolist() == request.tokens
            assert held.num_computed_tokens == min(request.computed, len(request.tokens))
            assert held.num_preemptions == request.num_preemptions
            assert self.manager.slot_of(request_id) == request.slot
            for g, table in enumerate(request.tables):
                seen = [self.worker.get((request.slot or 0, g, i)) for i in range(len(table))]
                assert [b for b in table if b] == [s for s, b in zip(seen, table, strict=True) if b]
        self.manager.check()

    def _apply_patches(self, result: StepResult) -> None:
        patch = result.patches
        start = 0
        for slot, group, first, count in zip(
            patch.slots.tolist(),
            patch.groups.tolist(),
            patch.first_indices.tolist(),
            patch.counts.tolist(),
            strict=True,
        ):
            for i, block in enumerate(patch.block_ids[start : start + count].tolist()):
                self.worker[slot, group, first + i] = block
            start += count
        assert start == len(patch.block_ids)
