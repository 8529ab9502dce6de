#!/usr/bin/env bash
# Build vLLM's environment for the tests: the stock vLLM for CPUs, and what kvcache imports there.
#
#   install.sh DIRECTORY
set -euo pipefail
target=${1:?usage: install.sh DIRECTORY}
here=$(dirname "$0")
[ -e "$target/.kvcache" ] && exit 0
bash "$here/../../bench/install_peer.sh" "$target"
# numba as this vLLM pins it; no Ray, and kvcache itself by PYTHONPATH.
"$target/bin/python" -m pip install ${PIP_ARGS:-} numba==0.65.0 google-crc32c msgpack pyzmq PyYAML
touch "$target/.kvcache"
