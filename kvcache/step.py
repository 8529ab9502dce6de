"""What an engine asks in one scheduling step, and what it gets.

The engine picks whom to run and whom to preempt; the manager assigns slots and blocks and says who
found no room. All of a step travels in one `StepRequest`, arrays in, arrays out.

    engine ──StepRequest(step n)──▶ manager: settle completed/failed steps, free finished and
                                    preempted, extend running rows, resume, admit new requests
           ◀─StepResult(step n)───

Steps may be pipelined: n+1 may be sent while the forward of n runs. Refuses to decide: this module
is data. Validation is the manager's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.commands import EMPTY_PATCH, BlockTablePatch

NO_STEP = -1
"""`completed_step` when there is nothing to report; `failed_step` when none failed."""

NO_SLOT = -1
"""`StepResult.admitted_slots` where a request was not admitted."""


@dataclass(frozen=True, eq=False)
class NewRequest:
    """A request the manager does not know yet, and what may be computed of it now.

    `token_ids` is the whole prompt. Of the tokens behind its cache hit at most `max_new_tokens`
    are scheduled in this step, and at least one. A request that finds no room leaves no trace: it
    is sent again, whole, when the engine wants to try again. `num_encoder_tokens` are those of
    the encoder whose output it reads, for models that have one; they are known from then on.
    With `delay_cache_blocks` nothing of this step becomes hittable; what its next step schedules
    does, and everything before it.
    """

    request_id: str
    token_ids: Int32Array
    max_new_tokens: int
    num_external_computed_tokens: int = 0
    num_lookahead_tokens: int = 0
    lora_name: str | None = None
    lora_path: str | None = None
    mm_hashes: tuple[str, ...] = ()
    mm_offsets: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    mm_lengths: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    cache_salt: str | None = None
    tenant: str | None = None
    skip_reading_prefix_cache: bool = False
    num_encoder_tokens: int = 0
    delay_cache_blocks: bool = False


@dataclass(frozen=True)
class ResumedRequest:
    """A preempted request that wants to run again; its tokens are known from before."""

    request_id: str
    max_new_tokens: int


@dataclass(frozen=True)
class Fork:
    """A running request of this client, and the id of a new one that shares what it has computed.

    The child has the parent's tokens, is of its content (LoRA, salt, images), and takes a slot but
    no block. It is a running row from the next step on.
    """

    parent_id: str
    child_id: str


@dataclass(frozen=True)
class RunningRow:
    """One row of `RunningRequests`, where the names are explained, for who thinks in rows."""

    slot: int
    num_new_tokens: int
    token_ids: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    num_rejected_tokens: int = 0


@dataclass(frozen=True, eq=False)
class RunningRequests:
    """Rows that run on, as arrays. Row `i` is the request in slot `slots[i]`, each slot once.

    First the row is settled: `num_rejected_tokens[i]` draft positions computed before are taken
    back, then `token_ids[token_offsets[i]:token_offsets[i + 1]]` are appended (accepted drafts and
    the sampled token). Then `num_new_tokens[i]` positions are scheduled, of which the last
    `num_draft_tokens[i]` are drafts that the request does not own yet. `draft_token_ids` are their
    ids in order of rows; only content checking needs them, otherwise it may be left empty.
    Shapes: `(n,)`, `token_offsets` `(n + 1,)`, `token_ids` `(token_offsets[n],)`.
    """

    slots: Int32Array
    num_new_tokens: Int32Array
    num_draft_tokens: Int32Array
    num_rejected_tokens: Int32Array
    token_offsets: Int32Array
    token_ids: Int32Array
    draft_token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)

    @classmethod
    def from_rows(cls, rows: Sequence[RunningRow]) -> RunningRequests:
        """Return the arrays for `rows`, in order. Engines with many rows keep arrays themselves."""
        counts = [len(row.token_ids) for row in rows]
        return cls(
            slots=int32_array([row.slot for row in rows]),
            num_new_tokens=int32_array([row.num_new_tokens for row in rows]),
            num_draft_tokens=int32_array([row.num_draft_tokens for row in rows]),
            num_rejected_tokens=int32_array([row.num_rejected_tokens for row in rows]),
            token_offsets=int32_array(np.cumsum([0, *counts])),
            token_ids=int32_array([token for row in rows for token in row.token_ids]),
        )


EMPTY_RUNNING = RunningRequests(
    EMPTY_INT32, EMPTY_INT32, EMPTY_INT32, EMPTY_INT32, np.zeros(1, dtype=np.int32), EMPTY_INT32
)
"""No row runs on."""


@dataclass(frozen=True, eq=False)
class StepRequest:
    """One scheduling step of one client.

    `(client_id, step)` identifies it: a repeated number gets the stored answer. `step` counts
    1, 2, 3, ... and never restarts while the client lives. `epoch` is the one the client attached
    in; in another one the request is refused. `completed_step`: every step up to this one is
    complete on every rank, its bytes are there. `failed_step`: this step and all later ones that
    were scheduled are void, as if never asked for, except that finished and preempted requests
    stay gone. It is sent only when no rank can still begin or run any of them. Rows that those
    steps admitted, or ran in a model that keeps states, are gone with them (`withdrawn`): a step
    that reports a failure does not name them as running.

    Order of effects: failed_step, completed_step, finished, preempted, forks, running, resumed,
    new. A fork shares what its parent has before this step's tokens are appended.
    An idle engine sends an empty request, so that its last step is sealed. A cluster's client
    fills in `client_id`, `step` and `epoch`.
    """

    client_id: str = ""
    step: int = 0
    epoch: int = 0
    completed_step: int = NO_STEP
    failed_step: int = NO_STEP
    finished: tuple[str, ...] = ()
    preempted_recompute: tuple[str, ...] = ()
    preempted_swap: tuple[str, ...] = ()
    running: RunningRequests = EMPTY_RUNNING
    num_lookahead_tokens: int = 0
    resumed: tuple[ResumedRequest, ...] = ()
    new: tuple[NewRequest, ...] = ()
    forks: tuple[Fork, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A request that asking again will not help, because of its tenant's limit.

    `tenant` is as in statistics: empty for requests that name none, a hash where tenants are told
    by salt. The request needs `num_blocks` blocks of the device at least, of all groups, and the
    tenant never has more than `limit_blocks`. `reason` says so, and what would help.
    """

    request_id: str
    tenant: str
    num_blocks: int
    limit_blocks: int
    reason: str


@dataclass(frozen=True, eq=False)
class StepResult:
    """The answer to one `StepRequest`.

    All or nothing per request. Admitted are the resumed requests followed by the new ones, in the
    order of the step request: `admitted_slots[i]` is the slot, or `NO_SLOT`; `num_hit_tokens[i]`
    were found in the cache; `num_scheduled_tokens[i]` are to be computed now, from position
    `num_hit_tokens[i] + external` on. `running_scheduled[i]` is 1 where running row `i` got its
    blocks, 0 where there was no room (its tokens were appended, nothing of it runs).
    `forked_slots[i]` is the slot of fork `i`'s child, `NO_SLOT` where none was free.
    `no_room` names requests without room, children of forks too, `waiting_for_load` those whose
    hit is being loaded, `retry_later` those whose look-up has no answer yet. `refused` says which
    of those without room, running rows included, never will have any: end them, the others of the
    step are served as if they had not been there. `withdrawn` are
    requests admitted in a step that failed: new ones and children of forks are forgotten, resumed
    ones are preempted as before. So are those that ran on in it where a KV cache group keeps
    states, which the step wrote over: they are preempted, and wait to be resumed. Tokens
    appended by failed steps are taken back, also of requests that are preempted now.
    `rolled_back_slots` are rows that ran in
    failed steps, `rolled_back_computed` and `rolled_back_tokens` how many computed and known tokens
    they have now. `patches` are all block-table changes of the step. The forward of the step may
    begin on a worker once it has applied `seq` of `epoch`. `error` is empty, or says why the
    whole step was refused; then nothing was changed and every other field is empty.
    """

    client_id: str
    step: int
    epoch: int
    seq: int
    admitted_slots: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    num_hit_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    num_scheduled_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    running_scheduled: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    no_room: tuple[str, ...] = ()
    waiting_for_load: tuple[str, ...] = ()
    retry_later: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    withdrawn: tuple[str, ...] = ()
    rolled_back_slots: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    rolled_back_computed: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    rolled_back_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    forked_slots: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    patches: BlockTablePatch = EMPTY_PATCH
    error: str = ""
