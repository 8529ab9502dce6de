"""First in, first out: the oldest content goes first, however often it was used since."""

from __future__ import annotations

from kvcache.policies.history_policy import Member, RankedPolicy


class FIFOPolicy(RankedPolicy):
    """An `EvictionPolicy` that orders entries by the arrival of their contents."""

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.rank = 0.0, self._stamp()

    def _place_used(self, member: Member) -> None:
        """The entry keeps its place."""

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        """Evicted contents are forgotten."""
