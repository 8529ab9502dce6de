"""One rank's labels compared with what the coordinator holds to be sealed, at one message.

Between an `Audit` command, applied in order with all label commands, and the report of its job.
Changes nothing: what is wrong is reported with the block's history, and the coordinator withdraws
it. Refuses to look at bytes: that is what content checking is for.
"""

from __future__ import annotations

import numpy as np

from kvcache.protocol.commands import Audit
from kvcache.protocol.labels import LabelTable
from kvcache.protocol.messages import MAX_REPORTED_BLOCKS, JobReport
from kvcache.worker.history import BlockHistory


def audit_labels(audit: Audit, labels: LabelTable, history: BlockHistory) -> JobReport:
    """Return a report that is good when this rank's labels are what `audit` says."""
    found = labels.contents(audit.first_block, audit.end_block)
    expected = audit.block_ids
    size = max(1, labels.digest_bytes)
    span = audit.end_block - audit.first_block
    groups = np.full((2, span), -1, dtype=np.int32)
    digests = np.zeros((2, span, size), dtype=np.uint8)
    for side, (ids, of_groups, packed) in enumerate(
        (
            (expected, audit.groups, audit.digests),
            (found.block_ids, found.groups, found.digests),
        )
    ):
        places = ids - audit.first_block
        groups[side, places] = of_groups
        digests[side, places] = np.frombuffer(packed, np.uint8).reshape(-1, size)
    is_wrong = (groups[0] != groups[1]) | (digests[0] != digests[1]).any(axis=1)
    wrong = np.flatnonzero(is_wrong)[:MAX_REPORTED_BLOCKS]
    if not len(wrong):
        return JobReport(audit.job_id, ok=True)
    details = [
        f"block {audit.first_block + place}: "
        f"{_say('the coordinator', groups[0, place], digests[0, place])}, "
        f"{_say('the rank', groups[1, place], digests[1, place])}; "
        f"{history.describe(audit.first_block + place)}"
        for place in wrong.tolist()
    ]
    block_ids = tuple((wrong + audit.first_block).tolist())
    return JobReport(audit.job_id, ok=False, detail="\n  ".join(details), block_ids=block_ids)


def _say(who: str, group: int, digest: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> str:
    if group < 0:
        return f"{who} knows no content"
    return f"{who} has group {group}, digest {digest.tobytes().hex()[:16]}"
