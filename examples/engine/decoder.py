"""The decoder of one rank: its layers, its heads, on the pages that the rank's worker owns.

    tokens or hidden states ──▶ layers of this stage ──▶ hidden states, or logits on the last stage

Keys, values and states exist only in `kv_caches` and `state_caches` of the worker. This module
knows rows and tables, not requests or the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from examples.engine.attention import TokenPlan
from examples.engine.layers import (
    Projections,
    Weights,
    adapt,
    feed_forward,
    rms_norm,
    split_heads,
)
from examples.engine.model_config import DecoderConfig
from examples.engine.parallel import Communicator
from examples.engine.states import RowStates, run_recurrence
from examples.engine.weights import RankPlace
from examples.engine.work import WorkRow


@dataclass(frozen=True)
class LayerPages:
    """The worker's tensors for the layers of this rank, and the step's plans."""

    kv_caches: Mapping[str, torch.Tensor]
    state_caches: Mapping[str, tuple[torch.Tensor, ...]]
    token_plans: Mapping[str, TokenPlan]
    state_plans: Mapping[str, Sequence[RowStates]]


class Decoder:
    """A rank's part of the model."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        place: RankPlace,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        """Use a rank's `weights`, which are on `device`."""
        self._config = config
        self._weights = weights
        self._place = place
        self.communicator = communicator
        self._device = device
        self._projections = Projections(config, weights, device)
        self._layers = config.stage_layers(place.stage, place.num_stages)

    @torch.inference_mode()
    def forward(self, rows: Sequence[WorkRow], pages: LayerPages) -> torch.Tensor | None:
        """Compute all rows; return the logits after the tokens that are sampled, in order, `(m,
        vocabulary)`, on the last stage, and None on the others."""
        config, weights = self._config, self._weights
        positions = torch.tensor(
            [position for row in rows for position in range(row.start, row.end)],
            device=self._device,
        )
        hidden = self._enter(rows)
        for layer in self._layers:
            name = f"layers.{layer}"
            normed = rms_norm(hidden, weights[f"{name}.input_norm"], config.norm_eps)
            mixed = self._mix(layer, normed, positions, pages)
            hidden = hidden + self.communicator.sum(mixed @ weights[f"{name}.o_proj"].T)
            normed = rms_norm(hidden, weights[f"{name}.output_norm"], config.norm_eps)
            more = self.communicator.sum(feed_forward(weights, layer, normed))
            hidden = hidden + self._with_adapters(more, rows, layer, normed)
        if not self._place.is_last_stage:
            self.communicator.pass_on(hidden)
            return None
        return self._logits(rows, hidden)

    def _enter(self, rows: Sequence[WorkRow]) -> torch.Tensor:
        """Return the hidden states that the first layer of this stage starts from."""
        config = self._config
        num_tokens = sum(len(row.token_ids) for row in rows)
        like = next(iter(self._weights.values())).new_empty(num_tokens, config.hidden_size)
        if not self._place.is_first_stage:
            return self.communicator.take_over(like)
        token_ids = torch.tensor(
            [token for row in rows for token in row.token_ids.tolist()], device=self._device
        )
        hidden = self._weights["embedding"][token_ids]
        return hidden * config.hidden_size**0.5 if config.is_embedding_scaled else hidden

    def _mix(
        self, layer: int, normed: torch.Tensor, positions: torch.Tensor, pages: LayerPages
    ) -> torch.Tensor:
        """Return the result of attention or recurrence, `(n, this rank's heads * size)`."""
        name = f"layers.{layer}"
        match self._config.layers[layer]:
            case "state":
                inputs = self._projections.state_inputs(layer, normed)
                states, caches = pages.state_plans[name], pages.state_caches[name]
                return run_recurrence(self._weights, layer, inputs, states, caches)
            case "latent":
                return self._latent(layer, normed, positions, pages)
        heads = self._projections.token_heads(layer, normed, positions)
        plan, cache = pages.token_plans[name], pages.kv_caches[name]
        plan.write(cache, heads.key, heads.value)
        return plan.attend(heads.query, cache, self._config.head_size**-0.5).flatten(1)

    def _latent(
        self, layer: int, normed: torch.Tensor, positions: torch.Tensor, pages: LayerPages
    ) -> torch.Tensor:
        """Attend to latent vectors directly: the matrices that would expand them to keys and values
        are applied to query and output instead."""
        config, name = self._config, f"layers.{layer}"
        heads = self._projections.latent_heads(layer, normed, positions)
        plan, cache = pages.token_plans[name], pages.kv_caches[name]
        plan.write(cache, heads.kept[:, None, :])
        key_up, value_up = (
            split_heads(self._weights[f"{name}.{part}"], 0, config.head_size)
            for part in ("k_up", "v_up")
        )
        absorbed = torch.einsum("nhd,hdl->nhl", heads.plain_query, key_up)
        query = torch.cat((absorbed, heads.rope_query), dim=-1)
        scale = (config.head_size + config.rope_size) ** -0.5
        found = plan.attend_latent(query, cache, config.latent_size, scale)
        return torch.einsum("nhl,hdl->nhd", found, value_up).flatten(1)

    def _with_adapters(
        self, more: torch.Tensor, rows: Sequence[WorkRow], layer: int, normed: torch.Tensor
    ) -> torch.Tensor:
        first = 0
        for row in rows:
            span = slice(first, first + len(row.token_ids))
            if row.adapter is not None:
                more[span] += adapt(self._weights, row.adapter, layer, normed[span])
            first = span.stop
        return more

    def _logits(self, rows: Sequence[WorkRow], hidden: torch.Tensor) -> torch.Tensor:
        wanted: list[int] = []
        first = 0
        for row in rows:
            first += len(row.token_ids)
            wanted += range(first - row.num_sampled, first)
        config = self._config
        kept = rms_norm(
            hidden[torch.tensor(wanted, dtype=torch.long, device=self._device)],
            self._weights["final_norm"],
            config.norm_eps,
        )
        return kept @ self._weights["embedding" if config.is_embedding_tied else "to_logits"].T
