"""A rank's labels on their way to a coordinator that begins: in pieces, none of them large.

Between the worker, which is asked from some block on, and the executor's label table. Changes
nothing, so that a piece asked for twice is the same; refuses to know which blocks agree with those
of other ranks.
"""

from __future__ import annotations

from kvcache.delivery import CommandReceiver
from kvcache.labels import LabelSet
from kvcache.messages import ClientStep, LabelReport
from kvcache.worker.executor import CommandExecutor
from kvcache.worker.settings import WorkerSettings


def _key_bytes(labels: LabelSet) -> int:
    """Return how much longer namespaces and extra keys make a report."""
    names = sum(map(len, labels.labels.namespace_names))
    return names + sum(map(len, labels.labels.extra_keys.values()))


class LabelReporter:
    """Reports the labels of one worker, which locks around it."""

    def __init__(
        self, settings: WorkerSettings, receiver: CommandReceiver, executor: CommandExecutor
    ) -> None:
        """Report what `executor` holds, in the epoch of `receiver`."""
        self._settings = settings
        self._receiver = receiver
        self._executor = executor

    def collect(self, first_block: int = 0, end_block: int | None = None) -> LabelSet:
        """Return the labels of blocks `[first_block, end_block)` as of the last applied message."""
        return self._executor.labels.collect(
            self._settings.rank,
            self._receiver.epoch,
            self._receiver.applied_seq,
            self._settings.layout_fingerprint,
            first_block=first_block,
            end_block=end_block,
        )

    def report(self, first_block: int) -> LabelReport:
        """Say what blocks hold, from `first_block` on as far as one message goes.

        Whose steps were applied is in the first piece.
        """
        table, gate = self._executor.labels, self._executor.gate
        first_block = min(max(0, first_block), table.num_blocks)
        num_reported = max(1, self._settings.max_report_bytes // table.label_bytes)
        end_block = min(first_block + num_reported, table.num_blocks)
        labels = self.collect(first_block, end_block)
        while end_block - first_block > 1 and (
            _key_bytes(labels) + (end_block - first_block) * table.label_bytes
            > 2 * self._settings.max_report_bytes
        ):
            end_block = first_block + (end_block - first_block) // 2
            labels = self.collect(first_block, end_block)
        steps = gate.client_steps if first_block == 0 else {}
        return LabelReport(
            self._receiver.nonce,
            self._settings.incarnation,
            self._settings.rank,
            self._receiver.epoch,
            first_block,
            end_block,
            table.num_blocks,
            self._executor.model_epoch,
            labels.version,
            labels.layout_fingerprint,
            labels.digest_bytes,
            labels.labels,
            labels.checksums,
            tuple(ClientStep(client_id, step) for client_id, step in steps.items()),
        )
