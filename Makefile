# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.
#
#   PYTHON=python3.12 make setup       another interpreter
#   PIP_ARGS="--index-url URL" ...     where pip looks, e.g. the index of the torch build you want

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKLOAD ?= conversations
CONFIG ?= configs/cpu_tp2.yaml
# Processes that share the tests; those that need Ray come afterwards, alone.
JOBS ?= 2
# Tests that need no cluster of Ray and no other environment, and end soon.
QUICK := 'not ray and not faults and not multinode and not launches and not long and not chaos and not interop and not vllm'
# The files with tests of a marker: to collect all tests takes as long as many tests.
marked = $(sort $(shell grep -rlw --include='test_*.py' 'mark.$(1)' tests))
# Which part of the tests that take long or end processes: 1/3 is the first of three.
SHARE ?= 1/1

export PYTHONUNBUFFERED := 1
# Tests start many processes, and rewrite their own assertions: compile each module once.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-long test-interop test-vllm test-launches test-faults test-chaos test-multinode test-fast check format bench bench-smoke bench-peer docs audit clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev,bench,serve,plots,transformers,docs]'
	$(BIN)/python -c 'import kvcache.worker, kvcache.core.flat_core'  # compile the kernels once
	touch $@

demo: setup
	$(BIN)/kvcache replay $(WORKLOAD) --config $(CONFIG)

test: setup
	$(BIN)/python -c 'import kvcache.core.flat_core'  # compiled once, not by each test process
	$(BIN)/python -m pytest tests -n $(JOBS) -m $(QUICK)
	$(BIN)/python -m pytest $(call marked,ray) -m 'ray and not faults and not launches'

test-long: setup
	$(BIN)/python -m pytest tests -n $(JOBS) -m long --share $(SHARE)

# Real routers, in an environment of their own, subscribe to clusters of ours.
test-interop: setup
	PIP_ARGS="$(PIP_ARGS)" PYTHON="$(PYTHON)" bash tests/interop/install.sh .venv-interop
	$(BIN)/python -m pytest tests/interop -m interop

# The stock vLLM generates with our connector, in an environment of its own.
test-vllm: setup
	PIP_ARGS="$(PIP_ARGS)" PYTHON="$(PYTHON)" bash tests/vllm/install.sh .venv-vllm
	PIP_ARGS="$(PIP_ARGS)" PYTHON="$(PYTHON)" bash tests/interop/install.sh .venv-interop
	$(BIN)/python -m pytest tests/vllm -m vllm

# Configurations, replicas, the completions server, the page and the site, as people start them.
test-launches: setup
	$(BIN)/python -m pytest tests/launches
	$(BIN)/python -m pytest $(filter-out tests/launches/%,$(call marked,launches)) -m launches

test-faults: setup
	$(BIN)/python -m pytest $(call marked,faults) -m 'faults and not chaos' --share $(SHARE)

# Longer: python -m tests.chaos processes --seeds 0:200 (or ray, or simulated).
test-chaos: setup
	$(BIN)/python -m pytest tests/chaos -m chaos

test-multinode: setup
	$(BIN)/python -m pytest tests/multinode

test-fast: setup
	$(BIN)/python -m pytest tests -m $(QUICK) -x -q

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests -m $(QUICK)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m bench --write BENCHMARKS.md

bench-smoke: setup
	$(BIN)/python -m bench --smoke

# The peer's own manager, in an environment of its own; without it its columns stay empty.
bench-peer: setup
	PIP_ARGS="$(PIP_ARGS)" PYTHON="$(PYTHON)" bash bench/install_peer.sh .venv-peer
	$(BIN)/python -m bench --peer .venv-peer --write BENCHMARKS.md

docs: setup
	$(BIN)/python -m mkdocs build --strict

# Known weaknesses of what constraints.txt pins; asks PyPI, which not every mirror can stand in for, and says so.
audit: setup
	$(BIN)/python -m pip check
	test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/python -m pip install -q $(PIP_ARGS) pip-audit; } || true
	$(BIN)/python .ci/audit .venv-audit/bin/pip-audit

clean:
	rm -rf $(VENV) .venv-peer .venv-interop .venv-vllm .venv-audit build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
