"""Models as published: a Hugging Face `config.json` becomes the layers of a configuration.

fields.py reads the file, blocks.py what many architectures share, architectures.py knows each of
them, model.py makes the configuration.
"""

from __future__ import annotations

from kvcache.planner.hf_config.architectures import ARCHITECTURES, Architecture
from kvcache.planner.hf_config.model import (
    HFChoices,
    cluster_from_hf_config,
    model_from_hf_config,
)

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "HFChoices",
    "cluster_from_hf_config",
    "model_from_hf_config",
]
