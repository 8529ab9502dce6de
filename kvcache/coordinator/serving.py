"""One step or call, executed: the manager's answer, and the commands that carry it out.

Between the epoch state, which numbers and sends, and the manager, which decides. A step is refused
if it completes a step that a rank may still write. A refusal of the manager becomes an answer with
its error. A recorder gets every call of the manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.base.errors import (
    ExhaustedError,
    InvalidInputError,
    InvariantError,
    KVCacheError,
    MalformedMessageError,
    RequestError,
)
from kvcache.coordinator.clients import ClientLedger
from kvcache.coordinator.forward_plan import ForwardPlanner
from kvcache.coordinator.job_table import JobTable
from kvcache.coordinator.offloading import Offloading
from kvcache.coordinator.remote_calls import RemoteCalls
from kvcache.coordinator.settings import CoordinatorSettings
from kvcache.coordinator.step_recorder import (
    Executed,
    Held,
    LetGo,
    Released,
    StepRecorder,
    Withdrawn,
)
from kvcache.manager import KVCacheManager
from kvcache.protocol.commands import Command
from kvcache.protocol.messages import Call, CallResult
from kvcache.protocol.step import NewRequest, StepRequest, StepResult
from kvcache.protocol.step_delivery import ReceivedMessage, StepAnswer, UnreadableStep, error_answer


@dataclass(frozen=True, eq=False)
class Served:
    """An answer without epoch and number, and the commands for the ranks. `is_executed` is False
    when nothing was changed; `has_forward` when a job will report a forward's end."""

    answer: StepAnswer
    commands: tuple[Command, ...] = ()
    is_executed: bool = False
    has_forward: bool = False


class StepServer:
    """Executes steps and calls of one epoch on its manager."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        manager: KVCacheManager,
        jobs: JobTable,
        recorder: StepRecorder | None = None,
        offloading: Offloading | None = None,
    ) -> None:
        """Use `manager`; forwards are opened as jobs in `jobs`; `recorder` gets all events.

        `offloading` adds commands of the tiers below the device, if there are any.
        """
        self.manager = manager
        self._is_content_checking = settings.is_content_checking
        self._jobs = jobs
        self._forwards = ForwardPlanner(manager.control.request)
        self._calls = RemoteCalls(manager)
        self._recorder = recorder or StepRecorder()
        self._offloading = offloading

    def serve(self, ledger: ClientLedger, message: ReceivedMessage) -> Served:
        """Execute the message, or refuse it and change nothing."""
        if isinstance(message, UnreadableStep):
            return self.refuse(message, message.reason, MalformedMessageError.__name__)
        try:
            if self._is_content_checking:
                ledger.require_over(message)
            if isinstance(message, Call):
                return self._serve_call(message)
            return self._serve_step(message)
        except (InvalidInputError, ExhaustedError) as error:
            return self.refuse(message, str(error), type(error).__name__)

    def refuse(
        self, message: ReceivedMessage, reason: str, error_type: str = "WorkerLostError"
    ) -> Served:
        """Answer with an error. Changes nothing."""
        return Served(error_answer(message, error_type, reason))

    def release(self, client_id: str) -> None:
        """Free all requests of a client. Call it when no rank can run a step of it any more."""
        try:
            self._calls.release_client(client_id)
            self.manager.release_client(client_id)
        finally:
            self._recorder.record(Released(client_id))
        self._forwards.forget_client(client_id)

    def hold(self, client_id: str, requests: Sequence[NewRequest]) -> None:
        """Hold the cached blocks of `requests` until `let_go`, so that they are not evicted."""
        num_tokens = self.manager.holds.hold(client_id, requests)
        self._recorder.record(Held(client_id, requests, num_tokens))

    def let_go(self, client_id: str) -> None:
        """Release the blocks held for a client."""
        self.manager.holds.let_go(client_id)
        self._recorder.record(LetGo(client_id))

    def withdraw(self, block_ids: Sequence[int] = ()) -> tuple[Command, ...]:
        """Drop the content of these blocks, outside a step; return all commands to be sent."""
        if block_ids:
            if self._offloading is not None:
                self._offloading.storing.suspect(block_ids)
            self.manager.evict_blocks(block_ids)
        commands = tuple(self.manager.take_commands())
        if block_ids or commands:
            self._recorder.record(Withdrawn(block_ids, commands))
        return (*commands, *self._below(commands))

    def _serve_step(self, request: StepRequest) -> Served:
        if self._is_content_checking:
            _require_draft_ids(request)
        try:
            result = self.manager.step(request)
            commands = self.manager.take_commands()
        except Exception as error:
            self._recorder.record(Executed(request, error))
            raise
        self._recorder.record(Executed(request, result, commands))
        below = self._below(commands, request, result)
        if len(result.patches.slots):
            commands.append(result.patches)
        commands += below
        if self._is_content_checking:
            job_id = self._jobs.open(request.client_id, request.step)
            commands.append(self._forwards.plan(request, result, job_id))
        return Served(result, tuple(commands), True, self._is_content_checking)

    def _serve_call(self, call: Call) -> Served:
        try:
            packed = self._calls.call(call)
            commands = self.manager.take_commands()
        except Exception as error:
            self._recorder.record(Executed(call, error))
            raise
        answer = CallResult(call.client_id, call.step, 0, 0, packed)
        self._recorder.record(Executed(call, answer, commands))
        below = self._below(commands, is_confirmed=False)
        return Served(answer, (*commands, *below), True)

    def _below(
        self,
        commands: Sequence[Command],
        request: StepRequest | None = None,
        result: StepResult | None = None,
        *,
        is_confirmed: bool = True,
    ) -> Sequence[Command]:
        """Return the commands that the tiers add to `commands`.

        Raises InvariantError if the tiers fail: the manager cannot go back.
        """
        if self._offloading is None:
            return ()
        try:
            return self._offloading.commands(commands, request, result, is_confirmed=is_confirmed)
        except KVCacheError as error:
            raise InvariantError(f"the tiers do not follow the manager: {error}") from error


def _require_draft_ids(request: StepRequest) -> None:
    """Raise `RequestError` unless every draft has its id, which content checking needs."""
    running = request.running
    num_drafts = int(running.num_draft_tokens.sum(dtype=np.int64))
    if len(running.draft_token_ids) != num_drafts:
        raise RequestError(
            f"step {request.step} of {request.client_id}: {len(running.draft_token_ids)} "
            f"draft_token_ids for {num_drafts} drafts: content checking needs one for each"
        )
