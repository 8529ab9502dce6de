"""Every small configuration: launched on Ray, with a replay that checks every byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors import KVCacheCluster
from actors.cli.playground import ClientStepper
from kvcache.base.clock import SystemClock
from kvcache.config import layer_specs, load_config
from kvcache.planner.grouping import get_kv_cache_groups, merge_rank_specs
from kvcache.replay import EngineLimits, ModelTraits, ReplayEngine
from kvcache.simulate import Conversations, ConversationShape

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = sorted(path.name for path in CONFIGS.glob("cpu_*.yaml"))
CANNOT_HIT = {"cpu_mamba_none.yaml", "cpu_cross_attention.yaml"}

SHAPE = ConversationShape(
    num_conversations=3,
    num_turns=2,
    num_system_prompts=1,
    system_prompt_tokens=256,
    question_tokens=(20, 60),
    answer_tokens=(4, 12),
    document_share=0.0,
)


@pytest.mark.launches
@pytest.mark.parametrize("name", SMALL)
def test_a_configuration_launches_and_serves_right_bytes(
    ray_cluster: str, name: str, tmp_path: Path
) -> None:
    config = load_config(CONFIGS / name)
    patient = {"startup_s": 240.0, "step_s": 60.0, "forward_s": 90.0}
    deadlines = config.deadlines.model_copy(update=patient)
    config = config.model_copy(update={"name": f"test-{config.name}", "deadlines": deadlines})
    if config.offload.disk is not None:
        disk = config.offload.disk.model_copy(update={"directory": str(tmp_path)})
        offload = config.offload.model_copy(update={"disk": disk})
        config = config.model_copy(update={"offload": offload})
    with KVCacheCluster.launch(config) as cluster, cluster.client("replay") as client:
        stepper = ClientStepper(
            client,
            lambda: (cluster.statistics().coordinator, cluster.statistics().workers),
            return_s=config.deadlines.return_s,
        )
        limits = EngineLimits(
            max_model_len=cluster.status().max_model_len,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            model=ModelTraits.of(get_kv_cache_groups(merge_rank_specs(layer_specs(config)))),
        )
        workload = Conversations(SHAPE, seed=2)
        report = ReplayEngine(workload, stepper, limits, SystemClock()).run()
    assert (report.num_requests, report.num_wrong_blocks) == (6, 0)
    assert report.bytes_checked > 0
    assert (report.num_hit_tokens > 0) is (name not in CANNOT_HIT)
