# Each command makes what it needs first and says what it's doing; a second run is instant. All of it stays in this folder.
# torch comes first and pinned: left to the project's range, pip would fetch gigabytes of CUDA on a machine without a GPU.
TORCH ?= torch==2.13.0
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo $$p && break; done)

VENV := .venv
RUN := $(VENV)/bin/python
export OMP_NUM_THREADS = 1  # the ranks of a test share the cores; more threads than cores make all of them slower

.PHONY: help demo test test-all lint format clean FORCE

help:
	@echo "make demo      train a small GPT on 2 ranks and on 1 process, and compare them step by step (3 minutes)"
	@echo "make test      the tests (15 minutes at most on 2 cores)"
	@echo "make test-all  the slow ones too"
	@echo "make lint      style and types;  make format puts the style right"
	@echo "make clean     remove what these made, .venv included"
	@echo 'Another torch: make demo TORCH="torch==2.14.1"'

demo: $(VENV)/ready
	@echo "== demo: docs/examples/compare.py"
	@$(RUN) docs/examples/compare.py

test: $(VENV)/ready
	@echo "== tests, without the slow ones"
	@$(RUN) -m pytest -n 2 --dist worksteal -m "not slow"

test-all: $(VENV)/ready
	@echo "== all tests"
	@$(RUN) -m pytest -n 2 --dist worksteal

lint: $(VENV)/ready
	@echo "== style and types"
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

format: $(VENV)/ready
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

$(RUN):
	@test -n "$(PYTHON)" || { echo "spmd needs Python 3.11 or newer: none found (PYTHON=/path/to/python3 names one)"; exit 1; }
	@echo "== making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# Holds the torch that was asked for, written only when that changes.
$(VENV)/torch: FORCE | $(RUN)
	@echo "$(TORCH)" | cmp -s - $@ || echo "$(TORCH)" > $@

$(VENV)/ready: pyproject.toml $(VENV)/torch | $(RUN)
	@echo "== installing $(TORCH), then spmd and its tools (a few minutes the first time)"
	@$(RUN) -m pip install --quiet "$(TORCH)"
	@$(RUN) -m pip install --quiet --editable ".[dev]"
	@touch $@

clean:
	@echo "== removing $(VENV), caches and build output"
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
