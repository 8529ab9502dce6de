"""From a published model's `config.json` to the layers of a configuration.

fields.py reads the file, blocks.py the parts that many architectures share, architectures.py the
rest of each; model.py makes the configuration.
"""

from __future__ import annotations

from kvcache.planner.hf_config.architectures import ARCHITECTURES, Architecture
from kvcache.planner.hf_config.model import HFChoices, cluster_from_hf_config, model_from_hf_config

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "HFChoices",
    "cluster_from_hf_config",
    "model_from_hf_config",
]
