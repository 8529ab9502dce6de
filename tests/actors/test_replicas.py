"""Replicas of one configuration: separate names, ports and ranks, one launch and one end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors import KVCacheCluster
from actors.clusters.replicas import KVCacheReplicas, discovery_record, replica_configs
from kvcache import NewRequest, StepRequest
from kvcache.base.curve import CurveKeys, generate_curve_keys
from kvcache.base.errors import ConfigurationError, NotRunningError
from kvcache.config import ClusterConfig, load_config, parse_config
from kvcache.events.prefix_index import PrefixIndex
from kvcache.events.subscriber import KVEventSubscriber

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PATIENCE_S = 60.0


def config_of(size: int, **events: object) -> ClusterConfig:
    plain = load_config(CONFIGS / "cpu_tp2.yaml").model_dump()
    plain["name"] = "test-replicas"
    plain["parallel"] = {"tensor_parallel_size": 1, "data_parallel_size": size}
    plain["deadlines"] = {"startup_s": 240.0, "step_s": 60.0}
    return parse_config({**plain, "events": {"enabled": True, **events}}, "test")


def test_each_replica_has_a_name_a_rank_and_ports_of_its_own() -> None:
    first, second, third = replica_configs(config_of(3))
    assert [c.name for c in (first, second, third)] == [f"test-replicas-dp{i}" for i in range(3)]
    assert [c.events.data_parallel_rank for c in (first, second, third)] == [0, 1, 2]
    assert third.events.endpoint == "tcp://127.0.0.1:5559"
    assert third.events.replay_endpoint == "tcp://127.0.0.1:5659"
    assert len({c.events.topic for c in (first, second, third)}) == 1
    assert {c.parallel.data_parallel_size for c in (first, second, third)} == {1}


def test_ports_that_the_system_chooses_are_left_to_it() -> None:
    configs = replica_configs(config_of(2, endpoint="tcp://h:0", replay_endpoint="tcp://h:*"))
    assert {c.events.endpoint for c in configs} == {"tcp://h:0"}
    assert {c.events.replay_endpoint for c in configs} == {"tcp://h:*"}


def test_ports_that_meet_are_an_error() -> None:
    config = config_of(3, endpoint="tcp://127.0.0.1:5600", replay_endpoint="tcp://127.0.0.1:5602")
    with pytest.raises(ConfigurationError, match=r"meet at tcp://127\.0\.0\.1:5602"):
        replica_configs(config)


def test_a_port_beyond_the_last_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="65536"):
        replica_configs(config_of(2, endpoint="tcp://127.0.0.1:65535"))


def test_one_cluster_is_not_several() -> None:
    with pytest.raises(ConfigurationError, match=r"KVCacheReplicas\.launch"):
        KVCacheCluster.launch(config_of(2))


@pytest.mark.ray
def test_only_who_has_the_keys_can_follow_a_guarded_publisher(ray_cluster: str) -> None:
    any_port = "tcp://127.0.0.1:0"
    config = replica_configs(
        config_of(1, endpoint=any_port, replay_endpoint=any_port, curve="always", heartbeat_s=0.2)
    )[0]
    with KVCacheCluster.launch(config) as cluster:
        record = discovery_record(cluster)
        places = record.endpoint, record.replay_endpoint
        others = generate_curve_keys()
        wrong = CurveKeys(others.server_public, b"", others.peer_public, others.peer_secret)
        with (
            KVEventSubscriber(*places, keys=record.keys) as welcome,
            KVEventSubscriber(*places) as open_one,
            KVEventSubscriber(*places, keys=wrong) as stranger,
        ):
            welcome.wait_for(record.last_seq + 3, PATIENCE_S)
            assert welcome.is_exact
            assert (open_one.poll(0.0), stranger.poll(0.0)) == ([], [])
        assert "peer_secret" not in str(record) + str(record.to_dict())


@pytest.mark.ray
@pytest.mark.launches
def test_replicas_are_followed_apart_and_end_together(ray_cluster: str) -> None:
    any_port = "tcp://127.0.0.1:0"
    config = config_of(2, endpoint=any_port, replay_endpoint=any_port)
    index = PrefixIndex()
    prompt = np.arange(160, dtype=np.int32)
    with KVCacheReplicas.launch(config) as replicas:
        assert [replica.name for replica in KVCacheReplicas.connect(config.name)] == [
            replica.name for replica in replicas
        ]
        with replicas[1].client() as client:
            new = NewRequest("r0", prompt, max_new_tokens=160)
            completed = client.submit(StepRequest(new=(new,)))
            client.wait_finished(completed)
            client.wait_finished(client.submit(StepRequest(completed_step=completed)))
            for record in replicas.discovery():
                rank = record.data_parallel_rank
                with KVEventSubscriber(record.endpoint, record.replay_endpoint) as subscriber:
                    num_wanted = 10 * rank
                    for _ in range(1000):
                        for update in subscriber.poll(PATIENCE_S / 1000):
                            assert update.batch.data_parallel_rank == rank
                            index.follow(rank, update)
                        if rank in index.sources and index.num_blocks(rank) == num_wanted:
                            break
        assert [(m.source, m.device_blocks) for m in index.match(prompt)] == [(0, 0), (1, 10)]
    with pytest.raises(NotRunningError):
        KVCacheReplicas.connect(config.name)
