"""Plans of published models, with every number worked out by hand in `golden/*.yaml`.

`model` names a config.json in `public_models.py`; `choices` are fields of HFChoices. An entry of
`groups` stands for neighbouring groups that differ only in their number of layers; `layers` has
one number per group. `page` and `content` are bytes, with and without padding. `why` has the
arithmetic; in it, `//` rounds down and `/^` rounds up.

A page of attention holds `2 * tokens * heads of the rank * head size * bytes of an element`. A
block has one page per pool, and there are as many pools as layers in the largest group. Elements
have two bytes unless `why` says otherwise. A step has 8192 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcache.planner import HFChoices, cluster_from_hf_config, plan_cluster, report_plan
from tests.planner import public_models

CASES = sorted((Path(__file__).parent / "golden").glob("*.yaml"))


def test_all_golden_plans_are_found() -> None:
    assert len(CASES) == 12


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_published_model_is_planned_as_worked_out_by_hand(path: Path) -> None:
    golden: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    sections = {"cache": {"memory_per_rank": golden["memory"], "block_size": golden["block_size"]}}
    config = getattr(public_models, golden["model"])
    plan = plan_cluster(cluster_from_hf_config(config, HFChoices(**golden["choices"]), **sections))
    report = report_plan(plan, path.stem)
    expected = golden["expected"]
    for name in (
        "max_model_len",
        "num_blocks",
        "capacity_tokens",
        "request_padding_bytes",
        "largest_model_len",
    ):
        assert getattr(report, name) == expected[name], name
    assert report.ranks[0].block_bytes == expected["block_bytes"]
    groups = [(group, num_layers) for group in expected["groups"] for num_layers in group["layers"]]
    assert [
        (
            group.kind,
            group.num_layers,
            group.block_size_tokens,
            group.page_size_bytes,
            group.real_page_size_bytes,
            group.blocks_per_request,
        )
        for group in report.groups
    ] == [
        (
            group["kind"],
            num_layers,
            group["block_size"],
            group["page"],
            group["content"],
            group["blocks_per_request"],
        )
        for group, num_layers in groups
    ]
    per_request = sum(group["blocks_per_request"] for group, _ in groups)
    all_ranks = sum(rank.block_bytes for rank in report.ranks)
    assert report.max_concurrency == expected["num_blocks"] / per_request
    assert report.request_bytes == per_request * all_ranks
    assert report.bytes_per_token == per_request * all_ranks / expected["max_model_len"]
