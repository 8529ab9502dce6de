"""Random batched steps: which rows run, and which requests arrive, end, fork or fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.protocol.step import (
    EMPTY_RUNNING,
    NO_STEP,
    Fork,
    NewRequest,
    RequestHints,
    ResumedRequest,
    RunningRequests,
    StepRequest,
)
from tests.agreement.configurations import Operation
from tests.agreement.content import Origin
from tests.agreement.engine import Client, Live, Row
from tests.agreement.operations import Step

if TYPE_CHECKING:
    from tests.agreement.walk import Walk


class StepChoice:
    """Chooses and applies the steps of a walk."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._rng = walk.rng
        self._origins: dict[str, Origin] = {}

    def row(self, request: Live) -> Row | None:
        """Return how a request could continue; None at the model's maximum length."""
        walk, rng, configuration = self._walk, self._rng, self._walk.configuration
        num_accepted = request.num_accepted
        if num_accepted is None:
            num_accepted = rng.randint(0, request.num_drafts)
        appended: tuple[int, ...] = ()
        if request.computed >= len(request.tokens):
            appended = request.drafts[:num_accepted]
            appended += walk.prompts.output([*request.tokens, *appended], 1)
        num_tokens = len(request.tokens) + len(appended)
        num_rejected = request.num_drafts - num_accepted
        owned = num_tokens - (request.computed - num_rejected)
        if num_tokens > configuration.max_model_len:
            return None
        num_new = rng.choice([owned, rng.randint(1, owned)])
        num_drafts = 0
        if num_new == owned and walk.allows(Operation.DRAFTS, 0.4):
            num_spare = configuration.max_model_len - num_tokens
            num_drafts = min(rng.randint(1, 3), configuration.max_drafts, num_spare)
        if num_new == owned and rng.random() < 0.05:
            num_new = num_drafts = 0  # only settles
        drafts = walk.prompts.output([*request.tokens, *appended], num_drafts)
        return Row(request.name, num_rejected, appended, num_new, drafts)

    def decode(self) -> None:
        """Choose some steps in which the running requests run, and no others come or go."""
        for _ in range(self._rng.randint(3, 9)):
            self.step(is_calm=True)

    def step(self, *, is_calm: bool = False) -> None:
        """Choose, apply and follow a step of a client; in a calm one, rows only run."""
        walk, rng, engine = self._walk, self._rng, self._walk.engine
        client = engine.clients[0]
        if walk.allows(Operation.CLIENTS, 0.4):
            client = engine.clients[1]
        failed, completed, taken_back = self._settle(client)
        running = engine.of(client.name, running=True)
        waiting = engine.of(client.name, running=False)
        finished = [r for r in running + waiting if not is_calm and rng.random() < 0.12]
        staying = [r for r in running if r not in finished]
        preempted = [r for r in staying if not is_calm and walk.allows(Operation.PREEMPTION, 0.07)]
        staying = [r for r in staying if r not in preempted]
        waiting = [r for r in waiting if r not in finished]
        new: list[NewRequest] = []
        resumed: list[ResumedRequest] = []
        if not is_calm:
            resumed = [
                ResumedRequest(r.name, walk.max_new()) for r in waiting if rng.random() < 0.5
            ]
            new = [self._new() for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
        if completed != NO_STEP:
            engine.complete(client, completed)
        rows, forks = self._runners(staying, may_fork=not is_calm)
        number = client.last_step + rng.choice([1, 1, 2])
        request = StepRequest(
            client.name,
            number,
            1,
            completed,
            failed,
            tuple(r.name for r in finished),
            tuple(r.name for r in preempted[::2]),
            tuple(r.name for r in preempted[1::2]),
            self._arrays(rows),
            walk.num_lookahead(),
            tuple(resumed),
            tuple(new),
            tuple(Fork(parent, child) for parent, child in forks),
            self._hints([*finished, *preempted, *staying, *waiting]),
        )
        for r in finished:
            walk.remember(r)
        facts = walk.do(Step(request, _line(request, rows)))
        for what, expected in taken_back.items():
            assert facts[what] == expected, f"{what}: {facts[what]}, not {expected}"
        engine.begin_step(client, number, rows)
        for r in finished:
            del engine.live[r.name]
        for r in preempted:
            r.leave()
        items: list[ResumedRequest | NewRequest] = [*resumed, *new]
        walk.finish(engine.follow_step(client, rows, items, self._origins, forks, facts))
        for item in new:
            if item.request_id in engine.live:
                walk.remember(engine.live[item.request_id])

    def _hints(self, known: list[Live]) -> tuple[RequestHints, ...]:
        """Choose new hints of known requests."""
        walk = self._walk
        return tuple(
            [RequestHints(r.name, walk.hints()) for r in known if walk.allows(Operation.HINTS, 0.3)]
        )

    def _settle(self, client: Client) -> tuple[int, int, dict[str, object]]:
        """Choose which steps have failed or completed; roll back failed ones."""
        walk, rng, engine = self._walk, self._rng, self._walk.engine
        steps = [before.step for before in client.unfinished]
        nothing: dict[str, object] = {"withdrawn": [], "rolled back": []}
        if steps and walk.allows(Operation.FAILURES, 0.12):
            failed = rng.choice(steps)
            return failed, NO_STEP, engine.fail(client, failed)
        completed = NO_STEP
        if steps and not walk.allows(Operation.PIPELINE, 0.3):
            completed = rng.choice(steps) if walk.allows(Operation.PIPELINE, 0.5) else steps[-1]
        return NO_STEP, completed, nothing

    def _new(self) -> NewRequest:
        walk = self._walk
        skips = walk.allows(Operation.SKIPPED_READING, 0.05)
        origin, tokens = walk.prompts.prompt()
        external = 0
        if len(tokens) > 1 and walk.allows(Operation.EXTERNAL, 0.15):
            external = self._rng.randrange(1, len(tokens))
        new = NewRequest(
            walk.name(),
            int32_array(tokens),
            walk.max_new(),
            num_external_computed_tokens=external,
            num_lookahead_tokens=walk.num_lookahead(),
            lora_name=origin.lora,
            lora_path=None if origin.lora is None else f"/{origin.lora}",
            mm_hashes=tuple(image.digest for image in origin.images),
            mm_offsets=int32_array([image.offset for image in origin.images]),
            mm_lengths=int32_array([image.length for image in origin.images]),
            cache_salt=origin.salt,
            tenant=origin.tenant,
            skip_reading_prefix_cache=skips,
            num_encoder_tokens=walk.num_encoder(),
            delay_cache_blocks=walk.allows(Operation.DELAYED_CACHING, 0.1),
            hints=walk.hints(),
        )
        self._origins[new.request_id] = origin
        walk.prompts.remember(origin, list(tokens))
        return new

    def _runners(
        self, staying: list[Live], *, may_fork: bool
    ) -> tuple[list[Row], list[tuple[str, str]]]:
        walk, rng = self._walk, self._rng
        chosen = [r for r in staying if rng.random() < 0.8]
        rows = [row for r in chosen if (row := self.row(r)) is not None]
        rng.shuffle(rows)
        forks = [
            (r.name, walk.name())
            for r in staying
            if may_fork and walk.allows(Operation.FORKS, 0.08)
        ]
        return rows, forks

    def _arrays(self, rows: list[Row]) -> RunningRequests:
        if not rows:
            return EMPTY_RUNNING
        slots = [self._walk.engine.live[row.name].slot for row in rows]
        return RunningRequests.from_rows(
            [row.in_slot(slot) for row, slot in zip(rows, slots, strict=True) if slot is not None]
        )


def _line(request: StepRequest, rows: list[Row]) -> str:
    """Return a step's line in the log."""
    new = [
        f"{n.request_id}{n.token_ids.tolist()} max_new={n.max_new_tokens} "
        f"external={n.num_external_computed_tokens} salt={n.cache_salt} lora={n.lora_name} "
        f"tenant={n.tenant} images={np.stack((n.mm_offsets, n.mm_lengths)).tolist()} "
        f"skips={n.skip_reading_prefix_cache} delays={n.delay_cache_blocks} hints={n.hints}"
        for n in request.new
    ]
    return (
        f"{request.client_id} step {request.step} completed={request.completed_step} "
        f"failed={request.failed_step} finished={request.finished} "
        f"preempted={request.preempted_recompute + request.preempted_swap} rows={rows} "
        f"lookahead={request.num_lookahead_tokens} resumed={request.resumed} "
        f"forks={request.forks} hints={request.hints} new={new}"
    )
