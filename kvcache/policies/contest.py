"""Who leads, recency or the index of reuse: followed by the hits of two caches of names.

Stands between the history of uses, where both are played, and the hazard policy, which follows the
leader. Recency leads until the index has proven itself, and again when it falls behind.
"""

from __future__ import annotations

_RISE_PER_ROOM = 0.01
"""Of the room, how many hits the index must be ahead to lead: a change of the leader costs some
hits of contents that the other one kept, so there has to be something to win."""

_FALL_PER_ROOM = 0.02
"""Of the room, how many hits it may fall behind while it leads: more than to rise, since what it
leads by comes in the long run, and what it lacks at times comes in bursts."""

_FALL_PER_GAIN = 0.5
"""Of what it has gained by name, how much it may lose again. What a change of the leader costs the
real cache is not in it."""

_LEAST_BLOCKS = 32
"""A lead or lag of less is one request, not a habit."""

_GAIN_HALF_LIFE_ROOMS = 20.0
"""After so many rooms of blocks used, half of a gain no longer vouches for the index."""


class Contest:
    """Two sums of the hits of index over recency, each since it was in favour last (CUSUM: Page,
    "Continuous inspection schemes", 1954); `index_leads` says the outcome."""

    def __init__(self) -> None:
        """Let recency lead."""
        self.index_leads = False
        self._evidence_blocks = 0.0
        self._gain_blocks = 0.0

    def note(self, ahead_blocks: int, num_blocks: int, room_blocks: int) -> bool:
        """Take note that index was ahead by so many hits; return whether the leader changes.

        `num_blocks` were used; the cache has room for `room_blocks`.
        """
        room = max(1, room_blocks)
        if self.index_leads:
            self._gain_blocks += ahead_blocks
        self._gain_blocks *= 0.5 ** (num_blocks / (_GAIN_HALF_LIFE_ROOMS * room))
        against = -ahead_blocks if self.index_leads else ahead_blocks
        self._evidence_blocks = max(0.0, self._evidence_blocks + against)
        if self.index_leads:
            limit = max(_FALL_PER_ROOM * room, _FALL_PER_GAIN * self._gain_blocks)
        else:
            limit = _RISE_PER_ROOM * room
        if self._evidence_blocks <= max(_LEAST_BLOCKS, limit):
            return False
        self.index_leads = not self.index_leads
        self._evidence_blocks = 0.0
        return True
