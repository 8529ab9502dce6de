"""Checks whether a whole message can be obeyed, before any of its commands is applied.

Checks what does not change with time: sizes that fit each other, ids and slots that exist. A
message is refused as a whole, without effect.
"""

from __future__ import annotations

import numpy as np

from kvcache.base.arrays import Int32Array, are_below, are_distinct, are_ids
from kvcache.base.errors import BlockError, MalformedMessageError
from kvcache.offload.keys import GROUP_BYTES
from kvcache.offload.specs import HOST_MEDIUM
from kvcache.protocol.commands import (
    Audit,
    BlockTablePatch,
    Command,
    Copy,
    Discard,
    Fence,
    Fetch,
    Label,
    Load,
    Reset,
    SealSlots,
    Spill,
    Store,
    Unlabel,
    WriteExpected,
    Zero,
)
from kvcache.protocol.labels import LabelTable
from kvcache.protocol.messages import StepCommands
from kvcache.worker.block_tables import BlockTables
from kvcache.worker.content.checker import ContentChecker
from kvcache.worker.settings import WorkerSettings


class CommandValidator:
    """Says whether this rank can obey a message."""

    def __init__(
        self,
        settings: WorkerSettings,
        labels: LabelTable,
        tables: BlockTables,
        checker: ContentChecker | None,
    ) -> None:
        """Check against these; `checker` None means that content checking is off."""
        self._num_blocks = settings.kv_cache_config.num_blocks
        self._num_host_slots = settings.kv_cache_config.host_blocks
        self._num_groups = len(settings.specs)
        self._labels = labels
        self._tables = tables
        self._checker = checker

    def validate(self, message: StepCommands) -> None:
        """Raise BlockError or MalformedMessageError unless every command can be obeyed."""
        for command in message.commands:
            self._validate_command(command)
        num_forwards = sum(isinstance(command, WriteExpected) for command in message.commands)
        if num_forwards > 1:
            raise MalformedMessageError(
                f"a message brings {num_forwards} forwards: send at most one in each"
            )

    def _validate_command(self, command: Command) -> None:
        match command:
            case Zero():
                self._require_blocks("zero", command.block_ids)
            case Copy():
                _require_pairs("copy", command.sources, command.destinations)
                self._require_blocks("copy", command.sources)
                self._require_blocks("copy", command.destinations)
            case BlockTablePatch():
                self._tables.validate(command)
            case Label():
                self._labels.validate(command)
                groups = command.groups
                if not are_below(groups, self._num_groups):
                    raise BlockError(
                        f"label for group {int(groups.min())}..{int(groups.max())}, this rank has "
                        f"{self._num_groups} groups"
                    )
            case Unlabel():
                self._require_blocks("unlabel", command.block_ids)
            case Store():
                _require_pairs("store", command.sources, command.destinations)
                self._require_blocks("store", command.sources)
            case Load():
                _require_pairs("load", command.sources, command.destinations)
                self._require_blocks("load", command.destinations)
            case Spill():
                self._require_keys("spill", command.keys, len(command.sources))
            case Fetch():
                _require_distinct("fetch", command.destinations)
                self._require_keys("fetch", command.keys, len(command.destinations))
            case Discard():
                self._require_keys("discard", command.keys, None)
                self._require_slots("discard", command.medium, command.slots)
            case SealSlots():
                self._require_slots("seal", command.medium, command.slots)
            case Reset():
                if command.model_epoch < 0:
                    raise MalformedMessageError(f"reset to model epoch {command.model_epoch}")
            case Fence():
                if not command.client_id:
                    raise MalformedMessageError("fence names no client")
            case WriteExpected():
                if self._checker is None:
                    raise MalformedMessageError(
                        "write_expected was sent to a worker without content checking: switch it "
                        "on for workers too"
                    )
                self._checker.limits.validate(command)
            case Audit():
                self._validate_audit(command)
            case _:
                raise MalformedMessageError(
                    f"command of type {type(command).__name__} is not known here"
                )

    def _require_keys(self, verb: str, keys: bytes, count: int | None) -> None:
        """Raise unless `keys` are whole keys, `count` of them where it is known how many."""
        size = self._labels.digest_bytes + GROUP_BYTES
        if len(keys) % size or (count is not None and len(keys) != count * size):
            what = "whole ones" if count is None else f"{count} of them"
            raise MalformedMessageError(
                f"{verb} with {len(keys)} bytes of keys, one has {size}: send {what}"
            )

    def _require_slots(self, verb: str, medium: str, slots: Int32Array) -> None:
        """Raise unless all are host slots of this rank."""
        if len(slots) and medium != HOST_MEDIUM:
            raise MalformedMessageError(
                f"{verb} of slots of medium {medium!r}: only {HOST_MEDIUM!r} has slots"
            )
        if not are_below(slots, self._num_host_slots):
            raise BlockError(
                f"{verb} of host slots {int(slots.min())}..{int(slots.max())}, this rank has "
                f"{self._num_host_slots}"
            )

    def _validate_audit(self, audit: Audit) -> None:
        ids = audit.block_ids
        first, end = audit.first_block, audit.end_block
        is_inside = not len(ids) or (first <= int(ids[0]) and int(ids[-1]) < end)
        is_range = 0 <= first < end <= self._num_blocks
        if not (is_inside and is_range) or (np.diff(ids) <= 0).any():
            raise BlockError(
                f"audit of blocks {audit.first_block} to {audit.end_block - 1}, this rank has "
                f"{self._num_blocks}: name each block there once, in rising order"
            )
        size = self._labels.digest_bytes
        if len(audit.digests) != len(ids) * size or len(audit.groups) != len(ids):
            raise MalformedMessageError(
                f"audit of {len(ids)} blocks with {len(audit.groups)} groups and "
                f"{len(audit.digests)} bytes of digests, one has {size}"
            )

    def _require_blocks(self, verb: str, block_ids: Int32Array) -> None:
        """Raise unless all ids are blocks of the pool, and none is the null block."""
        if not are_ids(block_ids, self._num_blocks):
            raise BlockError(
                f"{verb} of blocks {int(block_ids.min())}..{int(block_ids.max())}, this rank has "
                f"1..{self._num_blocks - 1}"
            )


def _require_pairs(verb: str, sources: Int32Array, destinations: Int32Array) -> None:
    if len(sources) != len(destinations):
        raise MalformedMessageError(
            f"{verb} has {len(sources)} sources and {len(destinations)} destinations"
        )
    _require_distinct(verb, destinations)


def _require_distinct(verb: str, destinations: Int32Array) -> None:
    if not are_distinct(destinations):
        raise MalformedMessageError(f"{verb} writes a destination twice")
