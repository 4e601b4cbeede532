# Everything runs in .venv, whatever other environment is active.
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.legato-setup
# The first Python that runs and is new enough: a name on the path may be a shim for one that is not installed.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
TORCH := torch==2.13.0
LM_EVAL := "lm-eval[api]==0.4.13" transformers==5.23.0

# Another environment's settings must not leak into this one.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: help setup models browser demo test lint ruff format-check types format clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(STAMP)  ## Install Legato and its development tools in .venv

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard src/legato/kernels/native/*)
	@test -n "$(PYTHON)" || { echo "Legato needs Python 3.11 or newer: make setup PYTHON=/path/to/python" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): a minute or two."
	$(BIN)/python -m pip install -q -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "Ready: . $(VENV)/bin/activate"

models: setup  ## Fetch the two small real models that the tests use
	@$(BIN)/legato pull smollm2 gemma3

browser:  ## Install the Chromium that tests drive, where it is missing (Debian, as root)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends \
		chromium chromium-driver; }

demo: setup  ## Fetch one small model and run examples/demo.py on it
	@$(BIN)/legato pull smollm2
	$(BIN)/python examples/demo.py

test: setup models  ## Run the tests (PYTEST_ARGS=... for pytest's options)
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

fuzz: setup models  ## Send a server what its OpenAPI allows and forbids, for 10 minutes
	LEGATO_FUZZ_SECONDS=600 $(BIN)/python -m pytest -s --timeout 900 tests/server/test_openapi.py -k fuzz

lm-eval: setup models  ## Run lm-eval against a server, in an environment of its own
	test -x $(VENV)-lm-eval/bin/lm_eval || { $(PYTHON) -m venv $(VENV)-lm-eval && \
		$(VENV)-lm-eval/bin/pip install -q $(LM_EVAL); }
	$(BIN)/python -m tests.server.lm_eval $(VENV)-lm-eval/bin/python

reference: setup  ## Make docs/reference.md from the code
	$(BIN)/python -m legato.cli.reference > docs/reference.md.new
	mv docs/reference.md.new docs/reference.md

lint: ruff format-check types  ## Check style, format and types

ruff: setup
	$(BIN)/ruff check

format-check: setup
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

format: setup  ## Put the code in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove .venv, build output and tool caches (pulled models stay)
	rm -rf $(VENV) build dist src/legato/kernels/lib .mypy_cache .pytest_cache .ruff_cache .hypothesis .schemathesis .venv-lm-eval tests/server/npm/node_modules
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
