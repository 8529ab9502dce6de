"""Chat: users ask, read the answer, and ask again, after a few system prompts.

Some first questions have a long text attached. Most turns hit all of the conversation, if it is
still cached when the user has thought; half of the conversations have only one turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvcache.simulate.generators.draws import Length, Popularity, draw_count, draw_pause_s
from kvcache.simulate.generators.sessions import OUTPUT_TOKENS_PER_S
from kvcache.simulate.passages import Passage, ScriptedRequest
from kvcache.simulate.tokens import answer_seed, token_seed


@dataclass(frozen=True)
class ChatShape:
    """Lengths in tokens, pauses in seconds."""

    pause_s: float = 1.2
    num_system_prompts: int = 8
    system_prompt: Length = Length(1_200, 0.7, 200, 6_000)
    mean_turns: float = 3.5
    most_turns: int = 40
    question: Length = Length(110, 1.2, 8, 8_000)
    attachment_share: float = 0.25
    attachment: Length = Length(7_000, 0.9, 1_000, 60_000)
    answer: Length = Length(260, 0.8, 10, 2_000)
    thinking_s: float = 45.0


class Chat:
    """Conversations of `shape`, drawn by `seed`. See `SessionKind`.

    `name` distinguishes conversations from those of another mix of traffic.
    """

    def __init__(self, seed: int, shape: ChatShape | None = None, name: str = "chat") -> None:
        self.name = name
        self.seed = seed
        self.shape = shape = ChatShape() if shape is None else shape
        self._prompts = [
            Passage(
                token_seed("system prompt", name, seed, i),
                shape.system_prompt.draw(Random(token_seed("system length", name, seed, i))),
            )
            for i in range(shape.num_system_prompts)
        ]
        self._popularity = Popularity(shape.num_system_prompts, 1.0)

    @property
    def pause_s(self) -> float:
        """Mean time between two new conversations."""
        return self.shape.pause_s

    def session(self, index: int, start_s: float, rng: Random) -> list[ScriptedRequest]:
        """Return the turns of one conversation."""
        shape = self.shape
        said = [self._prompts[self._popularity.draw(rng)]]
        if rng.random() < shape.attachment_share:
            seed = token_seed("attachment", self.name, self.seed, index)
            said.append(Passage(seed, shape.attachment.draw(rng)))
        turns: list[ScriptedRequest] = []
        now_s = start_s
        for i in range(draw_count(rng, shape.mean_turns, shape.most_turns)):
            question = token_seed("question", self.name, self.seed, index, i)
            said.append(Passage(question, shape.question.draw(rng)))
            request = ScriptedRequest(
                request_id=f"{self.name}-{index}-turn-{i + 1}",
                arrival_s=now_s,
                passages=tuple(said),
                num_output_tokens=shape.answer.draw(rng),
                after=turns[-1].request_id if turns else None,
            )
            turns.append(request)
            said.append(Passage(answer_seed(request.request_id), request.num_output_tokens))
            answering_s = request.num_output_tokens / OUTPUT_TOKENS_PER_S
            now_s += answering_s + draw_pause_s(rng, shape.thinking_s)
        return turns
