# `make demo`, `make test` and `make lint` work on a fresh clone: each first makes .venv if it is not there or not up to date.
# PYTHON=...  the interpreter to build on (default: the first of at least 3.11, preferring one that has a GPU build of PyTorch)
# TORCH=...   what pip installs where that interpreter brings no PyTorch of its own
# EMU=...     make amd-emulate: the directory of amd_emu.py
# TINYGRAD_DIR=...  make amd-emulate: a checkout of tinygrad's source, whose tests contain the instructions' semantics

TORCH ?= torch==2.13.0
PYTHON ?=
PYTEST_ARGS ?=
EMU ?=
TINYGRAD_DIR ?=
RUN = .venv/bin/python -m

.PHONY: help venv demo test lint amd-emulate clean

help:
	@echo "make demo   a tiny random model, generated from by two actors on this machine's CPU"
	@echo "make test   the tests that need no GPU (PYTEST_ARGS='-k name' for some)"
	@echo "make lint   ruff and mypy"
	@echo "make amd-emulate EMU=<directory of amd_emu.py> TINYGRAD_DIR=<checkout>   kernels as gfx942 and gfx950 machine"
	@echo "            code on the CPU, and the instructions they execute (build/amd-emulate.jsonl)"
	@echo "make venv   only install;  make clean  remove .venv and build/"

venv:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" sh .ci/bootstrap

demo: venv
	@$(RUN) dsv4dist make-checkpoint build/demo --preset tiny
	@$(RUN) dsv4dist generate --model build/demo --tp 2 --device cpu --address local --max-tokens 16 --ignore-eos \
	    --prompt "Who talks to whom?" --prompt "The driver plans every step." --prompt-ids 1,2,3,4,5,6,7,8

test: venv
	@$(RUN) pytest $(PYTEST_ARGS)

lint: venv
	@$(RUN) ruff check . && $(RUN) ruff format --check . && $(RUN) mypy

amd-emulate: export AMD_EMU_DIR = $(abspath $(EMU))
amd-emulate: export TINYGRAD_DIR := $(abspath $(TINYGRAD_DIR))
amd-emulate: export CACHEDB = $(CURDIR)/build/tinygrad.db
amd-emulate: venv
	@test -f "$(EMU)/amd_emu.py" || { echo "amd-emulate: EMU='$(EMU)' has no amd_emu.py; pass its directory" >&2; exit 2; }
	@test -f "$(TINYGRAD_DIR)/test/mockgpu/amd/emu.py" || \
	    { echo "amd-emulate: TINYGRAD_DIR='$(TINYGRAD_DIR)' is no checkout of tinygrad; clone it there" >&2; exit 2; }
	@mkdir -p build
	@.venv/bin/python -c "import xdist" 2>/dev/null || $(RUN) pip install --quiet pytest-xdist
	@command -v clang >/dev/null || .venv/bin/python -c "import ziglang" 2>/dev/null || $(RUN) pip install --quiet ziglang
	@$(RUN) pytest -n 2 --dist worksteal -m "emulated and not gpu and not slow" tests/kernels $(PYTEST_ARGS)
	@$(RUN) tests.kernels.executed_instructions build/amd-emulate.jsonl

clean:
	rm -rf .venv build
