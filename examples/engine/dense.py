"""The reference: the same model without a cache, which recomputes every token each time.

No blocks, chunks, ranks or batches: masked attention over all tokens, recurrences from the first
token on, one sequence at a time. The engine's output must equal this output. Slow, and simple
enough to check by reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from examples.engine.layers import Projections, adapt, feed_forward, rms_norm, split_heads
from examples.engine.model_config import DecoderConfig
from examples.engine.sampling import ChosenToken, SamplingParams, choose
from examples.engine.weights import RankPlace, WeightSource, rank_weights


@dataclass(frozen=True)
class Beam:
    """A sequence that beam search found: its output and the sum of its log probabilities."""

    token_ids: tuple[int, ...]
    score: float


class DenseModel:
    """The whole model on the CPU."""

    def __init__(
        self, config: DecoderConfig, source: WeightSource, adapters: tuple[str, ...] = ()
    ) -> None:
        """Load all weights."""
        self.config = config
        self._weights = rank_weights(config, source, RankPlace(), adapters)
        self._projections = Projections(config, self._weights, torch.device("cpu"))

    def logits(self, token_ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
        """Return the logits after every token, `(n, vocabulary)`."""
        config, weights = self.config, self._weights
        positions = torch.arange(len(token_ids))
        hidden = weights["embedding"][torch.tensor(list(token_ids))]
        if config.is_embedding_scaled:
            hidden = hidden * config.hidden_size**0.5
        for layer, kind in enumerate(config.layers):
            normed = rms_norm(hidden, weights[f"layers.{layer}.input_norm"], config.norm_eps)
            match kind:
                case "latent":
                    mixed = self._latent(layer, normed, positions)
                case "state":
                    mixed = self._recurrence(layer, normed)
                case _:
                    mixed = self._attention(layer, normed, positions)
            hidden = hidden + mixed @ weights[f"layers.{layer}.o_proj"].T
            normed = rms_norm(hidden, weights[f"layers.{layer}.output_norm"], config.norm_eps)
            more = feed_forward(weights, layer, normed)
            if adapter is not None:
                more = more + adapt(weights, adapter, layer, normed)
            hidden = hidden + more
        hidden = rms_norm(hidden, weights["final_norm"], config.norm_eps)
        table = weights["embedding" if config.is_embedding_tied else "to_logits"]
        return hidden @ table.T

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        adapter: str | None = None,
    ) -> list[int]:
        """Return the tokens of sample `index`."""
        token_ids = list(prompt)
        choice = params.choice(index)
        while len(token_ids) < self.config.max_model_len:
            chosen = choose(self.logits(token_ids, adapter)[-1], choice, len(token_ids))
            token_ids.append(chosen.token_id)
            num_output = len(token_ids) - len(prompt)
            if num_output == params.max_tokens or chosen.token_id in params.stop_token_ids:
                break
        return token_ids[len(prompt) :]

    def beam_search(self, prompt: Sequence[int], params: SamplingParams) -> list[Beam]:
        """Return the `n` likeliest of `beam_width` beams, likeliest first.

        Considers the `2 * beam_width` likeliest next tokens of each beam. Finished beams leave the
        search, which ends at `max_tokens`, or when `beam_width` beams have finished.
        """
        beams, ended = [Beam((), 0.0)], list[Beam]()
        choice, width = params.choice(0), params.beam_width
        for _ in range(params.max_tokens):
            longer = []
            for beam in beams:
                row = self.logits([*prompt, *beam.token_ids])[-1]
                chosen: ChosenToken = choose(row, choice, len(prompt) + len(beam.token_ids))
                for token_id, logprob in chosen.top:
                    longer.append(Beam((*beam.token_ids, token_id), beam.score + logprob))
            longer.sort(key=lambda beam: -beam.score)
            stops = params.stop_token_ids
            ended += [b for b in longer[: 2 * width] if b.token_ids[-1] in stops]
            beams = [b for b in longer if b.token_ids[-1] not in stops][:width]
            if len(ended) >= width:
                break
        else:
            ended += beams
        return sorted(ended, key=lambda beam: -beam.score)[: params.n]

    def _attention(self, layer: int, normed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads = self._projections.token_heads(layer, normed, positions)
        repeats = heads.query.shape[1] // heads.key.shape[1]
        key = heads.key.repeat_interleave(repeats, dim=1)
        value = heads.value.repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", heads.query, key) * self.config.head_size**-0.5
        distance = positions[:, None] - positions
        is_seen = distance >= 0
        if self.config.layers[layer] == "window":
            is_seen &= distance < self.config.window_tokens
        shares = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", shares, value).flatten(1)

    def _latent(self, layer: int, normed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Expand the latent vectors to keys and values, as the model defines it."""
        config, name = self.config, f"layers.{layer}"
        heads = self._projections.latent_heads(layer, normed, positions)
        latent, rope_key = heads.kept[:, : config.latent_size], heads.kept[:, config.latent_size :]
        key = split_heads(latent @ self._weights[f"{name}.k_up"].T, -1, config.head_size)
        value = split_heads(latent @ self._weights[f"{name}.v_up"].T, -1, config.head_size)
        scores = torch.einsum("qhd,khd->hqk", heads.plain_query, key)
        scores = scores + torch.einsum("qhd,kd->hqk", heads.rope_query, rope_key)
        is_seen = positions[:, None] >= positions
        scores = scores * (config.head_size + config.rope_size) ** -0.5
        shares = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", shares, value).flatten(1)

    def _recurrence(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        config, weights, name = self.config, self._weights, f"layers.{layer}"
        inputs = self._projections.state_inputs(layer, normed)
        padded = functional.pad(inputs.entering.T, (config.conv_size - 1, 0))
        kernel = weights[f"{name}.convolution"]
        mixed = functional.silu(
            functional.conv1d(padded[None], kernel[:, None], groups=len(kernel))[0].T
        )
        decay = -weights[f"{name}.log_decay"].exp()
        state = torch.zeros_like(decay)
        outputs = []
        for token in range(len(normed)):
            step = inputs.step[token][:, None]
            state = state * (step * decay).exp()
            state = state + step * mixed[token][:, None] * inputs.write[token]
            outputs.append(state @ inputs.read[token] + weights[f"{name}.skip"] * mixed[token])
        return torch.stack(outputs) * inputs.gate
