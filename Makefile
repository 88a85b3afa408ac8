# `make demo`, `make test` and `make lint` work on a fresh clone: each first makes .venv if it is not there or not up to date.
# PYTHON=...  the interpreter to build on (default: the first of at least 3.11, preferring one that has a GPU build of PyTorch)
# TORCH=...   what pip installs where that interpreter brings no PyTorch of its own

TORCH ?= torch==2.13.0
PYTHON ?=
PYTEST_ARGS ?=
RUN = .venv/bin/python -m

.PHONY: help venv demo test lint clean

help:
	@echo "make demo   a tiny random model, generated from by two actors on this machine's CPU"
	@echo "make test   the tests that need no GPU (PYTEST_ARGS='-k name' for some)"
	@echo "make lint   ruff and mypy"
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

clean:
	rm -rf .venv build
