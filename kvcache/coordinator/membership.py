"""The worker processes of all ranks, and the epochs that they obey.

The coordinator's table of its workers: introductions, grants, and times of silence. An epoch is
saved before it is announced. A process that was replaced stays replaced, however late its messages
arrive.

    Hello ──▶ known ──Grant / Granted──▶ granted      all ranks granted: the epoch can run
                 ◀── a higher epoch, or another process of the rank ──┘
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from kvcache.base.errors import (
    ClusterError,
    MalformedMessageError,
    StaleEpochError,
    SupersededError,
)
from kvcache.base.logs import get_logger
from kvcache.protocol.delivery import MAX_EPOCH
from kvcache.protocol.messages import Grant, Granted, Hello, Refused
from kvcache.protocol.state_store import SmallState, StateStore

logger = get_logger(__name__)

EPOCH_EVENTS = 1 << 40
"""Event numbers that an epoch reserves, more than it can use. They rise with the epoch even if the
saved state is lost."""

MAX_EVENT = 2**63 - 1

_MAX_RETIRED = 64
_MAX_ATTEMPTS = 16


@dataclass
class _Member:
    """One rank: its process, None if it has none, and when a message came from it or went to
    it."""

    incarnation: str | None = None
    is_granted: bool = False
    heard_s: float = 0.0
    asked_s: float = 0.0
    since_s: float = 0.0
    refusal: str = ""
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_RETIRED))


class Membership:
    """The ranks `0 .. num_ranks - 1` of one coordinator."""

    def __init__(
        self, num_ranks: int, fingerprint: str, nonce: str, store: StateStore, *, patience_s: float
    ) -> None:
        """Start without workers. Loads the state; takes no epoch before `take_epoch`.

        `patience_s`: longer than a message may be late.
        """
        self._patience_s = patience_s
        self.fingerprint = fingerprint
        self.nonce = nonce
        self._store = store
        self._saved = store.load()
        self._state = self._saved or SmallState(knows_model_epoch=False)
        self._members = {rank: _Member() for rank in range(num_ranks)}
        self._highest_seen = 0
        self.epoch = 0
        self.first_event = 0
        """The lowest event number that the present epoch has reserved."""
        self.is_epoch_doubted = False
        self.save_problem = ""

    @property
    def model_epoch(self) -> int:
        return self._state.model_epoch

    @property
    def knows_model_epoch(self) -> bool:
        """Whether the saved model epoch is valid. If not, it must be determined."""
        return self._state.knows_model_epoch

    @property
    def is_complete(self) -> bool:
        """Whether every rank has granted the present epoch."""
        return all(member.is_granted for member in self._members.values())

    @property
    def incarnations(self) -> dict[int, str]:
        """The process of each rank that has one."""
        members = self._members.items()
        return {rank: m.incarnation for rank, m in members if m.incarnation is not None}

    def take_epoch(self, now_s: float) -> None:
        """Take an epoch above every known one, save it, and ask all ranks to grant it.

        Raises ClusterError if it cannot be saved; the old epoch is kept then. SupersededError if
        another coordinator has saved one since this one took its own.
        """
        for attempt in range(_MAX_ATTEMPTS):
            epoch = 1 + max(self._state.epoch, self._highest_seen, self.epoch)
            first_event = max(self._state.next_event_chunk, _first_event(epoch))
            end = min(first_event + EPOCH_EVENTS, MAX_EVENT)
            try:
                self._save(replace(self._state, epoch=epoch, next_event_chunk=end))
                break
            except SupersededError:
                if self.epoch or attempt + 1 == _MAX_ATTEMPTS:
                    raise
                # Two coordinators begin at the same time: the later one begins above the other.
                self._saved = self._store.load()
                self._state = self._saved or SmallState(knows_model_epoch=False)
        self.epoch, self.first_event = epoch, first_event
        self.is_epoch_doubted = False
        for member in self._members.values():
            member.is_granted = False
            member.refusal = ""
            member.heard_s = now_s
            member.asked_s = float("-inf")

    def doubt_epoch(self) -> None:
        """End the present epoch without a next one, which could not be saved: ask no rank."""
        self.is_epoch_doubted = True
        for member in self._members.values():
            member.is_granted = False

    def save_model_epoch(self, model_epoch: int) -> None:
        """Save another model epoch. Raises ClusterError; SupersededError if another coordinator now
        decides about it."""
        if model_epoch != self._state.model_epoch or not self.knows_model_epoch:
            self._save(replace(self._state, model_epoch=model_epoch, knows_model_epoch=True))

    def serve(self, rank: int, incarnation: str, now_s: float) -> bool:
        """Record the process of `rank`; return whether it replaces one that granted the epoch.

        A replaced process is accepted again only if its successor does not answer: then the
        successor's introduction was an old one that arrived late.

        Raises StaleEpochError for a replaced process that is not accepted again.
        """
        member = self._member(rank)
        if member.incarnation == incarnation:
            return False
        if incarnation in member.retired:
            is_mute = not member.is_granted and now_s - member.since_s > self._patience_s
            if member.incarnation is None or not is_mute:
                raise StaleEpochError(f"process {incarnation} of rank {rank} was replaced")
            member.retired.remove(incarnation)
        has_granted = member.is_granted
        self.retire(rank)
        member.incarnation, member.since_s = incarnation, now_s
        member.asked_s = float("-inf")
        return has_granted

    def was_replaced(self, rank: int, incarnation: str, nonce: str) -> bool:
        """Return whether a process that once obeyed this coordinator was replaced since."""
        return nonce == self.nonce and incarnation in self._member(rank).retired

    def retire(self, rank: int) -> None:
        """Record that `rank` has no process any more."""
        member = self._member(rank)
        if member.incarnation is not None:
            member.retired.append(member.incarnation)
        member.incarnation, member.is_granted = None, False

    def on_hello(self, hello: Hello, now_s: float) -> bool:
        """Record an introduction; return whether the rank has granted a higher epoch than ours.

        Raises:
            MalformedMessageError: unknown rank, or impossible epoch.
            StaleEpochError: a process that was replaced already.
        """
        if not 0 <= hello.highest_epoch <= MAX_EPOCH:
            raise MalformedMessageError(f"epoch {hello.highest_epoch} from rank {hello.rank}")
        member = self._member(hello.rank)
        if member.incarnation != hello.incarnation:
            raise StaleEpochError(f"process {hello.incarnation} does not serve rank {hello.rank}")
        member.heard_s = now_s
        self._highest_seen = max(self._highest_seen, hello.highest_epoch)
        return hello.highest_epoch > self.epoch

    def on_granted(self, granted: Granted, now_s: float) -> bool:
        """Record a grant of the present epoch; return whether it is new. Raises as `heard`."""
        self.heard(granted.rank, granted.incarnation, granted.nonce, granted.epoch, now_s)
        member = self._members[granted.rank]
        is_news = not member.is_granted
        member.is_granted = True
        return is_news

    def on_refused(self, refused: Refused, now_s: float) -> bool:
        """Record a refusal; return whether to take a higher epoch because of it.

        Raises as `heard` does, and MalformedMessageError for an impossible epoch.
        """
        if not 0 <= refused.highest_epoch <= MAX_EPOCH:
            raise MalformedMessageError(f"epoch {refused.highest_epoch} from rank {refused.rank}")
        self.heard(refused.rank, refused.incarnation, refused.nonce, self.epoch, now_s)
        member = self._members[refused.rank]
        if member.is_granted and refused.highest_epoch <= self.epoch:
            return False
        member.refusal = refused.reason
        self._highest_seen = max(self._highest_seen, refused.highest_epoch)
        return refused.highest_epoch >= self.epoch

    def heard(self, rank: int, incarnation: str, nonce: str, epoch: int, now_s: float) -> None:
        """Record a message of a rank's present process, in our epoch.

        Raises:
            MalformedMessageError: unknown rank.
            StaleEpochError: another process, coordinator or epoch.
        """
        member = self._member(rank)
        present = (member.incarnation, self.nonce, self.epoch)
        if self.is_epoch_doubted and (incarnation, nonce) == present[:2]:
            member.heard_s = now_s  # it is alive, but the message cannot be used
        if self.is_epoch_doubted or (incarnation, nonce, epoch) != present:
            raise StaleEpochError(
                f"rank {rank}: process {incarnation}, coordinator {nonce}, epoch {epoch}; present "
                f"are {present}"
            )
        member.heard_s = now_s

    def heard_again(self, rank: int, now_s: float) -> None:
        """Record a message that `heard` would accept."""
        self._members[rank].heard_s = now_s

    def grants_due(self, now_s: float, resend_s: float) -> dict[int, Grant]:
        """Return the grants to send now to processes that have not answered one."""
        due = {}
        for rank, member in self._members.items():
            is_due = now_s - member.asked_s >= resend_s
            if member.incarnation is not None and not member.is_granted and is_due:
                member.asked_s = now_s
                due[rank] = Grant(self.nonce, member.incarnation, self.epoch, self.fingerprint)
        return due

    def grant_now(self, rank: int, now_s: float) -> Grant | None:
        """Return the grant of a process that has just introduced itself, granted or not."""
        member = self._member(rank)
        if member.incarnation is None or self.is_epoch_doubted:
            return None
        member.asked_s = now_s
        return Grant(self.nonce, member.incarnation, self.epoch, self.fingerprint)

    def pings_due(self, now_s: float, heartbeat_s: float) -> list[int]:
        """Return the granted ranks that have been silent for a while and were not pinged since."""
        due = []
        for rank, member in self._members.items():
            quiet_since_s = max(member.heard_s, member.asked_s)
            if member.is_granted and now_s - quiet_since_s >= heartbeat_s:
                member.asked_s = now_s
                due.append(rank)
        return due

    def problem(self, now_s: float, silence_s: float) -> str:
        """Return what cannot be saved, and which ranks do not answer since when; empty if none."""
        problems = [self.save_problem] if self.save_problem else []
        for rank, member in self._members.items():
            silent_s = now_s - member.heard_s
            if silent_s <= silence_s and not member.refusal:
                continue
            if member.refusal and not member.is_granted:
                problems.append(f"rank {rank} refuses: {member.refusal}")
            elif silent_s > silence_s:
                what = "not been heard from" if member.is_granted else "not granted the epoch"
                problems.append(f"rank {rank} has {what} for {silent_s:.1f} s")
        return "; ".join(problems)

    def missing(self) -> list[int]:
        """Return the ranks that have not granted the present epoch."""
        return [rank for rank, member in self._members.items() if not member.is_granted]

    def _save(self, state: SmallState) -> None:
        state = replace(state, owner=self.nonce)
        try:
            self._store.save(state, self._saved)
        except SupersededError:
            # Our own attempt may have been saved although it returned an error.
            saved = self._store.load()
            if saved is None or saved.owner != self.nonce:
                raise
            if saved != state:
                self._store.save(state, saved)
        except ClusterError as error:
            if not self.save_problem:
                logger.error(
                    "epoch %d: the state of the cluster cannot be saved: %s", self.epoch, error
                )
            self.save_problem = f"the state of the cluster cannot be saved: {error}"
            raise
        if self.save_problem:
            logger.info("epoch %d: the state of the cluster can be saved again", self.epoch)
        self._state = self._saved = state
        self.save_problem = ""

    def _member(self, rank: int) -> _Member:
        member = self._members.get(rank)
        if member is None:
            raise MalformedMessageError(
                f"rank {rank} does not exist, the ranks are 0..{len(self._members) - 1}"
            )
        return member


def _first_event(epoch: int) -> int:
    """Return a number above all that earlier epochs have used. If there are none left, return
    the saved one."""
    first = epoch * EPOCH_EVENTS
    return first if first < MAX_EVENT else 0
