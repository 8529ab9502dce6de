"""Several ranks generate the same as one, also after the loss of a coordinator."""

from __future__ import annotations

from collections import defaultdict

import pytest

from examples.engine import ByteTokenizer, DenseModel, Engine, EngineConfig, SamplingParams, llama
from examples.engine.executor import LocalExecutor
from examples.engine.weights import RandomWeights
from examples.engine.work import StepOutput
from kvcache.base.errors import DeadlineError
from tests.engine.support import (
    ALL_MODELS,
    GREEDY,
    SAMPLED,
    TIGHT,
    Told,
    collect,
    expected,
    launch,
    model,
    require_nothing_is_held,
    run,
    tokens,
)

PROMPTS = [[*tokens(0, 30), *tokens(seed, 4 * seed)] for seed in range(1, 5)]
LONG = SamplingParams(max_tokens=20, temperature=1.0, seed=4)


@pytest.mark.parametrize(
    ("tensor_size", "num_stages"), [(2, 1), (1, 2), (2, 2)], ids=["tp2", "pp2", "tp2-pp2"]
)
@pytest.mark.parametrize("name", ALL_MODELS)
def test_more_ranks_say_the_same(name: str, tensor_size: int, num_stages: int) -> None:
    with launch(
        name, tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages
    ) as engine:
        for params in (GREEDY, SAMPLED):
            ids = [engine.add_request(prompt, params, lora_name="french") for prompt in PROMPTS]
            ids += [engine.add_request(prompt, params) for prompt in PROMPTS]
            told = run(engine)
            for index, request_id in enumerate(ids):
                adapter = "french" if index < len(PROMPTS) else None
                want = expected(name, PROMPTS[index % len(PROMPTS)], params, adapter=adapter)
                assert told[request_id, 0].token_ids == want
        require_nothing_is_held(engine)


def test_ranks_may_outnumber_heads() -> None:
    narrow = llama(num_kv_heads=1, num_heads=4)
    dense = DenseModel(narrow, RandomWeights(0))
    with Engine.launch(EngineConfig(model=narrow, tensor_parallel_size=2)) as engine:
        said = engine.generate(PROMPTS, GREEDY)
    assert said == [dense.generate(prompt, GREEDY) for prompt in PROMPTS]


@pytest.mark.parametrize("is_pipelined", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_a_lost_coordinator_is_not_noticed_by_a_reader(name: str, is_pipelined: bool) -> None:
    soon = {"deadlines": {"reattach_s": 0.1}}  # the new coordinator waits for clients that are gone
    with launch(name, is_pipelined=is_pipelined, sections=soon) as engine:
        executor = engine.executor
        assert isinstance(executor, LocalExecutor)
        ids = [engine.add_request(prompt, LONG) for prompt in PROMPTS]
        several = engine.add_request(
            PROMPTS[0], SamplingParams(max_tokens=9, n=2, seed=9, temperature=1.0)
        )
        told: dict[tuple[str, int], Told] = defaultdict(lambda: Told([]))
        for _ in range(5):
            for _ in range(4):
                collect(engine.step(), told)
            executor.cluster.restart_coordinator()
        rest = run(engine)
        for key, more in rest.items():
            told[key].token_ids += more.token_ids
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert told[request_id, 0].token_ids == expected(name, prompt, LONG)
        params = SamplingParams(max_tokens=9, n=2, seed=9, temperature=1.0)
        for index in range(2):
            assert told[several, index].token_ids == expected(name, PROMPTS[0], params, index)
        assert engine.statistics().num_restarts >= 5
        require_nothing_is_held(engine)


class Failing(LocalExecutor):
    """Fails chosen forwards, after they have written everything."""

    fails: frozenset[int] = frozenset()
    num_collected = 0

    def collect(self) -> StepOutput:
        output = super().collect()
        self.num_collected += 1
        if self.num_collected in self.fails:
            raise DeadlineError(f"forward {self.num_collected} is said to have failed")
        return output


@pytest.mark.parametrize("is_pipelined", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_a_failed_forward_is_undone_and_done_again(name: str, is_pipelined: bool) -> None:
    config = EngineConfig(
        model=model(name),
        block_size=8,
        max_chunk_tokens=16,
        is_pipelined=is_pipelined,
        **TIGHT[name],
    )
    executor = Failing(config)
    executor.fails = frozenset((1, 5, 6, 9, 14, 22))
    with Engine(config, executor, ByteTokenizer()) as engine:
        ids = [engine.add_request(prompt, LONG) for prompt in PROMPTS]
        told = run(engine)
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert told[request_id, 0].token_ids == expected(name, prompt, LONG)
        assert engine.statistics().num_restarts == 6
        require_nothing_is_held(engine)


def test_a_forward_that_always_fails_is_raised_and_requests_can_be_aborted() -> None:
    config = EngineConfig(model=model("llama"))
    executor = Failing(config)
    executor.fails = frozenset(range(1, 4))
    with Engine(config, executor, ByteTokenizer()) as engine:
        request_id = engine.add_request(PROMPTS[0], GREEDY)
        with pytest.raises(DeadlineError, match=r"^forward 3 is said to have failed$"):
            run(engine)
        engine.abort(request_id)
        again = engine.add_request(PROMPTS[0], GREEDY)
        assert run(engine)[again, 0].token_ids == expected("llama", PROMPTS[0], GREEDY)
        require_nothing_is_held(engine)
