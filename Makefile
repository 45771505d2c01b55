# Everything runs in .venv, which `make` builds once and again only when pyproject.toml or constraints.txt changed.
#   make train ARGS="scaling.workers=1 train.epochs=3"   other settings of the job
#   make test ARGS="-k batching"  arguments for pytest
#   make PYTHON=/path/to/python   another interpreter than the first one found that is new enough

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?=
JOB ?= jobs/digits.yaml
ARGS ?=

.PHONY: help install train test nightly gallery test-fast browser chaos bench docs lint types clean

help: ## list what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv and install raydist with its test tools

$(STAMP): pyproject.toml constraints.txt
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
	    for p in python3 python3.13 python3.12 python3.11; do \
	        if "$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$p; break; fi; \
	    done; \
	fi; \
	if [ -z "$$python" ]; then echo "raydist needs Python 3.11 or newer with its venv module: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "installing into $(VENV), once (a few minutes at most)"; \
	[ -x $(BIN)/python ] && [ -x $(BIN)/pip ] || "$$python" -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

train: $(STAMP) ## train the handwritten digits job: make train ARGS="scaling.workers=1"
	@$(BIN)/python jobs/data/digits.py
	$(BIN)/raydist train $(JOB) $(ARGS)

test: $(STAMP) ## run all tests but those marked nightly: two at a time, then one by one those that start Ray
	$(BIN)/python -m pytest -m "not (nightly or cluster)" -n 2 --dist worksteal $(ARGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m "cluster and not nightly" $(ARGS) || [ $$? = 5 ]

nightly: $(STAMP) browser ## run the tests that are too long for every change
	$(BIN)/python -m pytest -m nightly $(ARGS)

gallery: $(STAMP) ## train the jobs of jobs/README.md, the slow ones too, and check their figures
	$(BIN)/python -m pytest tests/jobs/test_gallery.py $(ARGS)

test-fast: $(STAMP) ## run the tests that start no Ray and take no time
	$(BIN)/python -m pytest -m "not (cluster or slow or gpu or nightly)" $(ARGS)

browser: ## get what the report's browser tests need: axe-core from npm, Chromium by apt-get where that may install
	@if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	fi
	@[ -d .browser/node_modules/axe-core ] || npm install --silent --no-save --no-audit --no-fund --prefix .browser axe-core@4.14

chaos: $(STAMP) ## break a small run in every way we know, kill it at random, and print one table
	$(BIN)/python jobs/chaos.py $(ARGS)

bench: $(STAMP) ## measure raydist beside torchrun, Ray Train and others: make bench ARGS="step --quick"
	$(BIN)/raydist bench $(ARGS)

docs: $(STAMP) ## build the pages of docs/ into site/ with mkdocs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

lint: $(STAMP) ## check style and formatting with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## check types with mypy
	$(BIN)/mypy

clean: ## remove .venv, caches and the digits data; runs stay
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis jobs/data/digits
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
