"""A whole cluster in one thread: the client's interface without Ray."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors import LocalCluster, calls
from actors.transport import Endpoint
from kvcache.base.errors import (
    BacklogFullError,
    ClusterError,
    ConfigurationError,
    DeadlineError,
    MalformedMessageError,
    NotRunningError,
    RequestError,
    StaleEpochError,
)
from kvcache.config import ClusterConfig
from kvcache.coordinator.remote_calls import RemoteCalls, pack_values
from kvcache.protocol.messages import Call, Message
from kvcache.protocol.step import (
    EMPTY_RUNNING,
    Fork,
    NewRequest,
    RequestHints,
    RunningRequests,
    StepRequest,
    StepResult,
)
from kvcache.protocol.wire import encode
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import Request
from tests.protocol.loose_sender import unchecked

MakeConfig = Callable[..., ClusterConfig]

EMPTY = StepRequest("", 0, 0)


def prompt(request_id: str, num_tokens: int, first: int = 0) -> NewRequest:
    tokens = np.arange(first, first + num_tokens, dtype=np.int32)
    return NewRequest(request_id, tokens, max_new_tokens=num_tokens)


def decode(slot: int, token: int) -> RunningRequests:
    one = np.ones(1, dtype=np.int32)
    none = np.zeros(1, dtype=np.int32)
    tokens = np.array([token], dtype=np.int32)
    return RunningRequests(
        np.array([slot], dtype=np.int32), one, none, none, np.array([0, 1], dtype=np.int32), tokens
    )


def test_a_request_is_computed_decoded_finished_and_hit_again(make_config: MakeConfig) -> None:
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        first = client.step(StepRequest("", 0, 0, new=(prompt("a", 40),)))
        client.wait_finished(first.step)
        second = client.step(StepRequest("", 0, 0, completed_step=first.step, running=decode(0, 7)))
        client.wait_finished(second.step)
        done = StepRequest("", 0, 0, completed_step=second.step, finished=("a",))
        client.wait_finished(client.step(done).step)
        again = client.step(StepRequest("", 0, 0, new=(prompt("b", 40),)))
        client.wait_finished(again.step)
        assert again.num_hit_tokens.tolist() == [32]
        assert client.failures == ()
        assert client.bytes_checked > 0


def image(**changes: Any) -> tuple[NewRequest, ...]:
    return (replace(prompt("r", 40), **changes),)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"finished": (3,)}, r"finished\[0\] is 3: pass a non-empty str"),
        ({"finished": None}, r"finished is None: pass a list or tuple"),
        ({"finished": ("r",) * 65_537}, r"finished has 65537 items, at most 65536 travel"),
        ({"completed_step": 2**63}, r"completed_step is 9223372036854775808: pass"),
        ({"completed_step": True}, r"completed_step is True: pass an integer"),
        ({"num_lookahead_tokens": 2**64}, r"num_lookahead_tokens is"),
        ({"new": image(max_new_tokens=2**63)}, r"max_new_tokens is"),
        ({"new": image(mm_hashes=("h",) * 65_537)}, r"NewRequest\.mm_hashes has 65537 items"),
        # The following texts fit into the message, but not into commands that repeat them per
        # block.
        ({"new": image(mm_hashes=("h" * 2**22,))}, r"mm_hashes holds .* has 4194304 characters"),
        ({"new": image(lora_name="l" * 2**22)}, r"NewRequest\.lora_name has 4194304 characters"),
        ({"new": image(token_ids=np.zeros(2**25, np.int32))}, r"StepRequest of 134\d{6} bytes"),
    ],
)
def test_a_step_that_cannot_travel_is_refused_and_the_client_goes_on(
    make_config: MakeConfig, step: dict[str, Any], said: str
) -> None:
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        before = client.step(EMPTY).step
        with pytest.raises((RequestError, MalformedMessageError), match=said):
            client.step(StepRequest(**step))
        after = client.step(StepRequest("", 0, 0, new=(prompt("a", 40),)))
        client.wait_finished(after.step)
        assert (after.step, client.num_resent) == (before + 1, 0)


def spoiled(message: Message, max_bytes: int) -> bytes:
    """Messages of a client with other rules than ours."""
    if isinstance(message, StepRequest):
        message = replace(message, completed_step=2**63)
    return unchecked(message)


def test_what_a_client_with_other_rules_sends_is_refused_at_the_call_that_sent_it(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = r"^StepRequest\.completed_step is 9223372036854775808: pass an integer of 64 bits$"
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr("actors.connection.encode", spoiled)
            with pytest.raises(MalformedMessageError, match=said):
                client.step(EMPTY)
            patch.setattr("actors.calls.pack_values", lambda values: "no bytes")
            with pytest.raises(MalformedMessageError, match=r"Call\.arguments is 'no bytes'"):
                client.usage()
        assert client.usage() == 0.0
        after = client.step(StepRequest(new=(prompt("a", 40),)))
        client.wait_finished(after.step)
        assert (after.step, client.num_resent) == (4, 0)
        assert cluster._service.statistics().malformed == 2


def test_an_answer_that_does_not_travel_is_an_error_of_the_call(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_short_ones(message: Message, max_bytes: int) -> bytes:
        if isinstance(message, StepResult) and len(message.admitted_slots):
            return encode(message, 60)
        return encode(message, max_bytes)

    def encode_wrong_ones(message: Message, max_bytes: int) -> bytes:
        if isinstance(message, StepResult) and len(message.forked_slots):
            return unchecked(replace(message, seq=message.seq, no_room=[1]))  # type: ignore[arg-type]  # wrong on purpose
        return encode(message, max_bytes)

    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        monkeypatch.setattr("actors.service.encode", encode_short_ones)
        with pytest.raises(
            MalformedMessageError,
            match=r"^step 1 was executed, but its answer cannot be sent: StepResult of \d+ bytes",
        ):
            client.step(StepRequest(new=(prompt("a", 40),)))
        client.wait_finished(1)
        monkeypatch.setattr("actors.service.encode", encode_wrong_ones)
        with pytest.raises(
            MalformedMessageError,
            match=r"^the answer to step 2 cannot be read, .* StepResult\.no_room holds something",
        ):
            client.step(StepRequest(completed_step=1, forks=(Fork("a", "b"),)))
        client.wait_finished(2)
        done = client.step(StepRequest(completed_step=2, finished=("a", "b")))
        client.wait_finished(done.step)
        assert client.failures == ()
        assert cluster._service.statistics().unsendable == 1


def test_commands_that_are_too_long_end_the_epoch_with_the_reason_and_nothing_hangs(
    make_config: MakeConfig,
) -> None:
    """Every label repeats the name of its LoRA adapter."""
    config = make_config(
        transport={"max_message_bytes": "1MiB"},
        model={"max_model_len": 8192},
        cache={"memory_per_rank": "4MiB"},
        content_check={"enabled": False},
    )
    with LocalCluster(config) as cluster, cluster.client() as client:
        epoch = cluster.coordinator.epoch
        long = replace(prompt("a", 8000), lora_name="l" * 4096)
        client.wait_finished(client.step(StepRequest(new=(long,))).step)
        with pytest.raises(
            StaleEpochError,
            match=r"the commands of step 2 of client '.*', message 1:\d+, cannot be sent: "
            r"StepCommands of \d+ bytes, the limit is 1048576: send less at once, or raise "
            r"transport\.max_message_bytes",
        ):
            client.wait_applied(client.submit(StepRequest(completed_step=1)))
        client.attach()
        assert cluster.coordinator.epoch == epoch + 1
        after = client.step(StepRequest(new=(prompt("b", 40),)))
        client.wait_finished(after.step)
        cluster.coordinator.check()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mm_hashes": ["h" * 5000]}, "mm_hashes has 5000 characters, at most 4096 travel"),
        ({"mm_hashes": ["h"] * 70_000}, "70000 exceeds max_array_len"),
        ({"mm_hashes": [7]}, "mm_hashes holds 7: pass texts"),
        ({"lora_name": "l" * 5000}, "lora_name has 5000 characters, at most 4096 travel"),
        ({"num_computed_tokens": 2**64}, "cannot be encoded"),
        ({"cache_salt": "\ud800"}, "cannot be encoded"),
        ({"cache_salt": object()}, "cannot be encoded"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused_and_the_client_goes_on(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    describe = calls.SentTokens.describe
    request = Request("r", list(range(40)))
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(calls.SentTokens, "describe", lambda *args: describe(*args) | changes)
            with pytest.raises(RequestError, match=said):
                client.allocate_slots(request, 40)
        assert client.allocate_slots(request, 40) is not None
        client.free(request)
        assert client.usage() == 0.0


def test_one_client_too_many_is_told_once_which_key_to_raise(make_config: MakeConfig) -> None:
    soon = {"worker_silence_s": 0.1, "worker_kill_s": 0.0, "reattach_s": 0.1, "step_s": 0.2}
    often = {"heartbeat_s": 0.05, "resend_s": 0.05}
    config = make_config(transport={"max_clients": 2, **often}, deadlines=soon)
    with (
        LocalCluster(config) as cluster,
        cluster.client(),
        cluster.client(),
        pytest.raises(DeadlineError) as caught,
    ):
        cluster.client("third")
    said = re.sub(r"third-[0-9a-f]{16}", "third", str(caught.value))
    assert said == (
        "client third is not attached after 0.2 s: 2 clients are attached, no more can attach: "
        "detach one or raise transport.max_clients"
    )


def test_a_key_of_the_configuration_says_how_many_clients_may_attach(
    make_config: MakeConfig,
) -> None:
    with LocalCluster(make_config(transport={"max_clients": 65})) as cluster:
        for _ in range(65):
            assert cluster.client().is_attached
    with pytest.raises(ConfigurationError, match="max_clients"):
        make_config(transport={"max_clients": 0})


def test_a_client_that_found_no_place_attaches_once_there_is_one(make_config: MakeConfig) -> None:
    with LocalCluster(make_config(transport={"max_clients": 1})) as cluster:
        first = cluster.client()
        cluster.restart_coordinator()
        with pytest.raises(StaleEpochError):
            first.wait_finished(first.submit(EMPTY))
        with cluster.client("second"):
            for _ in range(2):
                with pytest.raises(DeadlineError, match=r"raise transport\.max_clients"):
                    first.attach(timeout_s=0.1)
        first.attach()
        first.wait_finished(first.step(EMPTY).step)


def test_a_draft_head_gets_the_last_block_of_a_hit_computed_again(make_config: MakeConfig) -> None:
    config = make_config(cache={"use_eagle": True})
    with LocalCluster(config) as cluster, cluster.client() as client:
        client.wait_finished(client.step(StepRequest(new=(prompt("a", 40),))).step)
        again = client.step(StepRequest(new=(prompt("b", 40),)))
        client.wait_finished(again.step)
        assert again.num_hit_tokens.tolist() == [16]
        assert client.failures == ()


def test_a_kind_that_a_draft_head_cannot_use_is_refused(make_config: MakeConfig) -> None:
    layer = {"kind": "chunked_local", "num_kv_heads": 2, "head_size": 8, "chunk_tokens": 64}
    config = make_config(
        model={"name": "small", "max_model_len": 512, "layers": [layer]}, cache={"use_eagle": True}
    )
    message = "EAGLE cannot be used with KV cache groups of kind 'chunked_local'"
    with pytest.raises(ConfigurationError, match=message):
        LocalCluster(config)


def test_an_engine_runs_its_own_forwards_between_begin_and_end(make_config: MakeConfig) -> None:
    config = make_config(content_check={"enabled": False})
    with LocalCluster(config) as cluster, cluster.client() as client:
        result = client.step(StepRequest("", 0, 0, new=(prompt("a", 40),)))
        for host in cluster.workers:
            worker = host.worker
            worker.begin_forward(result.epoch, result.seq, timeout_s=1.0)
            blocks = worker.block_tables[0][0][:3].tolist()
            worker.kv_caches["layers.0"][blocks[0]].fill_(1.0)
            worker.end_forward(result.epoch, result.seq)
        assert blocks == result.patches.block_ids.tolist()


def test_steps_are_pipelined_up_to_the_window(make_config: MakeConfig) -> None:
    config = make_config(transport={"window": 4})
    with LocalCluster(config) as cluster, cluster.client() as client:
        numbers = [client.submit(EMPTY) for _ in range(20)]
        client.wait_finished(numbers[-1])
        assert numbers == list(range(1, 21))
        assert client.finished_step == 20


def test_a_refused_step_raises_what_the_manager_raised(make_config: MakeConfig) -> None:
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        with pytest.raises(RequestError, match="nobody"):
            client.step(StepRequest("", 0, 0, finished=("nobody",)))
        client.wait_finished(client.step(EMPTY).step)


def test_requests_can_be_served_call_by_call(make_config: MakeConfig) -> None:
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        request = Request("r", list(range(40)))
        hit, num_tokens = client.get_computed_blocks(request)
        assert (num_tokens, bool(hit)) == (0, False)
        new = client.allocate_slots(request, 40)
        assert new is not None
        assert [len(ids) for ids in new.get_block_ids()] == [3]
        assert client.get_block_ids("r") == new.get_block_ids()
        request.num_computed_tokens = 40
        request.append_output_token_ids([1])
        assert client.allocate_slots(request, 1) is not None
        client.free(request)
        again = Request("s", list(range(40)))
        hit, num_tokens = client.get_computed_blocks(again)
        assert num_tokens == 32
        assert client.allocate_slots(again, 8, num_tokens, hit) is not None
        pin = client.pin_prefix(list(range(16)), ttl_s=60.0)
        assert pin.num_tokens == 16
        client.unpin_prefix(pin)
        assert client.prefetch_prefix(list(range(16))) == 0  # there are no tiers
        client.free(again)
        client.evict_blocks(new.get_block_ids()[0][:1])
        assert client.get_computed_blocks(Request("t", list(range(40))))[1] == 0
        assert client.reset_prefix_cache()
        assert client.begin_model_epoch() == 1
        assert client.usage() == 0.0
        stats = client.make_prefix_cache_stats()
        assert stats.queries > 0


def test_calls_and_steps_of_a_client_bring_hints(make_config: MakeConfig) -> None:
    first, last = CacheHint(priority=0), CacheHint(0, 32, priority=100, duration_s=1e6)
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        manager = cluster.coordinator.manager
        assert manager is not None

        def known(request_id: str) -> tuple[CacheHint, ...]:
            request = manager.get_request(request_id)
            return request.hints

        request = Request("call", list(range(40)))
        request.hints = [first]
        assert client.allocate_slots(request, 40) is not None
        assert known("call") == (first,)
        request.hints = [last]
        request.num_computed_tokens = 40
        client.cache_blocks(request, 40)
        assert known("call") == (last,)
        seen = manager.get_request("call")
        request.hints = ()
        client.free(request)
        assert seen is not None and seen.hints == ()
        new = replace(prompt("step", 40, first=100), hints=(first,))
        result = client.step(StepRequest(new=(new,)))
        assert known("step") == (first,)
        client.wait_finished(result.step)
        client.step(StepRequest(hints=(RequestHints("step", (last,)),)))
        assert known("step") == (last,)
        client.step(StepRequest(finished=("step",)))


def test_hints_of_a_call_that_make_no_sense_are_refused(make_config: MakeConfig) -> None:
    with LocalCluster(make_config()) as cluster:
        manager = cluster.coordinator.manager
        assert manager is not None
        remote = RemoteCalls(manager)
        for hints, message in (
            ("soon", "request r: hints is 'soon': pass a list or tuple"),
            (["soon"], "hints[0] is 'soon': pass a map such as"),
            ([{"is_over": True}, {"is_over": True, "ttl": 3}], "hints[1] has 'ttl': it may have"),
            ([{"priority": 101}], "hints[0]: priority of a hint is 101"),
            ([{"is_over": True}] * 17, "has 17 hints, at most 16"),
        ):
            for arguments in (
                {"request_id": "r", "hints": hints},
                {"request": {"request_id": "r", "token_ids": b"", "hints": hints}},
            ):
                method = "free" if "request_id" in arguments else "free_block_hashes"
                call = Call("c", 1, 1, -1, method, pack_values(arguments))
                with pytest.raises(RequestError, match=re.escape(message)):
                    remote.call(call)


def test_refused_calls_raise_and_the_next_ones_work(make_config: MakeConfig) -> None:
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        request = Request("r", list(range(8)))
        with pytest.raises(RequestError, match="num_new_tokens"):
            client.allocate_slots(request, 0)
        assert client.allocate_slots(request, 8) is not None


def test_a_closed_client_says_so(make_config: MakeConfig) -> None:
    with LocalCluster(make_config()) as cluster:
        client = cluster.client()
        client.close()
        client.close()
        with pytest.raises(NotRunningError, match="is closed: make a new one"):
            client.submit(EMPTY)


def test_what_a_closed_client_held_is_free_again(make_config: MakeConfig) -> None:
    with LocalCluster(make_config()) as cluster:
        with cluster.client() as client:
            client.wait_finished(client.step(StepRequest("", 0, 0, new=(prompt("a", 40),))).step)
        with cluster.client() as other:
            other.wait_finished(other.step(EMPTY).step)
            other.wait_finished(other.step(EMPTY).step)
            assert other.usage() == 0.0


def test_a_submit_that_finds_no_room_in_time_was_not_sent(make_config: MakeConfig) -> None:
    config = make_config(transport={"window": 2})
    with LocalCluster(config) as cluster, cluster.client() as client:
        cluster.coordinator.close()
        client.submit(EMPTY)
        client.submit(EMPTY)
        with pytest.raises(Exception, match="did not make room") as caught:
            client.submit(EMPTY, timeout_s=0.05)
        assert not isinstance(caught.value, BacklogFullError)
        assert client._connection.session.next_step == 3


def test_empty_running_rows_travel(make_config: MakeConfig) -> None:
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        result = client.step(StepRequest("", 0, 0, running=EMPTY_RUNNING))
        assert result.running_scheduled.tolist() == []


def test_an_error_of_a_client_costs_one_message_and_no_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        connection = client._connection
        take, num_left = connection.session.on_message, [1]

        def fail_once(message: Any) -> Any:
            if num_left and num_left.pop():
                raise KeyError("no such step")
            return take(message)

        monkeypatch.setattr(connection.session, "on_message", fail_once)
        client.wait_finished(client.step(EMPTY).step)
        assert (connection.faults.count, connection.malformed) == (1, 0)
        connection.take([b"\xc1", b"no message"])
        assert connection.malformed == 2


def test_a_client_that_cannot_connect_elsewhere_tries_again(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(*_: object) -> None:
        raise ClusterError("no descriptor is free")

    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        connection = client._connection
        with monkeypatch.context() as patch:
            patch.setattr(cluster, "open", no_descriptor)
            with pytest.raises(ClusterError):
                connection.redial(Endpoint("elsewhere"))
        before = connection.transport
        connection.redial(Endpoint("elsewhere"))
        assert connection.transport is not before
        client.wait_finished(client.step(EMPTY).step)
