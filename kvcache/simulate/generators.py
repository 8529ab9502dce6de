"""Synthetic traffic by name: chat, agents, retrieval, scans. Everything follows from a seed.

A session is one conversation, burst or job. Sessions are merged into one stream of requests in
order of arrival:

    sessions   ──┬────────┬──────────┬───▶  begin at random, at a rate
                 │ a a  a │   a      │
                 └▶ b  b b b         │
    requests   ──a─b─a─b─b─a─b────a──…───▶  a heap holds requests that are not due yet

Each session is drawn from a source of its own, so a longer trace begins with the same requests.

Requests carry hints of what an engine knows when they end: whether their session goes on, and when,
to a factor of two.

The shapes are invented: they show how policies and sizes treat kinds of traffic, and do not claim
to be like any real one. Users can record their own load.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import exp, inf, isfinite, log
from random import Random
from types import MappingProxyType
from typing import Protocol

from kvcache.base.errors import TraceError
from kvcache.requests.hints import CacheHint
from kvcache.simulate.mooncake import MOONCAKE_BLOCK_SIZE
from kvcache.simulate.passages import Passage, ScriptedRequest
from kvcache.simulate.tokens import answer_seed, token_seed
from kvcache.simulate.workload import WorkloadRequest

DEFAULT_NUM_REQUESTS = 5_000
"""Default number of requests."""

OUTPUT_TOKENS_PER_S = 40.0
"""The speed of answers, from which the arrival of a session's next request follows."""

LARGEST_ERROR = 2.0
"""The factor by which a hint may be off."""

_SHORTEST_S = 0.001

# --- draws: every function takes its random source


@dataclass(frozen=True)
class Length:
    """Tokens, log-normal around a median: half are shorter; with `spread` 1, two thirds are between
    median / e and median * e. Never outside `[least, most]`.

    Raises TraceError for an invalid length.
    """

    median: int
    spread: float
    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.median <= self.most or self.spread < 0:
            raise TraceError(
                f"a length of {self.least} to {self.most} tokens around {self.median}, spread "
                f"{self.spread}: give 1 <= least <= median <= most and a spread of at least 0"
            )

    def draw(self, rng: Random) -> int:
        drawn = rng.lognormvariate(log(self.median), self.spread)
        return min(self.most, max(self.least, round(drawn)))


class Popularity:
    """A choice among `num_items`; item `i` has weight `1 / (i + 1) ** exponent` (Zipf)."""

    def __init__(self, num_items: int, exponent: float) -> None:
        self._sums = list(accumulate((i + 1) ** -exponent for i in range(num_items)))

    def draw(self, rng: Random) -> int:
        """Return the index of an item."""
        sums = self._sums
        return min(bisect_left(sums, rng.random() * sums[-1]), len(sums) - 1)


def draw_count(rng: Random, mean: float, most: int) -> int:
    """Return 1 or more, geometric with this mean, at most `most`."""
    count = 1
    while count < most and rng.random() > 1 / mean:
        count += 1
    return count


def draw_pause_s(rng: Random, median_s: float, spread: float = 1.0) -> float:
    """Return a pause, log-normal around its median."""
    return median_s * exp(spread * rng.gauss(0.0, 1.0))


def session_hint(wait_s: float, own_start: int = 0) -> CacheHint:
    """Return the hint that a session goes on in `wait_s`, inf: never. What it shares with others,
    up to token `own_start`, is then as before."""
    if not isfinite(wait_s):
        return CacheHint(own_start, is_over=True)
    return CacheHint(returns_in_s=max(_SHORTEST_S, round(wait_s, 3)))


# --- sessions become requests


class SessionKind(Protocol):
    """Draws sessions of one kind of traffic."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def seed(self) -> int:
        """The seed of all draws."""

    @property
    def pause_s(self) -> float:
        """Mean time between the beginnings of two sessions."""

    def session(self, index: int, start_s: float, rng: Random) -> list[ScriptedRequest]:
        """Return at least one request, in order of arrival, the first at `start_s`.

        The same arguments, and the same state of `rng`, give the same requests. Ids of requests
        are unique over all sessions.
        """


class SyntheticWorkload:
    """The first `num_requests` requests of one kind of traffic.

    Raises TraceError when `num_requests` is below 1.
    """

    def __init__(self, kind: SessionKind, num_requests: int) -> None:
        if num_requests < 1:
            raise TraceError(
                f"{kind.name}: {num_requests} requests leave nothing to play: give at least 1"
            )
        self.kind = kind
        self._num_requests = num_requests

    @property
    def name(self) -> str:
        """Kind, size and seed."""
        return f"{self.kind.name}, {self._num_requests:,} requests (seed {self.kind.seed})"

    @property
    def num_requests(self) -> int:
        return self._num_requests

    @cached_property
    def total_input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.num_prompt_tokens for request in self.script())

    @property
    def block_size(self) -> int:
        """Tokens per block by default: those of a trace."""
        return MOONCAKE_BLOCK_SIZE

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return (request.to_workload_request() for request in self.script())

    def script(self) -> Iterator[ScriptedRequest]:
        """Yield the requests, their prompts as passages, in order of arrival."""
        kind = self.kind
        starts = Random(token_seed("starts", kind.name, kind.seed))
        due: list[tuple[float, int, int, ScriptedRequest]] = []
        num_sessions = num_yielded = 0
        next_start_s = 0.0
        while num_yielded < self._num_requests:
            if not due or next_start_s <= due[0][0]:
                rng = Random(token_seed("session", kind.name, kind.seed, num_sessions))
                session = kind.session(num_sessions, next_start_s, rng)
                rng = Random(token_seed("hints", kind.name, kind.seed, num_sessions))
                for i, request in enumerate(_with_hints(session, rng)):
                    heapq.heappush(due, (request.arrival_s, num_sessions, i, request))
                num_sessions += 1
                next_start_s += starts.expovariate(1 / kind.pause_s)
            else:
                yield heapq.heappop(due)[3]
                num_yielded += 1


def _with_hints(session: Sequence[ScriptedRequest], rng: Random) -> list[ScriptedRequest]:
    """Return the requests of a session, each with the hint when the first arrives that continues
    it, half or twice the true time at most."""
    returns_s: dict[str, float] = {}
    for request in reversed(session):
        if request.after is not None:
            returns_s[request.after] = request.arrival_s
    hinted = []
    for request in session:
        wait_s = returns_s.get(request.request_id, inf) - request.arrival_s
        wait_s *= LARGEST_ERROR ** rng.uniform(-1.0, 1.0)
        hint = session_hint(wait_s, request.num_common_tokens)
        hinted.append(replace(request, hints=(hint,)))
    return hinted


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
    """Users ask, read the answer, and ask again, after a few system prompts.

    Some first questions have a long text attached. Most turns hit all of the conversation, if it is
    still cached when the user has thought; half of the conversations have only one turn.

    Conversations of `shape`, drawn by `seed`. See `SessionKind`.

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
                num_common=1,
            )
            turns.append(request)
            said.append(Passage(answer_seed(request.request_id), request.num_output_tokens))
            answering_s = request.num_output_tokens / OUTPUT_TOKENS_PER_S
            now_s += answering_s + draw_pause_s(rng, shape.thinking_s)
        return turns


@dataclass(frozen=True)
class AgentShape:
    """Lengths in tokens, pauses in seconds. A burst has 1 or more tasks, a task 1 or more steps."""

    pause_s: float = 25.0
    num_agents: int = 5
    tools: Length = Length(6_000, 0.5, 2_000, 16_000)
    num_projects: int = 60
    project: Length = Length(14_000, 0.7, 2_000, 60_000)
    mean_tasks: float = 3.0
    most_tasks: int = 12
    task: Length = Length(250, 0.8, 30, 3_000)
    mean_steps: float = 9.0
    most_steps: int = 50
    result: Length = Length(700, 1.1, 20, 12_000)
    answer: Length = Length(140, 0.7, 10, 1_500)
    step_s: float = 3.0
    helpers_share: float = 0.06
    most_helpers: int = 8
    mean_helper_steps: float = 3.0


class Agents:
    """Long shared contexts, worked on step by step, and bursts of helpers.

        burst    several tasks on one project begin within seconds; all read the same context
        task     [agent's tools][project's context][task] + step + step ...   a step every few s
        helpers  now and then a task forks: helpers go on from all it knows, side by side, and end;
                 the task goes on with what they found

    Prefixes are read often and in quick succession, then never again, but the tools and active
    projects come back. A policy that never forgets uses keeps finished tasks.

    Bursts of tasks of `shape`, drawn by `seed`. See `SessionKind`.
    """

    name = "agents"

    def __init__(self, seed: int, shape: AgentShape | None = None) -> None:
        self.seed = seed
        self.shape = shape = AgentShape() if shape is None else shape
        self._tools = self._passages("tools", shape.num_agents, shape.tools)
        self._projects = self._passages("project", shape.num_projects, shape.project)
        self._agent_popularity = Popularity(shape.num_agents, 0.8)
        self._project_popularity = Popularity(shape.num_projects, 0.9)

    @property
    def pause_s(self) -> float:
        """Mean time between two bursts."""
        return self.shape.pause_s

    def session(self, index: int, start_s: float, rng: Random) -> list[ScriptedRequest]:
        """Return all steps of a burst of tasks on one project."""
        shape = self.shape
        known = [
            self._tools[self._agent_popularity.draw(rng)],
            self._projects[self._project_popularity.draw(rng)],
        ]
        requests: list[ScriptedRequest] = []
        begins_s = start_s
        for i in range(draw_count(rng, shape.mean_tasks, shape.most_tasks)):
            name = f"agents-{index}-task-{i + 1}"
            task = Passage(token_seed("task", self.seed, name), shape.task.draw(rng))
            num_steps = draw_count(rng, shape.mean_steps, shape.most_steps)
            work = _Work(self, name, [*known, task], begins_s)
            work.do(num_steps, rng, may_fork=True)
            requests.extend(work.requests)
            begins_s += rng.uniform(0.2, 4.0)
        return sorted(requests, key=lambda request: request.arrival_s)

    def _passages(self, what: str, count: int, length: Length) -> list[Passage]:
        rng = Random(token_seed("agents", what, self.seed))
        return [
            Passage(token_seed("agents", what, self.seed, i), length.draw(rng))
            for i in range(count)
        ]


class _Work:
    """A task, or a helper's part of one, as it proceeds: its context, and its requests."""

    def __init__(
        self,
        agents: Agents,
        name: str,
        known: list[Passage],
        now_s: float,
        after: str | None = None,
    ) -> None:
        self._agents = agents
        self._name = name
        self._known = known
        self._num_common = len(known) - 1  # all but the task
        self._now_s = now_s
        self._after = after
        self.requests: list[ScriptedRequest] = []

    def do(self, num_steps: int, rng: Random, *, may_fork: bool) -> None:
        """Draw steps; `requests` includes those of helpers, if it may have them."""
        shape = self._agents.shape
        for i in range(num_steps):
            self._step(f"{self._name}-step-{i + 1}", rng)
            if may_fork and rng.random() < shape.helpers_share:
                self._have_helped(f"{self._name}-step-{i + 1}", rng)
            else:
                self._learn("result", i, shape.result.draw(rng))
            self._now_s += draw_pause_s(rng, shape.step_s, 0.8)

    def _step(self, request_id: str, rng: Random) -> None:
        num_output_tokens = self._agents.shape.answer.draw(rng)
        self.requests.append(
            ScriptedRequest(
                request_id,
                self._now_s,
                tuple(self._known),
                num_output_tokens,
                self._after,
                self._num_common,
            )
        )
        self._known.append(Passage(answer_seed(request_id), num_output_tokens))
        self._now_s += num_output_tokens / OUTPUT_TOKENS_PER_S
        self._after = request_id

    def _have_helped(self, name: str, rng: Random) -> None:
        """Start helpers from the present context; continue when the last one ends."""
        shape = self._agents.shape
        last_s = self._now_s
        for i in range(rng.randint(2, shape.most_helpers)):
            errand = Passage(token_seed("errand", self._agents.seed, name, i), shape.task.draw(rng))
            known = [*self._known, errand]
            helper = _Work(self._agents, f"{name}-helper-{i + 1}", known, self._now_s, self._after)
            helper.do(draw_count(rng, shape.mean_helper_steps, 12), rng, may_fork=False)
            self.requests.extend(helper.requests)
            last_s = max(last_s, helper._now_s)
        found = Passage(token_seed("found", self._agents.seed, name), shape.result.draw(rng))
        self._known.append(found)
        self._now_s = last_s

    def _learn(self, what: str, index: int, num_tokens: int) -> None:
        seed = token_seed(what, self._agents.seed, self._name, index)
        self._known.append(Passage(seed, num_tokens))


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
    """Short questions after documents that a search put in front of them.

    Questions are about topics, some of them much more popular than others, and popularity drifts. A
    topic's documents come in the order of its ranking, but searches differ a little: a question
    hits the first documents of earlier ones, seldom all. Some users ask again.

    Questions of `shape`, drawn by `seed`. See `SessionKind`.
    """

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
        num_common = len(said)
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
                num_common=num_common,
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
    """Batch jobs that read whole collections, while users chat.

    A job asks one question about every document of a collection, then the next question: the same
    documents in the same order, one after another. A collection larger than the cache evicts the
    conversations, and least recently used is the worst order for it.

    Jobs and conversations of `shape`, drawn by `seed`. See `SessionKind`.
    """

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
                        num_common=2,
                    )
                )
                now_s += rng.expovariate(1 / shape.request_s)
        return requests


GENERATORS: Mapping[str, Callable[[int], SessionKind]] = MappingProxyType(
    {"agents": Agents, "chat": Chat, "retrieval": Retrieval, "scans": Scans}
)
"""Kinds of traffic by name, each made from a seed."""


def generate(
    name: str, *, seed: int = 0, num_requests: int = DEFAULT_NUM_REQUESTS
) -> SyntheticWorkload:
    """Return the workload of the kind `name`. Raises TraceError for an unknown name."""
    if name not in GENERATORS:
        raise TraceError(f"no generator {name!r}: choose one of {', '.join(sorted(GENERATORS))}")
    return SyntheticWorkload(GENERATORS[name](seed), num_requests)
