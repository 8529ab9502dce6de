"""Scans: batch jobs that read whole collections, while users chat.

A job asks one question about every document of a collection, then the next question: the same
documents in the same order, one after another. A collection larger than the cache evicts the
conversations, and least recently used is the worst order for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from kvcache.simulate.generators.chat import Chat, ChatShape
from kvcache.simulate.generators.draws import Length
from kvcache.simulate.passages import Passage, ScriptedRequest
from kvcache.simulate.tokens import token_seed


@dataclass(frozen=True)
class ScanShape:
    """Lengths in tokens, pauses in seconds. Sessions are jobs, or conversations between them."""

    pause_s: float = 2.0
    job_share: float = 0.006
    num_collections: int = 3
    num_documents: tuple[int, int] = (250, 700)
    document: Length = Length(2_600, 0.8, 300, 20_000)
    instructions: Length = Length(600, 0.5, 100, 2_000)
    question: Length = Length(90, 0.6, 10, 600)
    answer: Length = Length(40, 0.6, 4, 300)
    num_questions: tuple[int, int] = (1, 3)
    request_s: float = 0.4
    chat: ChatShape = field(default_factory=ChatShape)


class Scans:
    """Jobs and conversations of `shape`, drawn by `seed`. See `SessionKind`."""

    name = "scans"

    def __init__(self, seed: int, shape: ScanShape | None = None) -> None:
        self.seed = seed
        self.shape = shape = ScanShape() if shape is None else shape
        self._chat = Chat(seed, shape.chat, name="scans-chat")
        rng = Random(token_seed("collections", seed))
        self._collections = [self._collection(i, rng) for i in range(shape.num_collections)]

    @property
    def pause_s(self) -> float:
        """Mean time between two jobs or conversations."""
        return self.shape.pause_s

    def session(self, index: int, start_s: float, rng: Random) -> list[ScriptedRequest]:
        """Return a conversation, or all requests of a job."""
        if rng.random() >= self.shape.job_share:
            return self._chat.session(index, start_s, rng)
        return self._job(index, start_s, rng)

    def _collection(self, index: int, rng: Random) -> list[Passage]:
        seed, shape = self.seed, self.shape
        instructions = token_seed("scan instructions", seed, index)
        documents = [
            Passage(token_seed("scanned", seed, index, i), shape.document.draw(rng))
            for i in range(rng.randint(*shape.num_documents))
        ]
        return [Passage(instructions, shape.instructions.draw(rng)), *documents]

    def _job(self, index: int, start_s: float, rng: Random) -> list[ScriptedRequest]:
        shape = self.shape
        instructions, *documents = rng.choice(self._collections)
        requests: list[ScriptedRequest] = []
        now_s = start_s
        for i in range(rng.randint(*shape.num_questions)):
            seed = token_seed("scan question", self.seed, index, i)
            question = Passage(seed, shape.question.draw(rng))
            for k, document in enumerate(documents):
                requests.append(
                    ScriptedRequest(
                        request_id=f"scans-{index}-question-{i + 1}-document-{k + 1}",
                        arrival_s=now_s,
                        passages=(instructions, document, question),
                        num_output_tokens=shape.answer.draw(rng),
                    )
                )
                now_s += rng.expovariate(1 / shape.request_s)
        return requests
