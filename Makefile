# Every target works on a fresh machine: it makes .venv and installs what it needs, and is quick the second time.
PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready
DEV := .venv/.dev
# Test processes that run at once
JOBS ?= auto
TORCH ?= 2.13.0
TESTS ?=
DEMO ?=
# Outside the repository: a CUDA build of torch takes 5.4 GB, and all checkouts can share it.
TORCH_ENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/shardwise/torch-$(TORCH)-$(notdir $(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help demo test test-deep test-native test-torch lint format bench sweep clients models refusals chaos faults fuzz rules docs clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(DEV): $(READY) requirements-dev.txt requirements-clients.txt requirements-torchtitan.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -r requirements-clients.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-torchtitan.txt
	@touch $@

demo: $(READY)  ## train a language model on 4 processes and on one, and compare (DEMO="--steps 20")
	@$(BIN)/python -m examples.train $(DEMO)

test: $(DEV)  ## run the tests: pure, simulated, and on real processes
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-deep: $(DEV)  ## the same with many more drawn examples
	SHARDWISE_DEEP=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-native: $(DEV)  ## the same with ops whose blocks need not move in C++ (shardwise.native)
	SHARDWISE_NATIVE=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

# The sources come from PYTHONPATH, so that the environment belongs to no checkout. Only pyenv reads PYENV_VERSION: its python3.12
# otherwise runs only where 3.12 is the selected version.
$(TORCH_ENV)/.ready: requirements.txt requirements-dev.txt requirements-clients.txt
	PYENV_VERSION=$(patsubst python%,%,$(notdir $(PYTHON))) $(PYTHON) -m venv $(TORCH_ENV)
	{ echo torch==$(TORCH); grep -hvE '^(torch==|-r )' requirements.txt requirements-dev.txt requirements-clients.txt; } > $(TORCH_ENV)/requirements.txt
	$(TORCH_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(TORCH_ENV)/requirements.txt
	@touch $@

test-torch: $(TORCH_ENV)/.ready  ## run the tests on another torch and Python: TORCH=2.15.0 PYTHON=python3.12 TESTS=tests/comm
	@$(TORCH_ENV)/bin/python -c 'import sys, torch; print("torch", torch.__version__, "on Python", sys.version)'
	PYTHONPATH=$(CURDIR)/src $(TORCH_ENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

lint: $(DEV)  ## format check, lint, types, and who may import whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV)  ## bytes, collectives, planning time and overhead next to torch's
	$(BIN)/python -m benchmarks.redistribute
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.cold
	$(BIN)/python -m benchmarks.train
	$(BIN)/python -m benchmarks.fsdp
	$(BIN)/python -m benchmarks.random
	$(BIN)/python -m benchmarks.checkpoint

sweep: $(DEV)  ## every op of torch's op_db, all samples and dtypes, against dense (hours; SWEEP="--samples 3" for fewer)
	$(BIN)/python -m benchmarks.sweep $(SWEEP)

clients: $(DEV)  ## torch's own clients, transformers, accelerate, peft and torchtitan under install, all modes; writes the tables of docs/clients.md
	SHARDWISE_DEEP=1 $(BIN)/python -m pytest tests/drop_in
	$(BIN)/python -m tests.drop_in.table

models: $(DEV)  ## every model of transformers that carries a plan, tiny, against dense (MODELS="--only qwen3 --steps 5")
	$(BIN)/python -m benchmarks.models $(MODELS)

refusals: $(DEV)  ## programs that torch refuses or gets wrong, with torch's and with ours (REFUSALS="7 8 15")
	$(BIN)/python -m benchmarks.refusals $(REFUSALS)

chaos: $(DEV)  ## kill training runs 300 times at drawn moments, by hand and under torchrun, resume them on other meshes or from memory, compare (CHAOS="--seed 7 --kills 900")
	$(BIN)/python -m tests.checkpoint.chaos --kills 300 --torchrun 3 $(CHAOS)
	$(BIN)/python -m tests.recovery.kills --runs 100

faults: $(DEV)  ## inject 100 drawn faults on 4 processes, the same on torch's DTensor, and run 200 right programs (FAULTS="--seed 7 --only stopped")
	$(BIN)/python -m tests.faults.run --torch $(FAULTS)

fuzz: $(DEV)  ## load 100,000 fuzzed checkpoints
	SHARDWISE_FUZZ=100000 $(BIN)/python -m pytest tests/checkpoint/test_damage.py -k fuzzed

rules: $(DEV)  ## write the printed tables of rules and routes, and the errors of docs/faults.md, anew
	$(BIN)/python -c 'from shardwise.rules.table import printed; print(printed(), end="")' > docs/rules.txt
	$(BIN)/python -c 'from shardwise.dispatch.route_table import printed_routes; print(printed_routes(), end="")' > docs/routes.txt
	$(BIN)/python -m tests.faults.document

docs: $(DEV)  ## run the code in README and docs
	$(BIN)/python -m pytest tests/test_docs.py

clean:  ## remove what the other targets made
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
