# Each target sets up what it needs: it finds a Python >= 3.12, makes an environment, and installs the packages.
.DEFAULT_GOAL := help
.PHONY: demo train docs pyright mypy test test-all test-jax-0.11 test-jax-0.12 test-gpu lint pyright mypy bench clean help
SHELL := /bin/bash

VENV := .venv
VENV_NEWEST := .venv-jax-0.12
# Two workers only: most tests compile, and XLA uses more threads by itself.
PYTEST := -m pytest -n 2
SLOW := -m "not slow"
SLOW_NEWEST := -m "not slow and not one_jax"
CASES := --cases 1
CASES_ON_GPUS := --cases 1
BUDGET := --budget jax-0-11
BUDGET_NEWEST := --budget jax-0-12
ARGS ?=

help:  ## print this list
	@grep -E '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo:  ## run both fused halves of a layer, on the visible GPUs or emulated, and draw them (ARGS="--out x.png")
	@setup/venv.sh $(VENV) constraints.txt cli
	@$(VENV)/bin/python -m overlap demo $(ARGS)

test: lint test-jax-0.11 test-gpu test-jax-0.12  ## lint, types, and the tests on both supported versions of jax

test-all:  ## as test, with the slow tests, and all that depends on jax on the newest one: before a release
	@$(MAKE) test SLOW= SLOW_NEWEST='-m "not one_jax"' CASES= CASES_ON_GPUS= BUDGET= BUDGET_NEWEST=

lint:  ## ruff, pyright, mypy on code as users write it, and the pages of docs/
	@setup/venv.sh $(VENV) constraints.txt dev mpi aot
	$(VENV)/bin/ruff check .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target pyright mypy docs

pyright:
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

mypy:
	$(VENV)/bin/mypy

docs:  ## build the pages of docs/ into build/docs; a warning is an error
	@setup/venv.sh $(VENV) constraints.txt dev mpi aot
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict  # With --quiet no warning would count.

test-jax-0.11:  ## tests/ on jax 0.11.2
	@setup/venv.sh $(VENV) constraints.txt dev mpi aot
	$(VENV)/bin/python $(PYTEST) $(SLOW) $(BUDGET) $(ARGS)

test-jax-0.12:  ## the tests in tests/ that depend on jax, on jax 0.12.0.1; of each test with parameters a few cases
	@setup/venv.sh $(VENV_NEWEST) constraints/jax-0.12.txt dev mpi aot
	$(VENV_NEWEST)/bin/python $(PYTEST) $(SLOW_NEWEST) $(CASES) $(BUDGET_NEWEST) $(ARGS)

test-gpu:  ## tests/multi_gpu on the visible GPUs, one case of each test with parameters; nothing without GPUs
	@setup/venv.sh $(VENV) constraints.txt dev mpi aot
	@if [ -e /dev/nvidia0 ]; then $(VENV)/bin/python -m pytest tests/multi_gpu $(CASES_ON_GPUS) $(ARGS); fi

bench:  ## run the benchmarks on the visible GPUs (with the options in ARGS)
	@setup/venv.sh $(VENV) constraints.txt bench
	@$(VENV)/bin/python -m benchmarks $(ARGS)

train:  ## train a small GPT on the visible GPUs, else on CPU devices (with the options in ARGS); continues a run
	@setup/venv.sh $(VENV) constraints.txt examples
	@$(VENV)/bin/python examples/train.py $(ARGS)

clean:  ## remove the environments and caches
	rm -rf build $(VENV) $(VENV_NEWEST) .venv-trainers .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
