"""After any number of requests every block is free or cached, and no request is known."""

from __future__ import annotations

import random

import pytest

from examples.engine import Engine, EngineConfig, SamplingParams
from tests.engine.support import ADAPTERS, expected, model, require_nothing_is_held, settle, tokens

SYSTEM = tokens(0, 20)


def play(num_requests: int, seed: int) -> None:
    """Serve requests of all kinds; some are aborted, some compared."""
    random_ = random.Random(seed)
    config = EngineConfig(
        model=model("llama"),
        block_size=8,
        num_blocks=64,
        max_num_seqs=24,
        max_chunk_tokens=16,
        adapters=ADAPTERS,
    )
    with Engine.launch(config) as engine:
        wanted: dict[tuple[str, int], list[int]] = {}
        said: dict[tuple[str, int], list[int]] = {}
        num_added = num_aborted = 0
        for _ in range(50 * num_requests):
            while num_added < num_requests and len(engine._table.requests) < 40:
                num_added += 1
                prompt = [*SYSTEM[: random_.choice((0, 9, 20))], *tokens(random_.randrange(9), 5)]
                params = SamplingParams(
                    max_tokens=random_.choice((1, 2, 4)),
                    temperature=random_.choice((0.0, 1.0)),
                    seed=random_.randrange(2),
                    n=random_.choice((1, 1, 1, 3)),
                    num_draft_tokens=random_.choice((0, 0, 2)),
                )
                adapter = random_.choice((None, None, "french"))
                salt = random_.choice((None, None, "salt"))
                request_id = engine.add_request(prompt, params, lora_name=adapter, cache_salt=salt)
                for index in range(params.n):
                    wanted[request_id, index] = expected("llama", prompt, params, index, adapter)
            if random_.random() < 0.05 and engine.has_unfinished:
                engine.abort(random_.choice(list(engine._table.requests)))
                num_aborted += 1
            for output in engine.step():
                key = output.request_id, output.index
                said.setdefault(key, []).extend(output.token_ids)
                if output.finish_reason == "abort":
                    assert wanted[key][: len(said[key])] == said[key]
                elif output.finish_reason is not None:
                    assert said[key] == wanted[key], key
            if num_added == num_requests and not engine.has_unfinished:
                break
        assert engine.statistics().num_finished == num_requests
        assert num_aborted > num_requests // 200
        settle(engine)
        require_nothing_is_held(engine)
        assert not engine._table._samples
        assert engine._scheduler.is_idle


def test_hundreds_of_requests_leave_nothing_behind() -> None:
    play(300, seed=1)


@pytest.mark.long
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    play(10_000, seed=2)
