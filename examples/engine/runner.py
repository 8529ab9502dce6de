"""One rank's part of a step: begin the forward, compute, choose tokens, end the forward.

    begin(work)    waits until the worker has applied the step and its tables are current
    compute(work)  the decoder, then the choice of tokens on the first rank of the last stage
    end(work)      lets stores and other work that waits for the bytes continue

Runs in the process of the rank's `KVCacheWorker`. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from examples.engine.attention import TokenPlan
from examples.engine.decoder import Decoder, LayerPages
from examples.engine.model_config import DecoderConfig
from examples.engine.parallel import Communicator
from examples.engine.sampling import ChosenToken, choose
from examples.engine.states import RowStates, StateColumnsInUse
from examples.engine.weights import RankPlace, WeightSource, rank_weights
from examples.engine.work import StepOutput, StepWork, WorkRow
from kvcache.worker.worker import KVCacheWorker


class RankRunner:
    """The model on one rank."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        worker: KVCacheWorker,
        place: RankPlace,
        *,
        communicator: Communicator,
        adapters: tuple[str, ...] = (),
    ) -> None:
        """Load the rank's weights onto the worker's device."""
        device = worker.settings.device
        weights = rank_weights(config, source, place, adapters, device)
        self._config = config
        self._worker = worker
        self._place = place
        self._decoder = Decoder(config, weights, place, communicator, torch.device(device))
        self._groups = worker.settings.kv_cache_config.kv_cache_groups
        self._states = {
            index: StateColumnsInUse(group.kv_cache_spec.block_size)
            for index, group in enumerate(self._groups)
            if group.kv_cache_spec.num_state_blocks is not None
        }

    @property
    def boundary_tokens(self) -> int | None:
        """Chunks should end at multiples of this number of tokens, so that states there are
        cached."""
        sizes = [self._groups[index].kv_cache_spec.block_size for index in self._states]
        return max(sizes, default=None)

    @property
    def communicator(self) -> Communicator:
        """This rank's connection to the others."""
        return self._decoder.communicator

    @communicator.setter
    def communicator(self, communicator: Communicator) -> None:
        self._decoder.communicator = communicator

    def begin(self, work: StepWork, timeout_s: float) -> None:
        """Open the step's forward. Raises as `KVCacheWorker.begin_forward` does."""
        self._worker.begin_forward(work.epoch, work.seq, timeout_s)

    def compute(self, work: StepWork) -> StepOutput | None:
        """Compute the step; return the chosen tokens on the first rank of the last stage."""
        if not work.rows:
            return StepOutput(work.step) if self._is_choosing else None
        start_s = time.perf_counter()
        logits = self._decoder.forward(work.rows, self._pages(work.rows))
        if logits is None or not self._is_choosing:
            return None
        rows = _choose(work.rows, logits)
        return StepOutput(work.step, rows, time.perf_counter() - start_s)

    def end(self, work: StepWork) -> None:
        """Close the step's forward."""
        self._worker.end_forward(work.epoch, work.seq)

    @property
    def _is_choosing(self) -> bool:
        return self._place.is_last_stage and self._place.tensor_rank == 0

    def _pages(self, rows: Sequence[WorkRow]) -> LayerPages:
        """Plan the step's reads and writes, once for all layers of a group."""
        token_plans: dict[str, TokenPlan] = {}
        state_plans: dict[str, Sequence[RowStates]] = {}
        for index, group in enumerate(self._groups):
            if not group.layer_names:
                continue
            table = self._worker.block_tables.tensor(index)
            if index in self._states:
                states = self._states[index].plan(rows, table)
                state_plans |= dict.fromkeys(group.layer_names, states)
                continue
            plans: dict[int | None, TokenPlan] = {}
            for name in group.layer_names:
                window = self._window(name)
                if window not in plans:
                    size = group.kv_cache_spec.block_size
                    plans[window] = TokenPlan(rows, table, size, window)
                token_plans[name] = plans[window]
        return LayerPages(
            self._worker.kv_caches, self._worker.state_caches, token_plans, state_plans
        )

    def _window(self, layer_name: str) -> int | None:
        """Return the model's window, not the cache's: a cache may keep more than the layers
        read."""
        kind = self._config.layers[int(layer_name.rpartition(".")[2])]
        return self._config.window_tokens if kind == "window" else None


def _choose(
    rows: Sequence[WorkRow], logits: torch.Tensor
) -> tuple[tuple[tuple[ChosenToken, ...], ...], ...]:
    """Choose after every sampled token; see `StepOutput.rows`."""
    chosen, index = [], 0
    for row in rows:
        of_row = []
        for position in range(row.end - row.num_sampled + 1, row.end + 1):
            of_row.append(tuple(choose(logits[index], c, position) for c in row.choices))
            index += 1
        chosen.append(tuple(of_row))
    return tuple(chosen)
