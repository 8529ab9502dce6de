"""The model's limits on a request: its length, drafts and encoder tokens.

The manager reads them off the plan once, and checks every request against them. They allow all
that the layer kinds in the plan can serve.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.base.errors import RequestError
from kvcache.specs import KVCacheConfig, KVCacheSpec, ceil_div


@dataclass(frozen=True)
class ModelLimits:
    """Limits of one model.

    `state_groups` are the KV cache groups that keep states. A forward overwrites states in place,
    so only its drafts can be undone, at most `max_draft_tokens` of them (None: any number).
    `max_encoder_tokens` is 0 where no group keeps encoder tokens.
    """

    max_model_len: int
    state_groups: frozenset[int] = frozenset()
    max_draft_tokens: int | None = None
    max_encoder_tokens: int = 0
    specs: tuple[KVCacheSpec, ...] = ()

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig, max_model_len: int) -> ModelLimits:
        """Return the limits of the model that a plan is for."""
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        drafts = [spec.max_draft_tokens for spec in specs]
        encoder_tokens = [s.encoder_token_limit for s in specs if s.keeps_encoder_tokens]
        return cls(
            max_model_len,
            frozenset(i for i, spec in enumerate(specs) if spec.num_state_blocks is not None),
            min((num for num in drafts if num is not None), default=None),
            min(encoder_tokens, default=0),
            tuple(specs),
        )

    def least_blocks(self, num_tokens: int) -> int:
        """Return how many blocks, over all groups, a request has at least when its last of
        `num_tokens` tokens is computed, however many steps computed them."""
        return sum(
            ceil_div(num_tokens, spec.block_size)
            - spec.num_skipped_tokens(num_tokens - 1) // spec.block_size
            for spec in self.specs
            if spec.num_state_blocks is None and not spec.keeps_encoder_tokens
        )

    @property
    def most_drafts(self) -> int:
        """The most drafts that a forward may have."""
        return self.max_model_len if self.max_draft_tokens is None else self.max_draft_tokens

    def require_encoder_tokens(self, request_id: str, num_encoder_tokens: int) -> None:
        """Raise RequestError unless the model keeps so many encoder tokens of a request."""
        if num_encoder_tokens <= self.max_encoder_tokens:
            return
        if not self.max_encoder_tokens:
            raise RequestError(
                f"request {request_id}: {num_encoder_tokens} encoder tokens, but no KV cache "
                "group keeps encoder tokens: pass 0"
            )
        raise RequestError(
            f"request {request_id}: {num_encoder_tokens} encoder tokens, the model keeps at most "
            f"{self.max_encoder_tokens}: shorten its input"
        )

    def require_drafts(self, request_id: str, num_draft_tokens: int) -> None:
        """Raise RequestError if so many drafts could not be undone."""
        if self.max_draft_tokens is not None and num_draft_tokens > self.max_draft_tokens:
            raise RequestError(
                f"request {request_id}: num_draft_tokens is {num_draft_tokens}: "
                f"{draft_remedy(self.max_draft_tokens)}"
            )


def draft_remedy(max_draft_tokens: int) -> str:
    """Return the remedy for more drafts than states are kept for."""
    return (
        f"states of at most {max_draft_tokens} drafts are kept, schedule fewer or raise "
        "num_speculative_blocks"
    )
