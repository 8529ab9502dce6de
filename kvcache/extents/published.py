"""Blocks that became hittable together, and the steps they wait for.

Between a row that fills blocks and the report that confirms or voids its step. Nothing here is per
block: arrays of handles say which blocks, and those whose life has ended meanwhile drop out by
themselves. Refuses to seal or to withdraw; it says what belongs to which step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvcache.arrays import IndexArray
from kvcache.errors import RequestError
from kvcache.extents.block_store import FIRST_CLIENT
from kvcache.extents.rows import Row
from kvcache.extents.run import HandleArray, Run
from kvcache.hashing import ExtraKeys, generate_block_hash_extra_keys, need_extra_keys
from kvcache.request import Namespace, Request

NO_STEP = -1

MAX_CLIENTS = (1 << 15) - FIRST_CLIENT
"""Clients whose numbers fit into the blocks' seal states."""

ExtraKeysOf: TypeAlias = Callable[[int, int], "ExtraKeys | None"]
"""Returns the extra keys of a block at tokens `[start, end)`."""


def extra_keys_of(request: Request) -> ExtraKeysOf | None:
    """Return what says the extra keys of a request's blocks, None where none has any."""
    if not need_extra_keys(request):
        return None

    def extra_keys(start: int, end: int) -> ExtraKeys | None:
        return generate_block_hash_extra_keys(request, start, end, 0)[0]

    return extra_keys


@dataclass(slots=True, eq=False)
class Segment:
    """Successive units of one request: `num_units` of them, from `first_unit` on, now in `run`.

    `tokens` and `digests` begin at `base_unit`, some units before where blocks are longer than a
    unit; `parent` is the digest before that. Tokens are the request's own, not those it is matched
    by. `extra_keys` says what else the tokens `[start, end)` depend on; None where nothing does.
    """

    run: Run
    first_unit: int
    num_units: int
    request_id: str
    namespace: Namespace
    base_unit: int
    tokens: bytes
    digests: bytes
    parent: bytes
    extra_keys: ExtraKeysOf | None = None


@dataclass(slots=True, eq=False)
class Published:
    """Blocks of some segments. `handles` has a row per group, a column per unit of all segments.

    With `is_content` the units entered the tree; otherwise blocks were put beside units that were
    there already. Of `doubles_of` a row the units were there already too, and nothing was put.
    Where each unit has a block of each group, `block_ids` are those of `handles`; as long as the
    store's `num_cut_short` stays what it was then, all of them still wait.
    """

    segments: Sequence[Segment]
    handles: HandleArray
    is_content: bool
    step: int = NO_STEP
    doubles_of: Row | None = None
    block_ids: IndexArray | None = None
    num_cut_short: int = 0


class StepLedger:
    """The open step, and what waits for steps to complete or fail, by client and in order.

    Clients have numbers, by which blocks say for whom they wait; a number is given to somebody else
    when nothing waits for its client.
    """

    def __init__(self) -> None:
        """Know no step."""
        self.client_id = ""
        self.step = NO_STEP
        self.is_open = False
        """Whether a step is open."""
        self._waiting: dict[str, deque[Published]] = {}
        self._numbers: dict[str, int] = {}
        self._free_numbers: list[int] = []

    def open(self, client_id: str, step: int) -> None:
        """Open a step.

        Raises:
            RequestError: a later one of the client waits, or steps of too many clients do; nothing
                was changed.
        """
        waiting = self._waiting.get(client_id)
        if not client_id or step < 0 or (waiting and waiting[-1].step > step):
            latest = f", whose latest is {waiting[-1].step}" if waiting else ""
            raise RequestError(
                f"cannot open step {step} of client {client_id!r}{latest}: a client has a name, "
                "and its step numbers count up from 0 or more"
            )
        if client_id not in self._numbers and len(self._numbers) >= MAX_CLIENTS:
            raise RequestError(
                f"cannot open step {step} of client {client_id!r}: steps of {MAX_CLIENTS} clients "
                "wait already: complete or fail those of clients that have gone"
            )
        self.client_id, self.step, self.is_open = client_id, step, True

    def close(self) -> None:
        """End the open step, if any."""
        self.client_id, self.step, self.is_open = "", NO_STEP, False

    def number(self) -> int:
        """Return the number of the open step's client."""
        number = self._numbers.get(self.client_id)
        if number is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
            else:
                number = FIRST_CLIENT + len(self._numbers)
            self._numbers[self.client_id] = number
        return number

    def known_number(self) -> int | None:
        """Return the number of the open step's client, None if nothing of it waits."""
        return self._numbers.get(self.client_id)

    def add(self, published: Published) -> None:
        """Let blocks wait for the open step."""
        published.step = self.step
        self._waiting.setdefault(self.client_id, deque()).append(published)

    def take_through(self, client_id: str, step: int) -> list[Published]:
        """Remove and return what waits for the client's steps up to `step`, first ones first."""
        waiting = self._waiting.get(client_id)
        taken = []
        while waiting and waiting[0].step <= step:
            taken.append(waiting.popleft())
        return taken

    def take_from(self, client_id: str, step: int) -> list[Published]:
        """Remove and return what waits for the client's steps from `step` on, last ones first."""
        waiting = self._waiting.get(client_id)
        taken = []
        while waiting and waiting[-1].step >= step:
            taken.append(waiting.pop())
        return taken

    def forget_if_idle(self, client_id: str, num_unsealed: Mapping[int, int]) -> None:
        """Let the client's number go if nothing waits for it, no block either (by number)."""
        if self._waiting.get(client_id) or self._numbers.get(client_id) in num_unsealed:
            return
        self._waiting.pop(client_id, None)
        number = self._numbers.pop(client_id, None)
        if number is not None:
            self._free_numbers.append(number)

    def clear(self) -> None:
        """Let nothing wait."""
        self._waiting.clear()
        for client_id in list(self._numbers):
            self.forget_if_idle(client_id, {})

    def waiting(self) -> dict[int, list[Published]]:
        """Return what waits, by the client's number. For audits."""
        return {self._numbers[c]: list(waiting) for c, waiting in self._waiting.items() if waiting}

    def of_open_step(self) -> list[Published]:
        """Return what waits for the open step."""
        waiting = self._waiting.get(self.client_id, ())
        return [each for each in waiting if each.step == self.step]
