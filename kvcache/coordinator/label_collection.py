"""Collects the labels of all ranks when a new epoch begins.

Runs after fencing, when every rank has granted the epoch and no older one runs. The epoch state's
manager is rebuilt from the labels. Each rank is asked piece by piece; a question without an answer
is repeated. If labels describe another layout than the plan, or cannot be understood, the epoch
begins cold.

    CollectLabels(0) ──▶ rank ──LabelReport 0..n──▶ CollectLabels(n) ──▶ ... ──▶ label sets of all
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import EMPTY_INT32
from kvcache.base.errors import KVCacheError, MalformedMessageError, VersionMismatchError
from kvcache.offload.specs import DEVICE_MEDIUM, FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.labels import LabelSet, join_label_sets
from kvcache.protocol.messages import CollectLabels, LabelReport, Outgoing, WorkerAddress


@dataclass(frozen=True)
class LabelQuestion:
    """The ranks that an epoch asks for labels, and what the labels must match to be used.

    `layout_fingerprints` are by rank; an empty one is not compared. A layout defines the meaning of
    a block's bytes: model, hash algorithm and seed, groups, and the rank's coordinates. A question
    without an answer is repeated after `resend_s`.
    """

    num_ranks: int
    nonce: str
    epoch: int
    model_epoch: int
    resend_s: float
    layout_fingerprints: tuple[str, ...] = ()

    def layout_of(self, rank: int) -> str:
        """Return the fingerprint that a rank must have, empty if any will do."""
        return self.layout_fingerprints[rank] if rank < len(self.layout_fingerprints) else ""


@dataclass
class _Rank:
    """The labels that one rank has sent so far."""

    next_block: int = 0
    num_blocks: int | None = None
    asked_s: float = 0.0
    since_s: float = 0.0
    pieces: list[LabelSet] = field(default_factory=list)
    generations: bytes = b""

    @property
    def is_complete(self) -> bool:
        return self.num_blocks is not None and self.next_block >= self.num_blocks


class LabelCollection:
    """The labels of all ranks in one epoch, as they arrive.

    `problem` is empty, or says why they cannot be used; then no more are requested.
    """

    def __init__(self, question: LabelQuestion, medium: str = DEVICE_MEDIUM) -> None:
        """Start empty. `medium` is the medium of the labelled blocks."""
        self._medium = medium
        self.question = question
        self._ranks = {rank: _Rank() for rank in range(question.num_ranks)}
        self._client_steps: dict[str, dict[int, int]] = {}
        self.highest_model_epoch = 0
        self.problem = ""

    @property
    def is_over(self) -> bool:
        """Whether all labels have arrived, or are not needed."""
        return bool(self.problem) or all(rank.is_complete for rank in self._ranks.values())

    @property
    def clients(self) -> frozenset[str]:
        """The clients with a step that some rank has applied, and that were not given up since."""
        return frozenset(self._client_steps)

    def applied_steps(self) -> dict[str, int]:
        """Return, by client, the last step that every rank has applied."""
        num_ranks = len(self._ranks)
        known = self._client_steps.items()
        return {client: min(steps.values()) for client, steps in known if len(steps) == num_ranks}

    def begin(self, now_s: float) -> list[Outgoing]:
        """Ask every rank."""
        for rank in self._ranks.values():
            rank.since_s = now_s
        return [self._ask(rank, now_s) for rank in self._ranks]

    def on_report(self, report: LabelReport, now_s: float) -> list[Outgoing]:
        """Take a piece of its rank and epoch, which the caller has checked; request the next one.
        A piece that was not requested, such as a repeat, changes nothing."""
        rank = self._ranks[report.rank]
        self.highest_model_epoch = max(self.highest_model_epoch, report.model_epoch)
        if self.is_over or report.first_block != rank.next_block or rank.is_complete:
            return []
        is_reading = self._medium == FILE_MEDIUM and report.first_block < report.num_blocks
        if is_reading and report.end_block == report.first_block:
            rank.since_s = now_s  # it is alive and reading; ask again later
            return []
        try:
            piece = self._read(report)
        except (MalformedMessageError, VersionMismatchError) as error:
            self.problem = str(error)
            return []
        if report.first_block == 0:
            for client in report.client_steps:
                self._client_steps.setdefault(client.client_id, {})[report.rank] = client.step
        rank.pieces.append(piece)
        rank.generations += report.generations
        rank.num_blocks, rank.next_block = report.num_blocks, report.end_block
        rank.since_s = now_s
        return [] if rank.is_complete else [self._ask(report.rank, now_s)]

    def on_tick(self, now_s: float, patience_s: float) -> list[Outgoing]:
        """Ask again ranks that have not answered for a while; give up after `patience_s`."""
        late = self.problem_at(now_s, patience_s)
        if late:
            self.problem = self.problem or late
            return []
        return [
            self._ask(rank, now_s)
            for rank, state in self._ranks.items()
            if not state.is_complete and now_s - state.asked_s >= self.question.resend_s
        ]

    def missing(self) -> list[int]:
        """Return the ranks whose labels are incomplete."""
        return [rank for rank, state in self._ranks.items() if not state.is_complete]

    def problem_at(self, now_s: float, silence_s: float) -> str:
        """Return the ranks that have sent nothing new for longer than `silence_s`, as a text."""
        silent = {rank: now_s - self._ranks[rank].since_s for rank in self.missing()}
        return "; ".join(
            f"rank {rank} has not sent its labels for {silent_s:.1f} s"
            for rank, silent_s in silent.items()
            if silent_s > silence_s
        )

    def settle_model_epoch(self) -> int:
        """Return the model epoch if none was saved: the first one if no rank has labels.
        Otherwise a label's epoch may be that of earlier weights, and is not used."""
        pieces = [piece for rank in self._ranks.values() for piece in rank.pieces]
        if not self.highest_model_epoch and not any(len(p.labels.block_ids) for p in pieces):
            return 0
        self.problem = "no state was saved, so that it is not known which weights are loaded"
        return self.highest_model_epoch + 1

    def label_sets(self) -> list[LabelSet]:
        """Return the labels of all ranks, in order; empty if they cannot be used."""
        if self.problem or not self.is_over:
            return []
        try:
            return [join_label_sets(rank.pieces) for rank in self._ranks.values()]
        except KVCacheError as error:
            self.problem = str(error)
            return []

    def generations(self) -> npt.NDArray[np.uint32]:
        """Return the generation of each label of the first rank: higher the later it was written;
        0 in media without any."""
        rank = self._ranks[0]
        count = sum(len(piece.labels.block_ids) for piece in rank.pieces)
        return np.frombuffer(rank.generations or bytes(4 * count), "<u4")

    def _ask(self, rank: int, now_s: float) -> Outgoing:
        state = self._ranks[rank]
        state.asked_s = now_s
        asked = self.question
        message = CollectLabels(asked.nonce, asked.epoch, state.next_block, self._medium)
        return Outgoing((WorkerAddress(rank),), message)

    def _read(self, report: LabelReport) -> LabelSet:
        """Return the labels of a piece; raises ProtocolError if they have another meaning."""
        asked = self.question
        # Labels of tiers name their weights. A rank that has not heard of the present ones must
        # tell, too, so that what ranks have of earlier ones can be dropped.
        of_device = self._medium == DEVICE_MEDIUM
        model_epoch = asked.model_epoch if of_device else report.model_epoch
        layout = asked.layout_of(report.rank)
        known = [rank.num_blocks for rank in self._ranks.values() if rank.num_blocks is not None]
        for what, found, wanted in (
            ("model epoch", report.model_epoch, model_epoch),
            ("layout", report.layout_fingerprint, layout or report.layout_fingerprint),
            ("number of blocks", report.num_blocks, known[0] if known else report.num_blocks),
        ):
            if found != wanted:
                raise MalformedMessageError(
                    f"labels of rank {report.rank} are about other bytes: their {what} is {found}, "
                    f"{wanted} was expected"
                )
        if not report.first_block < report.end_block <= report.num_blocks:
            raise MalformedMessageError(
                f"labels of rank {report.rank} for blocks {report.first_block} to "
                f"{report.end_block} of {report.num_blocks}"
            )
        labels = report.labels
        num_expected = 4 * len(labels.block_ids) if self._medium == HOST_MEDIUM else 0
        if len(report.generations) != num_expected:
            raise MalformedMessageError(
                f"labels of rank {report.rank}: {len(report.generations)} bytes of generations for "
                f"{len(labels.block_ids)} blocks, expected {num_expected}"
            )
        if self._medium == FILE_MEDIUM:
            # Files have no numbers: they get different ones.
            before = sum(len(p.labels.block_ids) for p in self._ranks[report.rank].pieces)
            numbers = np.arange(before, before + len(labels.block_ids), dtype=np.int32)
            labels = replace(labels, block_ids=numbers)
        piece = LabelSet(
            report.version,
            report.rank,
            report.epoch,
            0,
            report.layout_fingerprint,
            report.digest_bytes,
            labels,
            report.checksums,
        )
        ids = EMPTY_INT32 if self._medium == FILE_MEDIUM else labels.block_ids
        if len(ids) and not report.first_block <= int(ids.min()) <= int(ids.max()) < (
            report.end_block
        ):
            raise MalformedMessageError(
                f"labels of rank {report.rank} for blocks {int(ids.min())} to {int(ids.max())}, "
                f"asked were {report.first_block} to {report.end_block - 1}"
            )
        return piece
