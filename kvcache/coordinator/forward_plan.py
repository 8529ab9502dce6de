"""The content-checked forward of a step: the bytes that every rank must find and write.

Used between the manager's answer and the message to the workers, with content checking. Keeps for
each running row how far it is computed and which of its tokens the ranks have, so that a decode
step sends one token per row. Decides nothing: it follows the manager's answers.

    verify [0, computed) of rows that go ──▶ write [start, start + count) of rows that run
                                             verify [0, start) of rows that come (their hit)

Rows that a failed step withdraws are not verified: it is not known whether a forward has
overwritten their states.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.errors import InvariantError
from kvcache.protocol.commands import WriteExpected
from kvcache.protocol.step import NO_SLOT, NO_STEP, StepRequest, StepResult
from kvcache.requests.request import MAX_TOKEN_ID, Request

RequestLookup = Callable[[str], Request | None]


@dataclass(frozen=True)
class _Before:
    """A row before an unfinished step, None if the step admitted it."""

    step: int
    counts: tuple[int, int, int] | None


@dataclass(frozen=True)
class _Encoder:
    """A request's encoder tokens; it gets them again when it is resumed, and its forks share them.

    `key` is empty if there are none.
    """

    client_id: str
    num_tokens: int
    key: bytes


_NO_ENCODER = _Encoder("", 0, b"")


@dataclass
class _Row:
    """One running row, as the ranks know it.

    `num_computed` positions are written or will be, including drafts; the ranks have `num_told` of
    its own tokens; the first `num_right` positions hold the bytes of the last sent tokens.
    """

    request_id: str
    client_id: str
    num_computed: int = 0
    num_told: int = 0
    num_right: int = 0
    before: deque[_Before] = field(default_factory=deque)

    def remember(self, step: int, completed_step: int, is_new: bool = False) -> None:
        """Remember the present state in case `step` fails."""
        while self.before and self.before[0].step <= completed_step:
            self.before.popleft()
        counts = None if is_new else (self.num_computed, self.num_told, self.num_right)
        self.before.append(_Before(step, counts))

    def take_back(self, from_step: int) -> bool:
        """Undo the steps from `from_step` on; return whether the row existed before them."""
        lowest_write = self.num_right
        while self.before and self.before[-1].step >= from_step:
            counts = self.before.pop().counts
            if counts is None:
                return False
            self.num_computed, self.num_told, num_right = counts
            lowest_write = min(lowest_write, num_right, self.num_told)
        self.num_right = lowest_write
        return True


@dataclass(frozen=True, eq=False)
class _Write:
    """A row of a `WriteExpected`: it writes `span`, and sends `tokens`, the first at `told`. The
    content key of a new row is never empty."""

    slot: int
    span: tuple[int, int]
    told: int
    tokens: Int32Array
    num_drafts: int = 0
    content_key: bytes = b""
    num_external_tokens: int = 0
    encoder: _Encoder = _NO_ENCODER


class ForwardPlanner:
    """Makes the content-checked forwards of all clients' steps, in the order of the steps."""

    def __init__(self, lookup: RequestLookup) -> None:
        """Create it; `lookup` returns a known request with all its tokens."""
        self._lookup = lookup
        self._rows: dict[int, _Row] = {}
        self._slots: dict[str, int] = {}
        self._encoders: dict[str, _Encoder] = {}  # of requests that run or are preempted

    def plan(self, request: StepRequest, result: StepResult, job_id: int) -> WriteExpected:
        """Return the forward of a step that the manager has just answered, and remember it."""
        if request.failed_step != NO_STEP:
            self._take_back(request.client_id, request.failed_step, result.withdrawn)
        verify_slots, verify_lengths = self._let_go(request)
        rows = [
            *self._fork(request, result),
            *self._run_on(request, result),
            *self._admit(request, result),
        ]
        encoders = [row.encoder for row in rows]
        return WriteExpected(
            job_id=job_id,
            verify_slots=int32_array(verify_slots),
            verify_lengths=int32_array(verify_lengths),
            slots=int32_array([row.slot for row in rows]),
            is_new=int32_array([bool(row.content_key) for row in rows]),
            starts=int32_array([row.span[0] for row in rows]),
            counts=int32_array([row.span[1] - row.span[0] for row in rows]),
            token_starts=int32_array([row.told for row in rows]),
            token_counts=int32_array([len(row.tokens) for row in rows]),
            token_ids=np.concatenate([EMPTY_INT32, *(row.tokens for row in rows)]),
            content_keys=tuple(row.content_key for row in rows),
            external_counts=_if_any([row.num_external_tokens for row in rows]),
            draft_counts=_if_any([row.num_drafts for row in rows]),
            encoder_counts=_if_any([encoder.num_tokens for encoder in encoders]),
            encoder_keys=tuple(e.key for e in encoders) if any(e.key for e in encoders) else (),
        )

    def forget_client(self, client_id: str) -> None:
        """Drop the rows of a client that has gone."""
        for slot in [s for s, row in self._rows.items() if row.client_id == client_id]:
            self._drop(slot)
        for request_id in [r for r, e in self._encoders.items() if e.client_id == client_id]:
            del self._encoders[request_id]

    def _take_back(self, client_id: str, from_step: int, withdrawn: Sequence[str]) -> None:
        for slot, row in list(self._rows.items()):
            if row.client_id == client_id and not row.take_back(from_step):
                self._drop(slot)
        for request_id in withdrawn:
            if request_id in self._slots:
                self._drop(self._slots[request_id])
            if self._lookup(request_id) is None:
                self._encoders.pop(request_id, None)

    def _let_go(self, request: StepRequest) -> tuple[list[int], list[int]]:
        """Drop rows that finish or are preempted; return what to verify of them."""
        slots, lengths = [], []
        for ids in (request.finished, request.preempted_recompute, request.preempted_swap):
            for request_id in ids:
                slot = self._slots.get(request_id)
                if slot is not None:
                    slots.append(slot)
                    lengths.append(self._rows[slot].num_right)
                    self._drop(slot)
        for request_id in request.finished:
            self._encoders.pop(request_id, None)
        return slots, lengths

    def _fork(self, request: StepRequest, result: StepResult) -> Iterator[_Write]:
        """Yield the children of forks: they write nothing yet, and all they share is compared."""
        for fork, slot in zip(request.forks, result.forked_slots.tolist(), strict=True):
            if slot == NO_SLOT:
                continue
            known = self._request(fork.child_id)
            parent = self._rows[self._slots[fork.parent_id]]
            end = min(parent.num_computed, known.num_tokens)
            row = _Row(fork.child_id, request.client_id)
            row.remember(request.step, request.completed_step, is_new=True)
            row.num_computed = row.num_told = row.num_right = end
            self._rows[slot], self._slots[fork.child_id] = row, slot
            if fork.parent_id in self._encoders:
                self._encoders[fork.child_id] = self._encoders[fork.parent_id]
            yield self._new_row(slot, (end, end), known)

    def _run_on(self, request: StepRequest, result: StepResult) -> Iterator[_Write]:
        running = request.running
        draft_end = 0
        columns: Iterator[tuple[int, int, int, int, int]] = zip(
            running.slots.tolist(),
            running.num_new_tokens.tolist(),
            running.num_draft_tokens.tolist(),
            running.num_rejected_tokens.tolist(),
            result.running_scheduled.tolist(),
            strict=True,
        )
        for slot, num_new, num_draft, num_rejected, is_scheduled in columns:
            draft_end += num_draft
            row = self._rows[slot]
            row.remember(request.step, request.completed_step)
            row.num_computed -= num_rejected
            row.num_right = min(row.num_right, row.num_computed)
            if not is_scheduled or not num_new:
                continue
            start, end = row.num_computed, row.num_computed + num_new
            own_end = end - num_draft
            told = min(row.num_told, start)
            tokens = content_tokens(self._request(row.request_id), told, own_end)
            if num_draft:
                drafts = running.draft_token_ids[draft_end - num_draft : draft_end]
                tokens = np.concatenate((tokens, drafts))
            row.num_computed = row.num_right = end
            row.num_told = own_end
            yield _Write(slot, (start, end), told, tokens, num_draft)

    def _admit(self, request: StepRequest, result: StepResult) -> Iterator[_Write]:
        """Yield new rows. External tokens are written too, as no forward writes them."""
        names = [r.request_id for r in request.resumed] + [r.request_id for r in request.new]
        external = [0] * len(request.resumed)
        external += [r.num_external_computed_tokens for r in request.new]
        encoders = {r.request_id: r.num_encoder_tokens for r in request.new}
        for i, slot in enumerate(result.admitted_slots.tolist()):
            if slot == NO_SLOT:
                continue
            known = self._request(names[i])
            start = int(result.num_hit_tokens[i])
            # The last token is always computed, so external ones never reach the end.
            first = min(start + external[i], known.num_tokens - 1)
            end = first + int(result.num_scheduled_tokens[i])
            row = _Row(names[i], request.client_id)
            row.remember(request.step, request.completed_step, is_new=True)
            row.num_computed = row.num_told = row.num_right = end
            self._rows[slot], self._slots[names[i]] = row, slot
            if names[i] in encoders:
                num_tokens = encoders[names[i]]
                key = encoder_key(known) if num_tokens else b""
                self._encoders[names[i]] = _Encoder(request.client_id, num_tokens, key)
            yield self._new_row(slot, (start, end), known, first - start)

    def _new_row(
        self, slot: int, span: tuple[int, int], known: Request, num_external_tokens: int = 0
    ) -> _Write:
        """Return a new row, which sends all of its tokens."""
        return _Write(
            slot,
            span,
            0,
            content_tokens(known, 0, span[1]),
            content_key=content_key(known),
            num_external_tokens=num_external_tokens,
            encoder=self._encoders.get(known.request_id, _NO_ENCODER),
        )

    def _request(self, request_id: str) -> Request:
        request = self._lookup(request_id)
        if request is None:
            raise InvariantError(f"request {request_id} runs, but the manager does not know it")
        return request

    def _drop(self, slot: int) -> None:
        row = self._rows.pop(slot)
        del self._slots[row.request_id]


def content_key(request: Request) -> bytes:
    """Return a key that distinguishes contents with equal tokens: never empty."""
    space = request.namespace
    return json.dumps([space.model_epoch, space.lora, space.salt, space.tenant]).encode()


def encoder_key(request: Request) -> bytes:
    """Return the key of a request's encoder tokens: only its forks share it."""
    return json.dumps([content_key(request).decode(), request.request_id]).encode()


def content_tokens(request: Request, start: int, end: int) -> Int32Array:
    """Return the tokens `[start, end)` with placeholders of images replaced by ids of the image.

    So the content depends on an image exactly from its first placeholder on, and a block's digest
    exactly from the block that the image touches.
    """
    tokens = request.all_token_ids[start:end]
    for position, mm_hash in zip(request.mm_positions, request.mm_hashes, strict=True):
        first, last = max(position.offset, start), min(position.end, end)
        if first < last:
            tokens = tokens.copy() if not tokens.flags.writeable else tokens
            base = int.from_bytes(blake2b(mm_hash.encode(), digest_size=8).digest(), "big")
            offsets = np.arange(first - position.offset, last - position.offset, dtype=np.int64)
            ids = (base % MAX_TOKEN_ID + offsets * 7919) % MAX_TOKEN_ID
            tokens[first - start : last - start] = ids
    return tokens


def _if_any(counts: list[int]) -> Int32Array:
    """Return `counts`, or an empty array if all are 0."""
    return int32_array(counts) if any(counts) else EMPTY_INT32
