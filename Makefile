# Everything a fresh machine with Python 3.11, pip and make needs: `make demo` and `make test` set up and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := .venv-docs
# How to install into an environment. `make UV=1 …` takes uv, and torch for CPUs only, which saves gigabytes on Linux.
install = $(1)/bin/python -m pip install --quiet
ifdef UV
install = uv pip install --quiet --torch-backend cpu --python $(1)/bin/python
endif
export HF_HUB_OFFLINE := 1
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

# What `make peers` has made, the tests use.
ifneq ($(wildcard .peers/adapters/.ready),)
export INLAY_ADAPTERS_PYTHON ?= $(CURDIR)/.peers/adapters/bin/python
endif
ifneq ($(wildcard .peers/peft/.ready),)
export INLAY_PEFT_PYTHON ?= $(CURDIR)/.peers/peft/bin/python
endif

.PHONY: demo test test-long fuzz coverage coverage-quick lint types check docs peers lock wheel clean

demo: $(READY)
	$(BIN)/inlay demo

test: $(READY)
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

# What takes long: many processes, clusters, compilers, hundreds of kills. `make test` leaves it out.
test-long: $(READY)
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m long

# Two thousand requests that nobody thought of, against the server's own description.
fuzz: $(READY)
	$(BIN)/python tools/schemathesis_serve.py --cases 2000

# All tests, or TESTS=… On Python 3.11 it costs half as much time again; from 3.12 on there is a cheaper way.
coverage: CORE = $(shell $(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")')
coverage: $(READY)
	COVERAGE_CORE=$(CORE) $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered $(TESTS)

# The quick tests of tasks and rows, for .ci/run.
coverage-quick:
	$(MAKE) coverage TESTS="tests/data"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(READY)
	$(BIN)/mypy

check: test test-long lint types

docs: $(DOCS)/.ready
	$(PYTHON) tools/site.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

peers: .peers/adapters/.ready .peers/peft/.ready

# The versions and hashes that people may install from: requirements.lock. Needs the package index.
lock: $(READY)
	$(BIN)/python tools/lock.py

# The wheel, as people install it: into an environment of its own, where it says hello and runs the README's Python.
wheel:
	$(PYTHON) tools/check_wheel.py $(if $(UV),--uv)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(call install,$(VENV)) --constraint constraints.txt torch
	$(call install,$(VENV)) --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# Small: the reference is read from the source, so neither torch nor Inlay is installed here.
$(DOCS)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(call install,$(DOCS)) --requirement docs/requirements.txt
	touch $@

.peers/adapters/.ready: PINS := adapters==1.3.0 transformers==4.57.6
.peers/peft/.ready: PINS := peft==0.21.2 transformers==5.22.2
.peers/%/.ready:
	$(PYTHON) -m venv --clear $(@D)
	$(call install,$(@D)) torch==2.13.0
	$(call install,$(@D)) $(PINS)
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) .peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage site dist
