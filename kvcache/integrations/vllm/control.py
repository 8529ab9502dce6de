"""Answers about an engine's tiers, and the reset that an operator asks for.

Questions come in the thread of the engine's socket. What changes the tiers waits for the thread of
the scheduler. Never delays a step.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from kvcache.base.errors import ClusterError, InvalidInputError, shown
from kvcache.integrations.vllm.block_store import BlockStore
from kvcache.integrations.vllm.engine_recording import EngineRecordings
from kvcache.integrations.vllm.observer_errors import ObserverErrors
from kvcache.integrations.vllm.options import EngineSetting
from kvcache.metrics.engine_samples import EngineStatistics, engine_samples, exposition

CLEAR_S = 3.0
"""How long a reset waits for the engine's next step."""

_TRIES = 20


class EngineControl:
    """Speaks for one engine."""

    def __init__(
        self,
        setting: EngineSetting,
        model: str,
        store: BlockStore,
        recordings: EngineRecordings,
        more: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Answer about `store`, and pass questions about recordings on; `more` returns further
        fields of the statistics."""
        self._setting = setting
        self._model = model
        self._store = store
        self._recordings = recordings
        self._more = more
        self._started_s = time.monotonic()
        self._wanted: threading.Event | None = None
        self._num_forgotten = 0
        self._errors = ObserverErrors()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a question: `{"do": "status"}`, `metrics`, `clear` or `record`. In any thread.

        Raises InvalidInputError for another one.
        """
        verb = question.get("do")
        if verb == "status":
            return self.statistics().to_plain()
        if verb == "metrics":
            return {"text": exposition(engine_samples(self.statistics()))}
        if verb == "clear":
            return self._clear()
        if verb == "record":
            return self._recordings.follow(question)
        raise InvalidInputError(
            f"{shown(verb)} is no question: ask status, metrics, clear or record"
        )

    def step(self) -> None:
        """Do what was asked for. In the scheduler's thread, before anything is looked up.

        An error is logged, and the operator is told that nothing was forgotten.
        """
        wanted = self._wanted
        if wanted is None:
            return
        self._wanted = None
        try:
            self._num_forgotten = self._num_held()
            self._store.reset(keeps_weights=True)
            wanted.set()
        except Exception as error:
            self._errors.note("what an operator asked for", error)

    def statistics(self) -> EngineStatistics:
        """Return frozen statistics. In any thread.

        Raises ClusterError if the tables change faster than they are read.
        """
        setting, now_s = self._setting, time.monotonic()
        for _ in range(_TRIES):
            try:
                return EngineStatistics(
                    name=setting.options.name,
                    replica=setting.replica,
                    model=self._model,
                    process_id=os.getpid(),
                    num_ranks=setting.num_ranks,
                    block_tokens=setting.block_tokens,
                    uptime_s=now_s - self._started_s,
                    requests=self._store.counts.statistics(now_s),
                    tiers=self._store.statistics,
                    recording=self._recordings.statistics(),
                    **self._more(),
                )
            except RuntimeError:  # a table has grown while it was read
                continue
        raise ClusterError("the engine is too busy to be looked at: ask again")

    def statistics_if_any(self) -> EngineStatistics | None:
        """Return the same, None if that fails: the first error is logged."""
        try:
            return self.statistics()
        except Exception as error:
            self._errors.note("statistics", error)
            return None

    def _clear(self) -> dict[str, Any]:
        wanted = self._wanted
        if wanted is None:
            wanted = self._wanted = threading.Event()
        if wanted.wait(CLEAR_S):
            return {"is_cleared": True, "num_forgotten_blocks": self._num_forgotten}
        return {"is_cleared": False, "num_forgotten_blocks": self._num_held()}

    def _num_held(self) -> int:
        tiers = self._store.statistics
        return 0 if tiers is None else tiers.num_ready
