"""A cluster on Ray: one coordinator that decides, two workers that hold the bytes, one client.

An engine talks to the coordinator once per scheduling step. In a `StepRequest` it says who is new,
who runs on with which tokens, and who has finished; in the `StepResult` it learns who was let in,
in which *slot* (row of the block tables), how much of each prompt was found in the cache, and
which blocks are new. The coordinator sends both workers the same commands, once per step.

The engine here is a few lines long and answers with made-up tokens. Instead of a model the workers
run *content-checked forwards*: they write into every block what the tokens demand, and compare
every byte that a later step reads. (03_embed_in_your_engine.py runs a real, tiny model.)

    .venv/bin/python examples/02_ray_cluster.py

It starts Ray on this machine, or joins the Ray cluster that RAY_ADDRESS names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from actors import KVCacheClient, KVCacheCluster
from kvcache import NO_SLOT, NO_STEP, NewRequest, RunningRequests, StepRequest, StepResult
from kvcache.config import load_config

CONFIG = Path(__file__).parents[1] / "configs" / "cpu_tp2.yaml"
MAX_NEW_TOKENS = 40
"""Most tokens that one request computes in one step: longer prompts are computed in chunks."""


@dataclass
class Sequence_:
    """A request as the engine sees it: its tokens, and how many of them are computed."""

    request_id: str
    token_ids: list[int]
    num_output_tokens: int
    slot: int = NO_SLOT
    num_computed: int = 0
