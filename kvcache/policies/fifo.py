"""First in, first out: what was cached first goes first, however often it was used since."""

from __future__ import annotations

from kvcache.policies.history_policy import Member, RankedPolicy


class FIFOPolicy(RankedPolicy):
    """An `EvictionPolicy` that keeps entries in the order in which their contents came."""

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.rank = 0.0, self._stamp()

    def _place_used(self, member: Member) -> None:
        """It goes back to where it stood."""

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        """What was evicted is forgotten."""
