"""What an engine's socket answers about the connector's tiers."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kvcache.base.errors import ClusterError, NotRunningError
from kvcache.integrations.vllm import control as control_module
from kvcache.integrations.vllm.control import EngineControl
from kvcache.integrations.vllm.engine_recording import EngineRecordings
from kvcache.integrations.vllm.request_counts import RequestCounts
from kvcache.integrations.vllm.step_messages import RankReports
from kvcache.metrics import Sample, engine_socket
from kvcache.metrics.declarations import HIT_TOKENS, QUERIED_TOKENS
from kvcache.metrics.engine_samples import EngineStatistics, engine_samples, exposition
from kvcache.metrics.engine_socket import EngineSocket, ask_engine, running_engines
from tests.integrations.test_vllm_block_store import Cluster, request_of, setting_of


class Asked:
    """A cluster of fake ranks and the socket of its engine."""

    def __init__(self, *, num_files: int = 0) -> None:
        self.name = f"test-{uuid.uuid4().hex[:8]}"
        self.cluster = Cluster(num_files=num_files)
        setting = setting_of(**self.cluster.options)
        options = setting.options.model_copy(update={"name": self.name})
        setting = replace(setting, options=options)
        self.recordings = EngineRecordings(setting, self.cluster.store.params)
        self.control = EngineControl(setting, "tiny", self.cluster.store, self.recordings)
        self.socket = EngineSocket(self.name, 0, self.control.answer)
        self.socket.start()

    def statistics(self) -> EngineStatistics:
        give_up_s = time.monotonic() + 10
        while True:
            try:
                return EngineStatistics.of_plain(ask_engine(self.name, 0, {"do": "status"}))
            except NotRunningError:
                assert time.monotonic() < give_up_s


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr(engine_socket, "_WAIT_S", 0.02)  # it ends as soon
    made = Asked(num_files=24)
    yield made
    made.socket.close()
    made.recordings.close()


def test_an_engine_says_what_it_has_loaded_from_where(asked: Asked) -> None:
    cluster = asked.cluster
    for content in "abcd":  # the first goes to files
        cluster.run(request_of(content, 13, content))
        cluster.settle()
    found = asked.statistics()
    assert (found.name, found.model, found.num_ranks) == (asked.name, "tiny", 2)
    assert found.requests.num_requests == 4
    assert found.requests.num_asked_tokens == 4 * 13
    assert found.requests.num_loaded_tokens == 0
    assert found.tiers is not None and found.tiers.host.num_ready == 8
    for content in "abcdabcd":
        cluster.run(request_of(f"again{content}", 13, content))
        cluster.settle()
    requests = asked.statistics().requests
    assert requests.num_loaded_tokens > requests.num_fetched_tokens > 0
    assert requests.num_loaded_tokens + requests.num_fetched_tokens <= 2 * 8 * 12
    assert requests.num_failed_loads == 0


def test_waits_and_failed_loads_are_counted() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 13))
    cluster.settle()
    cluster.ranks[1].wrong = {1}
    later = request_of("s", 13)
    assert cluster.begin(later) == 12
    cluster.obey(cluster.commands())
    cluster.time_s += 2.0
    assert cluster.store.counts.statistics(cluster.time_s).num_waiting == 1
    assert cluster.store.counts.statistics(cluster.time_s).load_wait_s == 2.0
    cluster.work()
    cluster.store.received(["s"])
    cluster.time_s += 5.0
    requests = cluster.store.counts.statistics(cluster.time_s)
    assert (requests.load_wait_s, requests.num_waiting) == (2.0, 0)
    assert (requests.num_failed_loads, requests.num_failed_tokens) == (1, 4)
    assert requests.num_loaded_tokens == 8


def test_the_time_that_a_request_waits_for_files_is_counted() -> None:
    cluster = Cluster(num_files=24)
    for content in "abcdef":
        cluster.run(request_of(content, 13, content))
        cluster.settle()
    waiting = next(r for r in map(again, "abcdef") if cluster.begin(r) is None)
    cluster.time_s += 3.0
    while cluster.begin(waiting) is None:
        cluster.step()
    assert cluster.store.counts.statistics(cluster.time_s).files_wait_s == 3.0


def again(content: str) -> Any:
    return request_of(f"{content} again", 13, content)


def test_a_clear_waits_for_the_scheduler(asked: Asked) -> None:
    asked.cluster.run(request_of("r", 13))
    asked.cluster.settle()
    asked.statistics()
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(ask_engine(asked.name, 0, {"do": "clear"}))
    )
    asking.start()
    while not answers:
        asked.control.step()
    asking.join()
    assert answers == [{"is_cleared": True, "num_forgotten_blocks": 3}]
    assert asked.cluster.begin(request_of("s", 13)) == 0


def test_the_next_engine_finds_what_is_stored_after_a_clear(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "CLEAR_S", 0.01)
    cluster = asked.cluster
    cluster.run(request_of("r", 13))
    cluster.settle()
    asked.control.answer({"do": "clear"})
    asked.control.step()
    assert cluster.run(request_of("s", 13)) == 0
    cluster.settle()
    cluster.restart()
    assert cluster.run(request_of("t", 13)) == 12


def test_an_idle_engine_is_cleared_before_its_next_request(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "CLEAR_S", 0.01)
    asked.cluster.run(request_of("r", 13))
    asked.cluster.settle()
    asked.statistics()
    answer = ask_engine(asked.name, 0, {"do": "clear"})
    assert answer == {"is_cleared": False, "num_forgotten_blocks": 3}
    asked.control.step()
    assert asked.cluster.begin(request_of("s", 13)) == 0


def test_metrics_are_those_of_a_cluster(asked: Asked) -> None:
    asked.cluster.run(request_of("r", 13))
    asked.cluster.settle()
    statistics = asked.statistics()
    text = ask_engine(asked.name, 0, {"do": "metrics"})["text"]
    assert f'kvcache_query_tokens_total{{cluster="{asked.name}"}} 13\n' in text
    assert f'kvcache_tier_blocks{{cluster="{asked.name}",tier="host",state="ready"}} 3\n' in text
    assert text.count("# TYPE") == len({s.metric.name for s in engine_samples(statistics)})
    assert exposition([]) == "\n"


def test_an_unknown_question_is_refused_and_the_next_one_answered(asked: Asked) -> None:
    asked.statistics()
    with pytest.raises(ClusterError, match="is no question: ask status, metrics, clear or record"):
        ask_engine(asked.name, 0, {"do": "fly"})
    assert asked.statistics().name == asked.name


def test_many_askers_at_once_and_long_questions_are_answered(asked: Asked) -> None:
    asked.statistics()
    question = {"do": "status", "path": "/" + "x" * 20_000}
    with ThreadPoolExecutor(40) as pool:
        answers = pool.map(lambda _: ask_engine(asked.name, 0, question, 30.0), range(120))
        assert {answer["name"] for answer in answers} == {asked.name}


def test_an_engine_that_is_not_there_is_refused_with_those_that_are(asked: Asked) -> None:
    asked.statistics()
    assert (asked.name, 0) in running_engines()
    with pytest.raises(NotRunningError, match=f"no engine 'other' runs .*{asked.name}"):
        ask_engine("other", 0, {"do": "status"})


def test_the_next_engine_of_a_name_answers_when_the_first_has_ended(asked: Asked) -> None:
    asked.statistics()
    second = EngineSocket(asked.name, 0, lambda question: {"second": True})
    second.start()
    time.sleep(0.1)
    assert asked.statistics().name == asked.name
    asked.socket.close()
    give_up_s = time.monotonic() + 10
    while True:
        try:
            assert ask_engine(asked.name, 0, {"do": "status"}) == {"second": True}
            break
        except NotRunningError:
            assert time.monotonic() < give_up_s
    second.close()


def test_a_load_that_is_given_up_counts_once_as_failed() -> None:
    cluster = Cluster()
    cluster.run(request_of("r", 13))
    cluster.settle()
    assert cluster.begin(request_of("s", 13)) == 12
    load = cluster.commands()
    cluster.obey(load)
    cluster.time_s += 2.0
    cluster.store.reported(RankReports(overdue_loads=(load.loads[0].job_id,)))
    cluster.store.received(["s"])
    cluster.time_s += 5.0
    cluster.work()
    requests = cluster.store.counts.statistics(cluster.time_s)
    assert (requests.num_failed_loads, requests.num_failed_tokens) == (1, 12)
    assert (requests.num_loaded_tokens, requests.load_wait_s) == (0, 2.0)


def test_hits_only_rise_although_a_fetch_ends_before_its_load() -> None:
    counts = RequestCounts()
    seen = []
    counts.begins(1, 250, 4000)
    counts.load_ends(1, 0)
    seen.append(hits_of(counts))
    counts.begins(2, 62, 992)
    counts.fetch_ends(2, 62)
    seen.append(hits_of(counts))
    counts.begins(3, 100, 1600)
    counts.load_ends(3, 25)
    seen.append(hits_of(counts))
    counts.begins(4, 10, 160)
    counts.import_ends(4, 5)
    counts.begins(5, 100, 1600)
    counts.load_ends(5, 0)
    seen.append(hits_of(counts))
    assert seen == [
        {"device": 0, "host": 4000, "disk": 0, "node": 0},
        {"device": 0, "host": 4000, "disk": 0, "node": 0},
        {"device": 0, "host": 4208, "disk": 992, "node": 0},
        {"device": 0, "host": 5728, "disk": 992, "node": 80},
    ]


def hits_of(counts: RequestCounts) -> dict[str, float]:
    requests = counts.statistics(0.0)
    statistics = EngineStatistics("chat", 0, "tiny", 1, 1, 16, 1.0, requests, None)
    samples = engine_samples(statistics)
    return {each.labels[1]: each.value for each in samples if each.metric is HIT_TOKENS}


@pytest.mark.parametrize(
    ("value", "text"),
    [(123_456_789, "123456789"), (4e12, "4000000000000"), (1234567.0625, "1234567.0625")],
)
def test_metrics_have_all_their_digits(value: float, text: str) -> None:
    assert f"}} {text}\n" in exposition([Sample(QUERIED_TOKENS, value, ("chat",))])


def test_statistics_that_fail_do_not_stop_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> dict[str, Any]:
        raise ClusterError("the publisher has no statistics")

    cluster = Cluster()
    setting = setting_of(**cluster.options)
    recordings = EngineRecordings(setting, cluster.store.params)
    control = EngineControl(setting, "tiny", cluster.store, recordings, fail)
    assert control.statistics_if_any() is None
    assert control.statistics_if_any() is None
    assert caplog.text.count("statistics failed; the engine goes on") == 1


def test_an_error_in_a_reset_ends_no_engine(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_module, "CLEAR_S", 0.2)

    def fail(**_: Any) -> None:
        raise RuntimeError("the tables are not as they should be")

    monkeypatch.setattr(asked.cluster.store, "reset", fail)
    answers: list[dict[str, Any]] = []
    operator = threading.Thread(
        target=lambda: answers.append(asked.control.answer({"do": "clear"}))
    )
    operator.start()
    while operator.is_alive():
        asked.control.step()
    assert [answer["is_cleared"] for answer in answers] == [False]
    assert "the tables are not as they should be" in caplog.text
