"""Plans of published models, with every number worked out by hand.

A page of attention holds `2 * tokens * heads of the rank * head size * bytes of an element`; a
block is a page per pool, and there are as many pools as layers in the largest group. Dtypes are of
two bytes unless it says otherwise. A step has 8192 tokens. `//` rounds down, `/^` up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvcache.planner import HFChoices, cluster_from_hf_config, plan_cluster, report_plan
from tests.planner import public_models as public


@dataclass(frozen=True)
class Group:
    """Groups alike: their kind, the layers of each, tokens and bytes of a page, blocks."""

    kind: str
    layers: tuple[int, ...]
    block_size: int
    page: int
    content: int
    blocks_per_request: int


@dataclass(frozen=True)
class Golden:
    """A model, a deployment, and the expected plan."""

    config: dict[str, Any]
    choices: HFChoices
    memory: str
    block_size: int
    max_model_len: int
    block_bytes: int
    num_blocks: int
    groups: tuple[Group, ...]
    capacity_tokens: int
    request_padding_bytes: int
    largest_model_len: int


PLANS = {
    "llama_3_8b": Golden(
        public.LLAMA_3_8B,
        HFChoices(),
        memory="40GiB",
        block_size=16,
        max_model_len=8192,  # max_position_embeddings
        block_bytes=32 * 65536,  # 32 layers
        num_blocks=20480,  # 40 GiB // 2 MiB
        groups=(
            # 2 * 16 * 8 * 128 * 2 = 65536; 8192 / 16 = 512
            Group("full", (32,), 16, 65536, 65536, 512),
        ),
        capacity_tokens=327_664,  # 20479 usable blocks * 16
        request_padding_bytes=0,
        largest_model_len=327_664,
    ),
    "llama_3_70b": Golden(
        public.LLAMA_3_70B,
        HFChoices(tensor_parallel_size=4, pipeline_parallel_size=2),
        memory="30GiB",
        block_size=16,
        max_model_len=131072,
        block_bytes=40 * 16384,  # half of 80 layers
        num_blocks=49152,  # 32212254720 // 655360
        groups=(
            # 2 * 16 * (8 / 4) * 128 * 2 = 16384; 131072 / 16 = 8192
            Group("full", (80,), 16, 16384, 16384, 8192),
        ),
        capacity_tokens=786_416,  # 49151 * 16
        request_padding_bytes=0,
        largest_model_len=786_416,
    ),
    "qwen_3_8b": Golden(
        public.QWEN_3_8B,
        HFChoices(tensor_parallel_size=2),
        memory="20GiB",
        block_size=16,
        max_model_len=40960,
        block_bytes=36 * 32768,
        num_blocks=18204,  # 21474836480 // 1179648 = 18204.4
        groups=(
            # 2 * 16 * (8 / 2) * 128 * 2 = 32768; 40960 / 16 = 2560
            Group("full", (36,), 16, 32768, 32768, 2560),
        ),
        capacity_tokens=291_248,  # 18203 * 16
        request_padding_bytes=0,
        largest_model_len=291_248,
    ),
    "mistral_7b": Golden(
        public.MISTRAL_7B,
        HFChoices(max_model_len=32768),
        memory="10GiB",
        block_size=16,
        max_model_len=32768,
        block_bytes=32 * 65536,
        num_blocks=5120,  # 10 GiB // 2 MiB
        groups=(
            # (4096 - 1 + 8192) /^ 16 = 768, and one because a window starts anywhere
            Group("sliding_window", (32,), 16, 65536, 65536, 769),
        ),
        capacity_tokens=218_126,  # 32768 * 5119 // 769: requests hold no more however long
        request_padding_bytes=0,
        largest_model_len=0,  # any length: 769 blocks are enough
    ),
    "gemma_2_9b": Golden(
        public.GEMMA_2_9B,
        HFChoices(tensor_parallel_size=2),
        memory="20GiB",
        block_size=16,
        max_model_len=8192,
        block_bytes=21 * 65536,  # as many layers of either kind
        num_blocks=15603,  # 21474836480 // 1376256 = 15603.8
        groups=(
            # 2 * 16 * (8 / 2) * 256 * 2 = 65536
            # min(4096 - 1 + 8192, 8192) / 16 = 512, and one
            Group("sliding_window", (21,), 16, 65536, 65536, 513),
            Group("full", (21,), 16, 65536, 65536, 512),  # 8192 / 16
        ),
        capacity_tokens=124_694,  # 8192 * 15602 // (513 + 512)
        request_padding_bytes=0,
        # A window of (4096 - 1 + 8192) /^ 16 + 1 = 769 blocks leaves 15602 - 769 = 14833 * 16
        largest_model_len=237_328,
    ),
    "gemma_3_27b": Golden(
        public.GEMMA_3_27B,
        HFChoices(tensor_parallel_size=2),
        memory="40GiB",
        block_size=16,
        max_model_len=131072,
        block_bytes=10 * 65536,  # the ten layers of full attention set the size of groups
        num_blocks=65536,  # 40 GiB // 640 KiB
        groups=(
            # 2 * 16 * (16 / 2) * 128 * 2 = 65536
            # 52 windows in 52 /^ 10 = 6 groups: four of nine and two of eight
            # (1024 - 1 + 8192) /^ 16 = 576, and one
            Group("sliding_window", (9, 9, 9, 9, 8), 16, 65536, 65536, 577),
            Group("full", (10,), 16, 65536, 65536, 8192),  # 131072 / 16; its first layer is 5
            Group("sliding_window", (8,), 16, 65536, 65536, 577),
        ),
        capacity_tokens=737_069,  # 131072 * 65535 // (6 * 577 + 8192 = 11654)
        # 6 * 10 - 52 = 8 pages of 577 blocks are empty, on two ranks
        request_padding_bytes=8 * 577 * 65536 * 2,
        largest_model_len=993_168,  # (65535 - 6 * 577) * 16
    ),
    "llama_4_scout": Golden(
        public.LLAMA_4_SCOUT,
        HFChoices(tensor_parallel_size=8, max_model_len=1 << 20),
        memory="40GiB",
        block_size=16,
        max_model_len=1_048_576,
        block_bytes=12 * 8192,  # 12 layers of full attention, 36 chunked ones in three groups
        num_blocks=436_906,  # 42949672960 // 98304 = 436906.6
        groups=(
            # 2 * 16 * (8 / 8) * 128 * 2 = 8192; (8192 + 8192) / 16 = 1024
            Group("chunked_local", (12, 12, 12), 16, 8192, 8192, 1024),
            Group("full", (12,), 16, 8192, 8192, 65536),  # 1048576 / 16
        ),
        capacity_tokens=6_677_473,  # 1048576 * 436905 // (3 * 1024 + 65536 = 68608)
        request_padding_bytes=0,
        largest_model_len=6_941_328,  # (436905 - 3072) * 16
    ),
    "gpt_oss_20b": Golden(
        public.GPT_OSS_20B,
        HFChoices(),
        memory="20GiB",
        block_size=16,
        max_model_len=131072,
        block_bytes=12 * 32768,
        num_blocks=54613,  # 21474836480 // 393216 = 54613.3
        groups=(
            # 2 * 16 * 8 * 64 * 2 = 32768; (128 - 1 + 8192) /^ 16 = 520, and one
            Group("sliding_window", (12,), 16, 32768, 32768, 521),
            Group("full", (12,), 16, 32768, 32768, 8192),
        ),
        capacity_tokens=821_542,  # 131072 * 54612 // (521 + 8192 = 8713)
        request_padding_bytes=0,
        largest_model_len=865_456,  # (54612 - 521) * 16
    ),
    "deepseek_v3": Golden(
        public.DEEPSEEK_V3,
        HFChoices(tensor_parallel_size=8, pipeline_parallel_size=2),
        memory="24GiB",
        block_size=64,
        max_model_len=163840,
        block_bytes=31 * 73728,  # the first stage has 31 of 61 layers
        num_blocks=11275,  # 25769803776 // 2285568 = 11275.0
        groups=(
            # 64 * (512 + 64) * 2 = 73728, the same on all ranks; 163840 / 64 = 2560
            Group("mla", (61,), 64, 73728, 73728, 2560),
        ),
        capacity_tokens=721_536,  # 11274 * 64
        request_padding_bytes=0,
        largest_model_len=721_536,
    ),
    "jamba": Golden(
        public.JAMBA,
        HFChoices(tensor_parallel_size=2, mamba_cache_mode="align"),
        memory="20GiB",
        block_size=16,
        max_model_len=262144,
        block_bytes=4 * 163840,  # four layers of attention, 28 states in seven groups
        num_blocks=32768,  # 20 GiB // 640 KiB
        groups=(
            # A state: 4096 channels * (3 + 16) * 2 = 155648. 16 tokens: 2 * 16 * 4 * 128 * 2 =
            # 32768. 155648 /^ 32768 = 5: blocks of 80 tokens, 163840. One state to read, one to
            # write.
            Group("mamba", (4, 4, 4, 4), 80, 163840, 155648, 2),
            Group("full", (4,), 80, 163840, 163840, 3277),  # 262144 /^ 80; its first layer is 4
            Group("mamba", (4, 4, 4), 80, 163840, 155648, 2),
        ),
        capacity_tokens=2_610_049,  # 262144 * 32767 // (7 * 2 + 3277 = 3291)
        request_padding_bytes=7 * 2 * 4 * (163840 - 155648) * 2,  # groups, blocks, layers, ranks
        largest_model_len=2_620_240,  # (32767 - 14) * 80
    ),
    "nemotron_nano_9b": Golden(
        public.NEMOTRON_NANO_9B,
        HFChoices(tensor_parallel_size=2),
        memory="20GiB",
        block_size=16,
        max_model_len=131072,
        block_bytes=4 * 2_686_976,  # four layers of attention, 27 states in seven groups
        num_blocks=1998,  # 21474836480 // 10747904 = 1998.0
        groups=(
            # A state: 6144 * 3 * 2 = 36864, and 64 * 80 * 128 * 4 (float32) = 2621440: 2658304.
            # 16 tokens: 2 * 16 * 4 * 128 * 2 = 32768. 2658304 /^ 32768 = 82: 1312 tokens, 2686976.
            # One state a request, which cannot be hit: its block size does not matter.
            Group("mamba", (4, 4, 4, 4, 4, 4, 3), 16, 2_686_976, 2_658_304, 1),
            Group("full", (4,), 1312, 2_686_976, 2_686_976, 100),  # 131072 /^ 1312
        ),
        capacity_tokens=2_446_269,  # 131072 * 1997 // (7 + 100)
        # 27 states of 28672 bytes less than a page, and one page without a layer; on two ranks
        request_padding_bytes=(27 * 28_672 + 2_686_976) * 2,
        largest_model_len=2_610_880,  # (1997 - 7) * 1312
    ),
    "whisper_large_v3": Golden(
        public.WHISPER_LARGE_V3,
        HFChoices(tensor_parallel_size=4),
        memory="4GiB",
        block_size=16,
        max_model_len=448,  # max_target_positions
        block_bytes=32 * 20480,
        num_blocks=6553,  # 4294967296 // 655360 = 6553.6
        groups=(
            # 2 * 16 * (20 / 4) * (1280 / 20) * 2 = 20480; 448 / 16 = 28
            Group("full", (32,), 16, 20480, 20480, 28),
            Group("cross", (32,), 16, 20480, 20480, 94),  # 1500 /^ 16
        ),
        capacity_tokens=24_059,  # 448 * 6552 // (28 + 94)
        request_padding_bytes=0,
        largest_model_len=103_328,  # (6552 - 94) * 16
    ),
}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_a_published_model_is_planned_as_worked_out_by_hand(name: str) -> None:
    golden = PLANS[name]
    sections = {"cache": {"memory_per_rank": golden.memory, "block_size": golden.block_size}}
    plan = plan_cluster(cluster_from_hf_config(golden.config, golden.choices, **sections))
    report = report_plan(plan, name)
    assert report.max_model_len == golden.max_model_len
    assert report.ranks[0].block_bytes == golden.block_bytes
    assert report.num_blocks == golden.num_blocks
    assert [
        (g.kind, g.num_layers, g.block_size_tokens, g.page_size_bytes, g.real_page_size_bytes)
        for g in report.groups
    ] == [
        (group.kind, num_layers, group.block_size, group.page, group.content)
        for group in golden.groups
        for num_layers in group.layers
    ]
    per_request = sum(group.blocks_per_request * len(group.layers) for group in golden.groups)
    assert [g.blocks_per_request for g in report.groups] == [
        group.blocks_per_request for group in golden.groups for _ in group.layers
    ]
    assert report.max_concurrency == golden.num_blocks / per_request
    assert report.capacity_tokens == golden.capacity_tokens
    all_ranks = sum(rank.block_bytes for rank in report.ranks)
    assert report.request_bytes == per_request * all_ranks
    assert report.bytes_per_token == per_request * all_ranks / golden.max_model_len
    assert report.request_padding_bytes == golden.request_padding_bytes
    assert report.largest_model_len == (golden.largest_model_len or None)
