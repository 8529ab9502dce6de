#!/usr/bin/env bash
# Build the environment of the routers that the interop tests subscribe with, from PyPI.
#
#   install.sh DIRECTORY
#
# One of its own, because a router pins what it is built with. Every version is written down here.
set -euo pipefail
target=${1:?usage: install.sh DIRECTORY}
python=${PYTHON:-python3}
pip_args=${PIP_ARGS:-}
[ -e "$target/.installed" ] && exit 0
"$python" -m venv "$target"
"$target/bin/python" -m pip install $pip_args \
    ai-dynamo-runtime==1.6.1 pydantic==2.13.5 pydantic_core==2.46.5 annotated-types==0.8.0 \
    typing_extensions==4.16.0 typing-inspection==0.4.5 uvloop==0.23.0 \
    msgspec==0.22.0 pyzmq==27.3.0
touch "$target/.installed"
