"""Agents: long shared contexts, worked on step by step, and bursts of helpers.

    burst    several tasks on one project begin within seconds; all read the same context
    task     [agent's tools][project's context][task] + step + step + step ...    a step every few s
    helpers  now and then a task forks: helpers go on from all it knows, side by side, and end;
             the task goes on with what they found

Prefixes are read often and in quick succession, then never again, but the tools and active projects
come back. A policy that never forgets uses keeps finished tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvcache.simulate.generators.draws import Length, Popularity, draw_count, draw_pause_s
from kvcache.simulate.generators.sessions import OUTPUT_TOKENS_PER_S
from kvcache.simulate.passages import Passage, ScriptedRequest
from kvcache.simulate.tokens import answer_seed, token_seed


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
    """Bursts of tasks of `shape`, drawn by `seed`. See `SessionKind`."""

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
                request_id, self._now_s, tuple(self._known), num_output_tokens, self._after
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
