"""A scheduling step: the engine's request and the coordinator's answer.

The engine decides which requests run and which are preempted. The manager assigns slots and blocks
and reports requests without room. A step is one `StepRequest`, with arrays in and arrays out.

    engine ──StepRequest(step n)──▶ manager: settle completed/failed steps, free finished and
                                    preempted, extend running rows, resume, admit new requests
           ◀─StepResult(step n)───

Steps may be pipelined: n+1 may be sent while the forward of n runs. This module is data, and checks
only types; the manager checks a step against its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_not
from typing import Any

import numpy as np

from kvcache.base.arguments import (
    MAX_INT,
    MAX_INT32,
    are_plain_texts,
    as_bool,
    as_int,
    as_integers,
    as_text,
    as_texts,
    as_tuple,
    changed,
    check_kind,
    quickly_made,
)
from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.errors import RequestError, shown
from kvcache.protocol.commands import EMPTY_PATCH, BlockTablePatch
from kvcache.requests.hints import CacheHint, checked_hints
from kvcache.requests.tokens import as_token_ids

NO_STEP = -1
"""`completed_step` without a completed step; `failed_step` without a failed one."""

NO_SLOT = -1
"""`StepResult.admitted_slots` of a request that was not admitted."""


@quickly_made
@dataclass(frozen=True, eq=False)
class NewRequest:
    """A new request, and how much of it may be computed now.

    `token_ids` is the whole prompt. Of the tokens after its cache hit, at most `max_new_tokens` are
    scheduled in this step, and at least one. A request that finds no room leaves no trace: the
    engine sends it again, whole, to try again. `num_encoder_tokens` are those of the encoder whose
    output it reads, for models that have one; later steps need not repeat them. With
    `delay_cache_blocks`, the blocks of this step become hittable only with its next step. `hints`
    are followed when it finishes.
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
    hints: tuple[CacheHint, ...] = ()


@dataclass(frozen=True)
class ResumedRequest:
    """A preempted request that wants to run again; the manager knows its tokens."""

    request_id: str
    max_new_tokens: int


@dataclass(frozen=True)
class Fork:
    """A running request of this client, and the id of a new one that shares its computed tokens.

    The child must have the parent's tokens and content (LoRA, salt, images). It takes a slot but no
    block, and is a running row from the next step on.
    """

    parent_id: str
    child_id: str


@dataclass(frozen=True)
class RequestHints:
    """New hints of a known request of this client, in place of its earlier ones.

    They are followed when it finishes, in this step or later, and not when it is preempted.
    """

    request_id: str
    hints: tuple[CacheHint, ...]


@dataclass(frozen=True)
class RunningRow:
    """One row of `RunningRequests`, which explains the fields, for engines that work with rows."""

    slot: int
    num_new_tokens: int
    token_ids: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    num_rejected_tokens: int = 0


_ROW_COLUMNS = (
    ("slots", "slot"),
    ("num_new_tokens", "num_new_tokens"),
    ("num_draft_tokens", "num_draft_tokens"),
    ("num_rejected_tokens", "num_rejected_tokens"),
)
_ALL_COLUMNS = (
    *(column for column, _ in _ROW_COLUMNS),
    "token_offsets",
    "token_ids",
    "draft_token_ids",
)
_INT32 = np.dtype(np.int32)


@quickly_made
@dataclass(frozen=True, eq=False)
class RunningRequests:
    """Running requests as arrays. Row `i` is the request in slot `slots[i]`, each slot once.

    First `num_rejected_tokens[i]` draft positions computed before are taken back, then
    `token_ids[token_offsets[i]:token_offsets[i + 1]]` are appended (accepted drafts and the sampled
    token). Then `num_new_tokens[i]` positions are scheduled; the last `num_draft_tokens[i]` of them
    are drafts that the request does not own yet. `draft_token_ids` are the drafts' ids in the order
    of rows; only content checking needs them, otherwise it may be empty. Shapes: `(n,)`,
    `token_offsets` `(n + 1,)`, `token_ids` `(token_offsets[n],)`.
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
        """Return the arrays for `rows`, in order. Engines with many rows should keep arrays.

        Raises:
            RequestError: a number is not an integer of 32 bits, or a value is not a token id.
        """
        listed = as_tuple("rows", rows, RequestError, RunningRow)
        columns = {
            column: int32_array(
                as_integers(
                    f"{name} of rows",
                    list(map(attrgetter(name), listed)),
                    0,
                    MAX_INT32,
                    RequestError,
                )
            )
            for column, name in _ROW_COLUMNS
        }
        tokens = [as_token_ids(row.token_ids, f"row {i}: token id") for i, row in enumerate(listed)]
        return cls(
            **columns,
            token_offsets=int32_array(np.cumsum([0, *map(len, tokens)])),
            token_ids=np.concatenate(tokens) if tokens else EMPTY_INT32,
        )


EMPTY_RUNNING = RunningRequests(
    EMPTY_INT32, EMPTY_INT32, EMPTY_INT32, EMPTY_INT32, np.zeros(1, dtype=np.int32), EMPTY_INT32
)
"""No running rows."""


@quickly_made
@dataclass(frozen=True, eq=False)
class StepRequest:
    """One scheduling step of one client.

    `(client_id, step)` identifies it: a repeated number gets the stored answer. `step` counts
    1, 2, 3, ... and never restarts while the client lives. `epoch` is the one in which the client
    attached; in another one the request is refused. `completed_step`: every step up to this one is
    complete on every rank, with its bytes. `failed_step`: this step and all later scheduled ones
    are void, as if never sent, except that finished and preempted requests stay so, and known
    requests keep their new hints. Send it only when no rank can still begin or run any of them.
    Rows that those steps admitted, or ran in a model that keeps states, are gone with them
    (`withdrawn`): a step that reports a failure must not name them as running.

    Order of effects: failed_step, completed_step, hints, finished, preempted, forks, running,
    resumed, new. A fork shares its parent's blocks from before this step's tokens are appended. An
    idle engine sends an empty request, so that its last step is sealed. A cluster's client fills in
    `client_id`, `step` and `epoch`.
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
    hints: tuple[RequestHints, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A request that can never fit, because of its tenant's limit.

    `tenant` is as in statistics: empty for requests without one, a hash if tenants are told apart
    by salt. The request needs at least `num_blocks` device blocks, over all groups, but the tenant
    has at most `limit_blocks`. `reason` says so, with the remedy.
    """

    request_id: str
    tenant: str
    num_blocks: int
    limit_blocks: int
    reason: str


@quickly_made
@dataclass(frozen=True, eq=False)
class StepResult:
    """The answer to one `StepRequest`.

    All or nothing per request. Admitted are the resumed requests followed by the new ones, in the
    order of the step request: `admitted_slots[i]` is the slot, or `NO_SLOT`; `num_hit_tokens[i]`
    are the tokens hit in the cache; `num_scheduled_tokens[i]` are to be computed now, from position
    `num_hit_tokens[i] + external` on. `running_scheduled[i]` is 1 if running row `i` got its
    blocks, 0 if there was no room (its tokens were appended, but it does not run).
    `forked_slots[i]` is the slot of fork `i`'s child, `NO_SLOT` if none was free.
    `no_room` names requests that found no blocks or no slot, including children of forks;
    `waiting_for_load` those whose hit is being stored or loaded; `retry_later` those whose look-up
    has no answer yet, because a tier does not know yet what it holds. `refused` names
    the requests without room, including running rows, that can never fit: end them. The other
    requests of the step are served as if these were not there. `withdrawn` are requests admitted in
    a step that failed: new ones and children of forks are forgotten, resumed ones are preempted as
    before. Requests that ran in it are also preempted if a KV cache group keeps states, which the
    step overwrote: they wait to be resumed. Tokens appended by failed steps are taken back, also
    from requests that are preempted now. `rolled_back_slots` are rows that ran in failed steps,
    `rolled_back_computed` and `rolled_back_tokens` their present numbers of computed and known
    tokens. `patches` are all block-table changes of the step. The forward of the step may begin on
    a worker once it has applied `seq` of `epoch`. `error` is empty, or says why the whole step was
    refused; then nothing was changed and every other field is empty.
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


# --- types of an engine's step --------------------------------------------------------------

_USUAL_TYPES = [*map(type, vars(StepRequest()).values())]
_NAMING = ("finished", "preempted_recompute", "preempted_swap")


def checked_step(request: StepRequest) -> StepRequest:
    """Return a step whose fields have the right types: plain numbers, tuples of the right items.

    The columns of running rows are checked where they are read. Changes nothing; a step that needs
    no conversion, as most, is returned itself.

    Raises:
        RequestError: a field has another type, or exceeds 64 bits.
    """
    if type(request) is not StepRequest:
        check_kind("step", request, StepRequest, RequestError)
    changes: dict[str, Any] = {}
    if [*map(type, vars(request).values())] != _USUAL_TYPES or not _are_in_range(request):
        client = request.client_id if isinstance(request.client_id, str) else "a client"
        changes = _plain_fields(f"step {shown(request.step)} of {client}", request)
        request = changed(request, changes)
    if (
        (request.finished and not are_plain_texts(request.finished))
        or request.preempted_recompute
        or request.preempted_swap
        or request.resumed
        or request.forks
        or request.hints
        or (request.new and not all(map(_is_usual, request.new)))
    ):
        changes = _plain_items(f"step {request.step} of {request.client_id}", request)
        if changes:
            request = changed(request, changes)
    return request


def check_columns(where: str, running: RunningRequests) -> None:
    """Raise RequestError unless the columns of rows are int32 arrays of the right shapes."""
    for name in _ALL_COLUMNS:
        values = getattr(running, name)
        if not isinstance(values, np.ndarray):
            raise RequestError(f"{where}: running.{name} is {shown(values)}: pass an int32 array")
        if values.dtype != _INT32:
            raise RequestError(f"{where}: running.{name} is of {values.dtype}: pass int32 arrays")
        if values.ndim != 1:
            raise RequestError(
                f"{where}: running.{name} has shape {values.shape}: pass a one-dimensional array"
            )
    n = len(running.slots)
    for name, _ in _ROW_COLUMNS:
        values = getattr(running, name)
        if values.shape != (n,):
            raise RequestError(
                f"{where}: running.{name} has shape {values.shape} for {n} slots: pass one number "
                "per slot"
            )
    offsets, token_ids = running.token_offsets, running.token_ids
    if offsets.shape != (n + 1,):
        raise RequestError(
            f"{where}: running.token_offsets has shape {offsets.shape} and token_ids "
            f"{token_ids.shape} for {n} slots: pass {n + 1} offsets and one row of tokens"
        )


def _are_in_range(request: StepRequest) -> bool:
    return (
        0 <= request.step <= MAX_INT
        and 0 <= request.epoch <= MAX_INT
        and 0 <= request.num_lookahead_tokens <= MAX_INT
        and request.client_id.isascii()
    )


def _plain_fields(where: str, request: StepRequest) -> dict[str, Any]:
    """Return the fields of a step as plain numbers and tuples; does not check the items."""
    check_kind(f"{where}: running", request.running, RunningRequests, RequestError)
    fields: dict[str, Any] = {
        "client_id": as_text(
            "client_id of a step", request.client_id, RequestError, may_be_empty=True
        )
    }
    for name in ("step", "epoch", "num_lookahead_tokens"):
        fields[name] = as_int(f"{where}: {name}", getattr(request, name), error=RequestError)
    for name in ("completed_step", "failed_step"):
        fields[name] = as_int(
            f"{where}: {name}", getattr(request, name), NO_STEP, error=RequestError
        )
    for name in (*_NAMING, "resumed", "new", "forks", "hints"):
        fields[name] = as_tuple(f"{where}: {name}", getattr(request, name), RequestError)
    return fields


def _plain_items(where: str, request: StepRequest) -> dict[str, Any]:
    """Return the lists of a step whose items were converted; raises RequestError."""
    changes: dict[str, Any] = {}
    for name in _NAMING:
        if names := getattr(request, name):
            plain = as_texts(f"{where}: {name}", names, RequestError)
            if plain is not names:
                changes[name] = plain
    for name, kind, check in _ITEMS:
        if items := getattr(request, name):
            listed = as_tuple(f"{where}: {name}", items, RequestError, kind)
            checked = [check(where, item) for item in listed]
            if any(map(is_not, checked, listed)):
                changes[name] = tuple(checked)
    return changes


def _checked_resumed(where: str, item: ResumedRequest) -> ResumedRequest:
    request_id = as_text(f"{where}: id of a resumed request", item.request_id, RequestError)
    what = f"{where}: request {request_id}: max_new_tokens"
    count = as_int(what, item.max_new_tokens, 1, error=RequestError)
    is_plain = request_id is item.request_id and count is item.max_new_tokens
    return item if is_plain else ResumedRequest(request_id, count)


def _checked_fork(where: str, item: Fork) -> Fork:
    parent = as_text(f"{where}: parent_id of a fork", item.parent_id, RequestError)
    child = as_text(f"{where}: child_id of a fork", item.child_id, RequestError)
    is_plain = parent is item.parent_id and child is item.child_id
    return item if is_plain else Fork(parent, child)


def _checked_request_hints(where: str, item: RequestHints) -> RequestHints:
    request_id = as_text(f"{where}: id of a request with hints", item.request_id, RequestError)
    hints = checked_hints(f"{where}: request {request_id}", item.hints)
    is_plain = request_id is item.request_id and hints is item.hints
    return item if is_plain else RequestHints(request_id, hints)


_USUAL_NEW = [*map(type, vars(NewRequest("", EMPTY_INT32, 0)).values())]
_NEW_COUNTS = (
    ("max_new_tokens", 1),
    ("num_external_computed_tokens", 0),
    ("num_lookahead_tokens", 0),
    ("num_encoder_tokens", 0),
)
_NEW_FLAGS = ("skip_reading_prefix_cache", "delay_cache_blocks")


def checked_new(where: str, new: NewRequest) -> NewRequest:
    """Return a new request whose fields have the right types, itself if they have.

    Raises:
        RequestError: one has not. Whether the request is valid is checked elsewhere.
    """
    if _is_usual(new):
        return new
    request_id = as_text(f"{where}: id of a new request", new.request_id, RequestError)
    changes: dict[str, Any] = {} if request_id is new.request_id else {"request_id": request_id}
    what = f"{where}: request {request_id}"
    for name, at_least in _NEW_COUNTS:
        count = getattr(new, name)
        if type(count) is not int or not at_least <= count <= MAX_INT:
            changes[name] = as_int(f"{what}: {name}", count, at_least, error=RequestError)
    for name in _NEW_FLAGS:
        flag = getattr(new, name)
        if type(flag) is not bool:
            changes[name] = as_bool(f"{what}: {name}", flag, RequestError)
    for name in ("lora_name", "lora_path", "cache_salt", "tenant"):
        text = getattr(new, name)
        if text is not None:
            plain = as_text(f"{what}: {name}", text, RequestError, may_be_empty=name == "lora_path")
            if plain is not text:
                changes[name] = plain
    hints = checked_hints(what, new.hints)
    if hints is not new.hints:
        changes["hints"] = hints
    if not _is_column(new.token_ids):
        changes["token_ids"] = as_token_ids(new.token_ids, f"{what}: prompt token id")
    if type(new.mm_hashes) is not tuple or new.mm_hashes:
        mm_hashes = as_texts(f"{what}: mm_hashes", new.mm_hashes, RequestError)
        if mm_hashes is not new.mm_hashes:
            changes["mm_hashes"] = mm_hashes
    for name in ("mm_offsets", "mm_lengths"):
        values = getattr(new, name)
        if not _is_column(values):
            column = as_integers(f"{what}: {name}", values, 0, MAX_INT32, RequestError)
            changes[name] = int32_array(column)
    return changed(new, changes) if changes else new


def _is_usual(new: NewRequest) -> bool:
    """Return whether `new` is a request whose fields need no conversion, as most."""
    return bool(
        type(new) is NewRequest
        and [*map(type, vars(new).values())] == _USUAL_NEW
        and new.request_id.isascii()
        and new.request_id
        and new.mm_hashes == () == new.hints
        and new.mm_offsets is EMPTY_INT32 is new.mm_lengths
        and new.token_ids.dtype is _INT32
        and new.token_ids.ndim == 1
        and 0 < new.max_new_tokens <= MAX_INT
        and 0 <= new.num_external_computed_tokens <= MAX_INT
        and 0 <= new.num_lookahead_tokens <= MAX_INT
        and 0 <= new.num_encoder_tokens <= MAX_INT
    )


def _is_column(values: object) -> bool:
    return isinstance(values, np.ndarray) and values.dtype == _INT32 and values.ndim == 1


_ITEMS: tuple[tuple[str, type, Callable[[str, Any], object]], ...] = (
    ("resumed", ResumedRequest, _checked_resumed),
    ("new", NewRequest, checked_new),
    ("forks", Fork, _checked_fork),
    ("hints", RequestHints, _checked_request_hints),
)
"""The lists of a step, the types of their items, and their checks."""
