"""Blocks and tensors of one model in this process: a manager and its worker.

Used by the cache, which knows rows and columns; this module is independent of `transformers`. The
worker gets the manager's decisions as a coordinator's messages, one per forward:

    reserve, fork, free ──▶ manager ──(copies, table patch)──▶ worker.begin_forward ──▶ tensors

Computes nothing. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcache.base.arrays import int32_array
from kvcache.base.clock import SystemClock
from kvcache.base.errors import InvariantError, OutOfBlocksError
from kvcache.manager import KVCacheManager
from kvcache.manager.cache_blocks import KVCacheBlocks
from kvcache.planner import PlanOptions, estimate_max_model_len, get_kv_cache_config
from kvcache.protocol.commands import Command, Copy
from kvcache.protocol.messages import Grant, StepCommands
from kvcache.requests.request import LoRARequest, Request
from kvcache.specs import NULL_BLOCK_ID, KVCacheSpec
from kvcache.worker import KVCacheWorker, WorkerSettings

_NONCE = "in-process"
_EPOCH = 1
_FORWARD_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ContentScope:
    """What distinguishes contents besides tokens: adapter and salt. Not `is_shared`: no look-up,
    and no request hits the computed blocks."""

    lora: LoRARequest | None = None
    cache_salt: str | None = None
    is_shared: bool = True


@dataclass(frozen=True)
class MemorySizes:
    """Sizes of a store's memory.

    `memory_bytes`: of all blocks of all layers. `num_blocks`: without the null block; overrides
    `memory_bytes`. `max_model_len`: most tokens of a row; by default as many as fit, up to the
    length that the model was trained for. `max_rows`: most rows of all open caches together; every
    beam is one.
    """

    memory_bytes: int = 256 << 20
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_rows: int = 64


class PagedMemory:
    """The manager and the worker of one process, and the requests that have blocks."""

    def __init__(
        self,
        specs: Mapping[str, KVCacheSpec],
        sizes: MemorySizes,
        *,
        device: torch.device,
        max_position_embeddings: int,
        eviction_policy: str,
    ) -> None:
        """Plan and allocate.

        Raises:
            ConfigurationError, NotEnoughMemoryError: the sizes are invalid, or do not fit.
        """
        specs = dict(specs)
        memory_bytes = sizes.memory_bytes
        override = None
        if sizes.num_blocks is not None:
            override = sizes.num_blocks + 1
            memory_bytes = override * sum(spec.page_size_bytes for spec in specs.values())
        options = PlanOptions(
            "auto" if sizes.max_model_len is None else sizes.max_model_len,
            num_gpu_blocks_override=override,
            max_position_embeddings=max_position_embeddings,
        )
        self.config = get_kv_cache_config(options, specs, memory_bytes)
        self.max_model_len = estimate_max_model_len(options, specs, memory_bytes)
        self.block_sizes = tuple(g.kv_cache_spec.block_size for g in self.config.kv_cache_groups)
        self.manager = KVCacheManager(
            self.config,
            self.max_model_len,
            eviction_policy=eviction_policy,
            max_num_seqs=sizes.max_rows,
            has_workers=True,
        )
        self.worker = KVCacheWorker(
            WorkerSettings(
                rank=0,
                kv_cache_config=self.config,
                fingerprint=_NONCE,
                layout_fingerprint=_NONCE,
                incarnation=_NONCE,
                max_num_seqs=sizes.max_rows,
                max_model_len=self.max_model_len,
                device=str(device),
            ),
            clock=SystemClock(),
        )
        self.worker.on_message(Grant(_NONCE, _NONCE, _EPOCH, _NONCE))
        self._seq = 0
        self._is_open = False
        self._num_named = 0

    # Requests.

    def new_request(self, token_ids: Sequence[int], scope: ContentScope) -> Request:
        """Return a request of these tokens without blocks. All but the first count as output,
        so that any of them can be removed."""
        self._num_named += 1
        request = Request(
            f"row-{self._num_named}",
            token_ids[:1],
            lora=scope.lora,
            cache_salt=scope.cache_salt,
            skip_reading_prefix_cache=not scope.is_shared,
            model_epoch=self.manager.model_epoch,
        )
        request.append_output_token_ids(token_ids[1:])
        return request

    def find(self, token_ids: Sequence[int], scope: ContentScope) -> int:
        """Return how many leading tokens are cached, at most all but the last. Holds nothing."""
        return self.manager.get_computed_blocks(self.new_request(token_ids, scope))[1]

    def adopt(self, token_ids: Sequence[int], num_tokens: int, scope: ContentScope) -> Request:
        """Return a request that holds the blocks of its first `num_tokens`, which `find` found.

        With 0 tokens it has no slot and no blocks yet.
        """
        if not num_tokens:
            return self.new_request(token_ids, scope)
        request = self.new_request(token_ids[: num_tokens + 1], scope)
        blocks, num_found = self.manager.get_computed_blocks(request)
        if num_found != num_tokens:
            raise InvariantError(f"{num_found} tokens are cached, {num_tokens} were just now")
        self._require(self.manager.allocate_slots(request, 0, num_tokens, blocks), request, 0)
        request.num_computed_tokens = num_tokens
        request.append_output_token_ids(token_ids[num_tokens + 1 :])
        return request

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Allocate slots for a request's first `num_tokens`, more than are computed.

        Raises:
            OutOfBlocksError: there is no room; the request keeps its blocks.
        """
        num_new = num_tokens - request.num_computed_tokens
        self._require(
            self.manager.allocate_slots(request, num_new, delay_cache_blocks=True), request, num_new
        )

    def publish(self, request: Request, num_tokens: int) -> int:
        """Cache the full blocks of computed tokens; return the number of their tokens."""
        self.manager.cache_blocks(request, num_tokens)
        return num_tokens - num_tokens % min(self.block_sizes)

    def fork(self, parent: Request, scope: ContentScope) -> Request:
        """Return a request that shares all blocks of the parent's computed tokens."""
        child = self.new_request(parent.all_token_ids[: parent.num_computed_tokens].tolist(), scope)
        self._require(self.manager.fork(parent, child), child, 0)
        child.num_computed_tokens = parent.num_computed_tokens
        return child

    def branch(self, request: Request, num_tokens: int, scope: ContentScope) -> Request:
        """Return a request with the first `num_tokens` of another one, computed, in blocks that it
        may write: blocks that others can find are copied where it will write.

        Raises:
            OutOfBlocksError: there is no room; nothing was changed.
        """
        branch = self.new_request(request.all_token_ids[:num_tokens].tolist(), scope)
        blocks, num_hit = self.manager.get_computed_blocks(branch)
        found = self.manager.allocate_slots(
            branch, num_tokens - num_hit, num_hit, blocks, delay_cache_blocks=True
        )
        self._require(found, branch, num_tokens - num_hit)
        sources, destinations = [], []
        tables = zip(
            self.manager.get_block_ids(request.request_id),
            self.manager.get_block_ids(branch.request_id),
            self.block_sizes,
            strict=True,
        )
        for old, new, block_size in tables:
            for column in range(num_hit // block_size, -(-num_tokens // block_size)):
                if NULL_BLOCK_ID not in {old[column], new[column]}:
                    sources.append(old[column])
                    destinations.append(new[column])
        self.begin_forward([Copy(int32_array(sources), int32_array(destinations))])
        self.end_forward()
        branch.num_computed_tokens = num_tokens
        return branch

    def free(self, request: Request) -> None:
        """Free a request's blocks; cached ones stay cached. No effect without a slot."""
        self.manager.free(request)

    def slot_of(self, request: Request) -> int | None:
        """Row of the block tables, None while the request has no blocks."""
        return self.manager.slot_of(request.request_id)

    # Forwards.

    def begin_forward(self, commands: Sequence[Command] = ()) -> None:
        """Execute the manager's commands since the last call, then `commands`.

        Ends a forward that was left open because its model failed.
        """
        self.end_forward()
        self._seq += 1
        self.worker.on_message(
            StepCommands(
                _NONCE, _NONCE, _EPOCH, self._seq, "", 0, (*self.manager.take_commands(), *commands)
            )
        )
        if self.worker.applied_seq != self._seq:
            refused = self.worker.statistics().last_invalid_reason
            raise InvariantError(f"the worker refuses what the manager decided: {refused}")
        self.worker.begin_forward(_EPOCH, self._seq, _FORWARD_TIMEOUT_S)
        self._is_open = True

    def end_forward(self) -> None:
        """Close the open forward, if there is one."""
        if self._is_open:
            self._is_open = False
            self.worker.end_forward(_EPOCH, self._seq)

    def block_table(self, group: int, slots: Sequence[int | None]) -> torch.Tensor:
        """Return the block ids of these slots, `(len(slots), columns)`; null blocks for None."""
        table = self.worker.block_tables.tensor(group)
        index = torch.from_numpy(np.array([slot or 0 for slot in slots], dtype=np.int64))
        rows = table[index.to(table.device)].long()
        absent = [row for row, slot in enumerate(slots) if slot is None]
        rows[absent] = NULL_BLOCK_ID
        return rows

    def close(self) -> None:
        """Release the tensors."""
        self.end_forward()
        self.worker.close()

    def check(self) -> None:
        """Raise `InvariantError` if the tables of manager or worker are inconsistent."""
        self.manager.check()
        self.worker.check()

    # Inside.

    def _require(self, given: KVCacheBlocks | None, request: Request, num_new: int) -> None:
        if given is not None:
            return
        statistics = self.manager.statistics()
        if not statistics.num_free_slots and self.slot_of(request) is None:
            raise OutOfBlocksError(
                f"all {statistics.num_running_requests} rows are in use and one more is wanted: "
                "close caches, use fewer beams or sequences, or make the store with a larger "
                "max_rows"
            )
        core = statistics.core
        raise OutOfBlocksError(
            f"no room for {num_new} more tokens of a row with {request.num_computed_tokens}: "
            f"{core.num_free_blocks} of {core.num_blocks} blocks of {min(self.block_sizes)} tokens "
            f"are free, {statistics.num_running_requests} rows hold the others: close caches, use "
            "a smaller batch or fewer beams, or give the store more memory"
        )
