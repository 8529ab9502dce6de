"""The running requests, and the processing of the tokens that ranks choose.

    chosen tokens ──digest──▶ samples, drafts accepted or taken back, beams decided ──▶ outputs

Stands between the engine's loop and its scheduler, and tells the scheduler which sequences have
ended. Sends nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from examples.engine.beams import BeamSearch
from examples.engine.completion import EngineRequest, Sample, SampleText
from examples.engine.outputs import FinishReason, Output
from examples.engine.sampling import ChosenToken, SamplingParams
from examples.engine.scheduler import Scheduler
from examples.engine.sequence import Phase, Sequence
from examples.engine.tally import EngineTally
from examples.engine.tokenizer import Tokenizer
from examples.engine.work import StepOutput
from kvcache.requests.hints import CacheHint


@dataclass(frozen=True)
class BuiltRow:
    """A row that chooses tokens for `takers`, after position `position - 1` and its drafts."""

    sequence: Sequence
    position: int
    drafts: tuple[int, ...]
    takers: tuple[Sequence, ...]


class RequestTable:
    """Requests by id. Invariant: a sample is in `_samples` until its end was output."""

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer, max_model_len: int, tally: EngineTally
    ) -> None:
        """Begin without requests."""
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._tally = tally
        self.requests: dict[str, EngineRequest] = {}
        self._samples: dict[Sequence, Sample] = {}
        self._searches: dict[str, BeamSearch] = {}
        self._outputs: list[Output] = []
        self._numbers = itertools.count(1)

    def new_id(self) -> str:
        """Return an unused id."""
        while (name := f"request-{next(self._numbers)}") in self.requests:
            pass
        return name

    def open(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        adapter: str | None,
        cache_salt: str | None,
        *,
        hints: tuple[CacheHint, ...] = (),
    ) -> None:
        """Add a checked request, which then waits."""
        # Ids may be reused; the coordinator knows earlier requests of an id by other keys.
        key = f"{request_id}/{next(self._numbers)}"
        first = Sequence(
            key, request_id, 0, params, tokens, len(tokens), adapter, cache_salt, hints
        )
        request = EngineRequest(request_id, params, [])
        self.requests[request_id] = request
        self._seat(request, first)
        if params.beam_width:
            search = BeamSearch(first, self._max_model_len, self._new_key)
            self._searches[request_id] = search
        else:
            for index in range(1, params.n):
                child = replace(
                    first, key=self._new_key(first), index=index, tokens=[*tokens], children=[]
                )
                first.children.append(child)
                self._seat(request, child)
        self._scheduler.add(first)
        self._tally.num_prompt_tokens += len(tokens)

    def take_outputs(self) -> list[Output]:
        """Return the outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def digest(self, rows: SequenceOf[BuiltRow | None], output: StepOutput) -> None:
        for row, chosen in zip(rows, output.rows, strict=True):
            if row is None:
                continue
            search = self._searches.get(row.sequence.request_id)
            if search is not None:
                search.take(row.sequence, chosen[0][0])
                continue
            num_accepted = 0
            for offset, options in enumerate(chosen):
                for taker, token in zip(row.takers, options, strict=True):
                    self._take_token(taker, token, row.position + offset)
                if offset == len(row.drafts) or options[0].token_id != row.drafts[offset]:
                    break
                num_accepted += 1
            self._take_back(row, len(row.drafts) - num_accepted, num_accepted)
        for request_id, search in list(self._searches.items()):
            if request_id in self.requests and search.is_ready:
                self._go_on_with_beams(self.requests[request_id], search)
        for built in rows:
            for sequence in built.takers if built is not None else ():
                sample = self._samples.get(sequence)
                if sample is not None:
                    self._emit(sample)

    def _take_token(self, sequence: Sequence, token: ChosenToken, position: int) -> None:
        """Append a token to a sample that waits for it at this position."""
        sample = self._samples.get(sequence)
        if sample is None or sequence.is_finished or len(sequence.tokens) != position:
            return
        self._tally.num_output_tokens += 1
        if sample.take(token, self._max_model_len):
            self._scheduler.finish(sequence)

    def _take_back(self, row: BuiltRow, num_rejected: int, num_accepted: int) -> None:
        sequence = row.sequence
        self._tally.num_accepted_drafts += num_accepted
        self._tally.num_rejected_drafts += num_rejected
        computed_end = row.position + len(row.drafts)
        if sequence.phase is Phase.RUNNING and sequence.num_computed == computed_end:
            sequence.num_computed -= num_rejected
            sequence.num_rejected += num_rejected

    def _go_on_with_beams(self, request: EngineRequest, search: BeamSearch) -> None:
        """Let the search choose the beams that continue, and apply its decision."""
        decision = search.decide()
        for sequence in decision.dropped:
            self._scheduler.finish(sequence)
        for sequence in decision.loose:
            self._scheduler.add(sequence)
        if not search.is_over:
            return
        del self._searches[request.request_id], self.requests[request.request_id]
        for index, beam in enumerate(search.best()):
            text = self._tokenizer.detokenizer().add(beam.token_ids)
            self._put(
                request,
                Output(
                    request.request_id,
                    index,
                    beam.token_ids,
                    text,
                    beam.reason,
                    num_cached_tokens=search.num_cached,
                    score=beam.score,
                ),
            )
        for sample in request.samples:
            self._samples.pop(sample.sequence, None)
        self._tally.num_finished += 1

    def _emit(self, sample: Sample, error: str = "") -> None:
        output = sample.output(error)
        request = self.requests.get(sample.sequence.request_id)
        if output is None or request is None:
            return
        self._put(request, output)
        if sample.reason is not None:
            self._samples.pop(sample.sequence, None)
        if not any(other.sequence in self._samples for other in request.samples):
            del self.requests[request.request_id]
            self._tally.num_finished += 1

    def _put(self, request: EngineRequest, output: Output) -> None:
        self._outputs.append(output)
        if request.unread is not None:
            request.unread.append(output)

    def end(self, request: EngineRequest, reason: FinishReason, error: str = "") -> None:
        """End all running samples of a request."""
        search = self._searches.pop(request.request_id, None)
        for sequence in search.sequences if search is not None else ():
            if not sequence.is_finished:
                self._scheduler.finish(sequence)
        ended = [sample for sample in request.samples if sample.reason is None]
        for sample in ended:
            if not sample.sequence.is_finished:
                self._scheduler.finish(sample.sequence)
            sample.reason = reason
        for sample in ended:
            self._emit(sample, error)

    def _seat(self, request: EngineRequest, sequence: Sequence) -> None:
        text = SampleText(self._tokenizer.detokenizer(), sequence.params.stop)
        sample = Sample(sequence, text)
        request.samples.append(sample)
        self._samples[sequence] = sample

    def _new_key(self, sequence: Sequence) -> str:
        return f"{sequence.request_id}/{next(self._numbers)}"
