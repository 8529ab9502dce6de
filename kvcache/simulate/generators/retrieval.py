"""Retrieval: short questions after documents that a search put in front of them.

Questions are about topics, some of them much more popular than others, and popularity drifts. A
topic's documents come in the order of its ranking, but searches differ a little: a question hits
the first documents of earlier ones, seldom all. Some users ask again.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvcache.simulate.generators.draws import Length, Popularity, draw_count, draw_pause_s
from kvcache.simulate.generators.sessions import OUTPUT_TOKENS_PER_S
from kvcache.simulate.passages import Passage, ScriptedRequest
from kvcache.simulate.tokens import answer_seed, token_seed


@dataclass(frozen=True)
class RetrievalShape:
    """Lengths in tokens, pauses and `drift_s` in seconds: how often a new topic becomes the
    first."""

    pause_s: float = 0.5
    instructions_tokens: int = 700
    num_topics: int = 1_500
    popularity: float = 0.9
    drift_s: float = 20.0
    num_ranked: int = 10
    num_documents: tuple[int, int] = (3, 8)
    swap_share: float = 0.15
    document: Length = Length(1_100, 0.8, 150, 8_000)
    question: Length = Length(40, 0.7, 6, 400)
    answer: Length = Length(220, 0.6, 10, 1_200)
    mean_questions: float = 1.3
    reading_s: float = 30.0


class Retrieval:
    """Questions of `shape`, drawn by `seed`. See `SessionKind`."""

    name = "retrieval"

    def __init__(self, seed: int, shape: RetrievalShape | None = None) -> None:
        self.seed = seed
        self.shape = shape = RetrievalShape() if shape is None else shape
        self._popularity = Popularity(shape.num_topics, shape.popularity)

    @property
    def pause_s(self) -> float:
        """Mean time between two new users."""
        return self.shape.pause_s

    def session(self, index: int, start_s: float, rng: Random) -> list[ScriptedRequest]:
        """Return one user's questions on a topic."""
        shape = self.shape
        place = self._popularity.draw(rng)
        topic = (place - int(start_s / shape.drift_s)) % shape.num_topics
        instructions = Passage(token_seed("instructions", self.seed), shape.instructions_tokens)
        said = [instructions, *self._found(topic, rng)]
        requests: list[ScriptedRequest] = []
        now_s = start_s
        for i in range(draw_count(rng, shape.mean_questions, 10)):
            question = token_seed("retrieval question", self.seed, index, i)
            said.append(Passage(question, shape.question.draw(rng)))
            request = ScriptedRequest(
                request_id=f"retrieval-{index}-question-{i + 1}",
                arrival_s=now_s,
                passages=tuple(said),
                num_output_tokens=shape.answer.draw(rng),
                after=requests[-1].request_id if requests else None,
            )
            requests.append(request)
            said.append(Passage(answer_seed(request.request_id), request.num_output_tokens))
            now_s += request.num_output_tokens / OUTPUT_TOKENS_PER_S
            now_s += draw_pause_s(rng, shape.reading_s)
        return requests

    def _found(self, topic: int, rng: Random) -> list[Passage]:
        """Return the documents of a search: the first ones of the ranking, a few of them
        swapped."""
        shape = self.shape
        ranking = list(range(shape.num_ranked))
        for i in range(shape.num_ranked - 1):
            if rng.random() < shape.swap_share:
                ranking[i], ranking[i + 1] = ranking[i + 1], ranking[i]
        return [self._document(topic, i) for i in ranking[: rng.randint(*shape.num_documents)]]

    def _document(self, topic: int, rank: int) -> Passage:
        seed = token_seed("retrieved", self.seed, topic, rank)
        return Passage(seed, self.shape.document.draw(Random(seed)))
