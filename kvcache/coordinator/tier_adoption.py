"""Takes over the tier contents that every rank has from the previous epoch.

Host memory and files of the ranks outlive a coordinator and a worker, but the tiers' state begins
empty in every epoch. Adoption runs between steps, which are served meanwhile: a look-up of a key
that is not known yet is answered with "retry". Ranks drop contents on which they do not agree, and
those of another model epoch: the process that should have removed them may have ended first. No
request waits without end: slots that are not reported in time are dropped; files are requested as
long as ranks read their directories, but without a wait.

    begin ▶ CollectLabels(host, file) ▶ rank ▶ LabelReport ... ▶ all agree ▶ adopt, discard the rest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import EMPTY_INT32, BoolArray, Int32Array, int32_array
from kvcache.base.errors import KVCacheError, MalformedMessageError
from kvcache.base.logs import get_logger
from kvcache.coordinator.label_collection import LabelCollection, LabelQuestion
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.keys import OffloadKey, first_victims_first, get_offload_block_hash, label_keys
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import Label
from kvcache.protocol.label_agreement import NO_LABELS, agreed_labels
from kvcache.protocol.labels import LabelSet, label_rows
from kvcache.protocol.messages import LabelReport, Outgoing
from kvcache.requests.request_content import parse_namespace_name

logger = get_logger(__name__)

ASK_S = 0.05
"""Pause after a rank's answer "not read yet"."""


class TierAdoption:
    """The tier contents that ranks report at the beginning of one epoch."""

    def __init__(self, tiers: TierHierarchy, question: LabelQuestion, patience_s: float) -> None:
        """Fill `tiers`, which are empty. Requests wait at most `patience_s` for it."""
        self._tiers = tiers
        self._epoch = question.epoch
        self._model_epoch = question.model_epoch
        self._patience_s = patience_s
        self._give_up_s = float("inf")
        self._is_forgotten = False
        self._slots: list[Int32Array] = []
        self._keys: list[OffloadKey] = []
        self._open = {HOST_MEDIUM: LabelCollection(question, HOST_MEDIUM)}
        if tiers.disk is not None:
            sooner = replace(question, resend_s=min(question.resend_s, ASK_S))
            self._open[FILE_MEDIUM] = LabelCollection(sooner, FILE_MEDIUM)
        self.num_adopted = 0

    @property
    def is_over(self) -> bool:
        """Whether adoption has ended."""
        return not self._open

    def begin(self, now_s: float) -> list[Outgoing]:
        """Ask every rank. Until the answers arrive, the tiers do not know their contents."""
        self._tiers.begin_adoption()
        logger.info(
            "epoch %d: ranks are asked for their tier contents: %s",
            self._epoch,
            ", ".join(self._open),
        )
        self._give_up_s = now_s + self._patience_s
        return [message for each in self._open.values() for message in each.begin(now_s)]

    def on_report(self, report: LabelReport, now_s: float) -> list[Outgoing]:
        """Take a rank's report; request more."""
        collection = self._open.get(report.medium)
        if collection is None:
            return []
        if report.medium == FILE_MEDIUM and not report.num_blocks:
            problem = f"rank {report.rank} works without files: look into its log"
            self._tiers.disk_use.leave(problem)
            collection.problem = problem
        asked = collection.on_report(report, now_s)
        self._close_what_is_over()
        return asked

    def on_tick(self, now_s: float) -> list[Outgoing]:
        """Ask again, or give up."""
        asked = [
            message
            for collection in self._open.values()
            for message in collection.on_tick(now_s, self._patience_s)
        ]
        if now_s > self._give_up_s:
            self._give_up_s = float("inf")
            self._wait_no_longer()
        self._close_what_is_over()
        return asked

    def forget(self) -> None:
        """Adopt nothing from before, because the cache was reset."""
        self._is_forgotten = True

    def take_discards(self) -> tuple[Int32Array, list[OffloadKey]]:
        """Return the slots and keys that ranks must drop because not all ranks have them."""
        slots: Int32Array = np.concatenate([EMPTY_INT32, *self._slots])
        keys, self._slots, self._keys = self._keys, [], []
        return slots, keys

    def _wait_no_longer(self) -> None:
        """Stop waiting. Slots are dropped, and their memory is reused. Files would stay and take
        room, so they are adopted when all are known."""
        if HOST_MEDIUM in self._open:
            collection = self._open[HOST_MEDIUM]
            collection.problem = collection.problem or "it takes too long"
        if FILE_MEDIUM in self._open:
            problem = "ranks still read their directories: no file is hit before they have finished"
            logger.warning("epoch %d: the %s tier is late: %s", self._epoch, FILE_MEDIUM, problem)
            self._tiers.disk_use.postpone(problem)

    def _close_what_is_over(self) -> None:
        for medium in [medium for medium, each in self._open.items() if each.is_over]:
            collection = self._open.pop(medium)
            label_sets = collection.label_sets()
            num_adopted = self.num_adopted
            if collection.problem:
                self._warn_of_empty(medium, collection.problem)
            adopt = self._adopt_files
            if medium == HOST_MEDIUM:
                adopt = partial(self._adopt_host, generations=collection.generations())
            try:
                adopt(label_sets)
            except KVCacheError as error:
                self._warn_of_empty(medium, str(error))
                adopt([])
            logger.info(
                "epoch %d: of the %s tier %d blocks are taken over",
                self._epoch,
                medium,
                self.num_adopted - num_adopted,
            )

    def _warn_of_empty(self, medium: str, reason: str) -> None:
        logger.warning("epoch %d: the %s tier begins empty: %s", self._epoch, medium, reason)

    def _adopt_host(
        self, label_sets: Sequence[LabelSet], generations: npt.NDArray[np.uint32]
    ) -> None:
        agreed = NO_LABELS
        if label_sets and not self._is_forgotten:
            agreed = agreed_labels(label_sets)
            rows = np.flatnonzero(self._are_current(agreed))
            is_agreed = np.isin(label_sets[0].labels.block_ids, agreed.block_ids)
            newest_first = rows[np.argsort(generations[is_agreed][rows], kind="stable")[::-1]]
            agreed = _by_eviction(label_rows(agreed, newest_first))
        told = [label_set.labels.block_ids for label_set in label_sets]
        rest = np.setdiff1d(np.concatenate([EMPTY_INT32, *told]), agreed.block_ids)
        if len(rest):
            self._slots.append(int32_array(rest))
        self.num_adopted += len(agreed.block_ids)
        self._tiers.adopt_host(agreed)

    def _adopt_files(self, label_sets: Sequence[LabelSet]) -> None:
        """Files have no numbers: equal keys are equal files."""
        keys = [label_keys(label_set.labels) for label_set in label_sets]
        common: set[OffloadKey] = set()
        if keys and not self._is_forgotten:
            current = [
                set(compress(named, self._are_current(label_set.labels)))
                for named, label_set in zip(keys, label_sets, strict=True)
            ]
            common = set.intersection(*current)
        rest = set().union(*keys) - common
        self._keys += sorted(rest)
        self.num_adopted += len(common)
        self._tiers.adopt_disk(
            _by_eviction(_rows_of(label_sets[0].labels, keys[0], common)) if common else NO_LABELS
        )

    def _are_current(self, labels: Label) -> BoolArray:
        """Return for each row whether the weights of this epoch have made its content."""
        names = labels.namespace_names
        are_current = np.array([self._is_current(name) for name in names], np.bool_)
        found: BoolArray = are_current[labels.namespaces]
        return found

    def _is_current(self, namespace: bytes) -> bool:
        try:
            return parse_namespace_name(namespace).model_epoch == self._model_epoch
        except MalformedMessageError:
            return False


def _by_eviction(labels: Label) -> Label:
    """Return labels, given newest first, in the order in which their blocks should be
    evicted."""
    parents = label_keys(replace(labels, digests=labels.parent_digests))
    digests = [get_offload_block_hash(key) for key in parents]
    order = first_victims_first(label_keys(labels), digests)
    return label_rows(labels, np.array(order, dtype=np.intp))


def _rows_of(labels: Label, keys: Sequence[OffloadKey], wanted: set[OffloadKey]) -> Label:
    """Return the rows of `labels` with wanted keys, the first one of each."""
    first = {key: row for row, key in reversed(list(enumerate(keys))) if key in wanted}
    return label_rows(labels, np.array(sorted(first.values()), dtype=np.intp))
