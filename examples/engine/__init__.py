"""A small inference engine on the KV-cache coordinator: see README.md in this directory."""

from examples.engine.config import EngineConfig
from examples.engine.dense import DenseModel
from examples.engine.engine import Engine
from examples.engine.model_config import (
    MODELS,
    DecoderConfig,
    gemma_hybrid,
    latent,
    llama,
    mamba_hybrid,
)
from examples.engine.outputs import EngineStatistics, Output
from examples.engine.sampling import SamplingParams
from examples.engine.tokenizer import ByteTokenizer

__all__ = [
    "MODELS",
    "ByteTokenizer",
    "DecoderConfig",
    "DenseModel",
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "Output",
    "SamplingParams",
    "gemma_hybrid",
    "latent",
    "llama",
    "mamba_hybrid",
]
