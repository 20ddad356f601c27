# What people type. Everything lives in .venv; the work is done by `ksana` (see `ksana --help`).

# Python 3.11 to 3.13 to make .venv with; the first that is found unless given.
PYTHON ?=
# Where `make serve` listens, and what it serves.
PORT ?=
MODEL ?= smollm2-135m
# An extra package index for PyTorch, such as the one for builds without CUDA (see README.md).
TORCH_INDEX ?=
# Debian packages that tests want, and the program that shows each is there: package=program.
TEST_PACKAGES := gcc=gcc redis-server=redis-server

export PYTHON PORT TORCH_INDEX

VENV := .venv
RUN := $(VENV)/bin
PIP_INSTALL := $(RUN)/python -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help
.PHONY: help serve test test-slow lint bench clean asked-python

help: ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Variables:   PORT= MODEL= PYTHON= TORCH_INDEX=  (make serve PORT=9000)"

# make sends a SIGTERM that it gets to its child, and waits for it. With exec that child is the server itself
# and not a shell, which would die and leave the server behind.
serve: ## Prepare .venv and serve a small model (PORT=, MODEL=, PYTHON=)
	@scripts/preflight.sh serve
	@$(MAKE) --no-print-directory $(VENV)/installed
	@exec $(RUN)/python scripts/serve.py $(RUN)/ksana $(MODEL) $(if $(PORT),--port $(PORT))

test: $(VENV)/installed-test lint ## Check the code and run the tests but the slow ones
	$(RUN)/python -m pytest -m "not slow"

test-slow: $(VENV)/installed-test ## Run the slow tests: real models, server processes
	$(RUN)/python -m pytest -m slow

lint: $(VENV)/installed-test ## Check style, types and layers
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

bench: $(VENV)/installed-test ## Compare with transformers on this machine
	$(RUN)/python -m benchmarks.against_transformers

clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second call start at once; a change of pyproject.toml makes pip look again.
$(VENV)/installed: pyproject.toml | $(if $(PYTHON),asked-python) $(VENV)/made
	@echo "Installing what Ksana needs into $(VENV) (a few minutes, about 1.5 GB)"
	$(PIP_INSTALL) --quiet --editable .
	@touch $@

$(VENV)/installed-test: pyproject.toml | $(if $(PYTHON),asked-python) $(VENV)/made
	@scripts/debian_packages.sh $(TEST_PACKAGES)
	@echo "Installing Ksana and what its tests need into $(VENV)"
	$(PIP_INSTALL) --quiet --editable '.[test]'
	@touch $@ $(VENV)/installed

# A PYTHON that is given is looked at also where it makes no difference, as .venv is there already.
asked-python:
	@scripts/preflight.sh asked-python

# A .venv that somebody else made is taken as it is; one that was interrupted while being made is completed.
$(VENV)/made:
	@scripts/preflight.sh venv
	@$(RUN)/python -m pip --version >/dev/null 2>&1 || { \
		python=$$(scripts/preflight.sh python) && "$$python" -m venv $(VENV); }
	@scripts/preflight.sh torch
	@touch $@
