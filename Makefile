# Copyright (c) monai_god contributors
# Licensed under the Apache License, Version 2.0 (the "License"); see LICENSE.
#
# Every target makes its own virtual environment in $(VENV) from a bare Python 3.10 or newer and installs what it needs.
# A stamp keyed on setup.cfg and pyproject.toml says what is installed: change them and the next `make` installs again.
#   make PYTHON=/path/to/python3.12 test     another interpreter
#   make VENV=/tmp/venv test                 another place for the environment

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
KEY := $(shell cat setup.cfg pyproject.toml | cksum | cut -d' ' -f1)

# A candidate must run (a pyenv shim may exist and not run), be new enough, and be able to make an environment with pip.
CANDIDATES := python3.11 python3.12 python3.13 python3 python3.10
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in $(CANDIDATES); do if "$$p" -c '$(USABLE)' >/dev/null 2>&1; then command -v "$$p"; break; fi; done)

# The tests run in parallel processes: one thread each is faster than all of them fighting for the cores.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: help quickstart test test-slow lint docs

help:
	@echo "make quickstart   train and evaluate on phantoms; results in output/quickstart"
	@echo "make test         the test suite"
	@echo "make test-slow    the tests that take minutes"
	@echo "make lint         ruff, ruff format, mypy"
	@echo "make docs         the documentation, in site/"

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "No usable Python found (tried: $(CANDIDATES)). Install Python 3.10 or newer with its venv module" \
	    "(Debian and Ubuntu: apt install python3-venv), or name one: make PYTHON=/path/to/python ..." >&2; exit 1; fi
	"$(PYTHON)" -m venv "$(VENV)"

# $(call install,extras): editable, so that the checkout is what runs
define install
"$(BIN)/python" -c 'import sys; sys.version_info >= (3, 10) or sys.exit("$(VENV) holds Python " + sys.version.split()[0] + ": 3.10 or newer is needed; remove the folder and run make again")'
"$(BIN)/python" -m pip install --quiet --editable '.$(1)'
rm -f "$(VENV)"/.installed-$(2)-*
touch "$@"
endef

$(VENV)/.installed-base-$(KEY): | $(BIN)/python
	$(call install,,base)

$(VENV)/.installed-dev-$(KEY): | $(BIN)/python
	$(call install,[dev],dev)

$(VENV)/.installed-docs-$(KEY): | $(BIN)/python
	$(call install,[docs],docs)

quickstart: $(VENV)/.installed-base-$(KEY)
	"$(BIN)/python" -m monai.bundle run training --config_file bundles/god_cxr/configs/train.json --output_dir output/quickstart

test: $(VENV)/.installed-dev-$(KEY)
	$(TEST_ENVIRONMENT) "$(BIN)/python" -m pytest -n 2

test-slow: $(VENV)/.installed-dev-$(KEY)
	$(TEST_ENVIRONMENT) "$(BIN)/python" -m pytest -n 2 -m slow

lint: $(VENV)/.installed-dev-$(KEY)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"

docs: $(VENV)/.installed-docs-$(KEY)
	"$(BIN)/mkdocs" build --strict --quiet
