SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := router,worker,dev

.DEFAULT_GOAL := help
.PHONY: help setup up test check lint types imports pytest coverage format wheel clean bench-ttft bench-cache bench-index bench-tokenize bench-decision bench-cascade bench-relay load chaos prefix-report dashboards test-alerts fuzz

help: ## Show what each target does
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv and install kvway into it; does nothing when that is up to date

# The stamp comes last, so an interrupted install is done again.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing kvway and what it needs into $(VENV): a few minutes the first time.'
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

up: setup ## Start a router and two workers; ARGS="--replicas 3" for more (see kvway up --help)
	@exec $(BIN)/kvway up $(ARGS)

test: check pytest ## Run everything that CI runs: lint, types, imports, tests

check: lint types imports

lint: setup ## Check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup ## Check types
	$(BIN)/mypy

imports: setup ## Check that imports point one way
	$(BIN)/lint-imports --no-cache

pytest: check
	$(BIN)/python -m pytest $(ARGS)

coverage: setup ## Run the tests that start no processes and show the lines they miss
	$(BIN)/python -m pytest -m "not e2e and not packaging and not model" --cov --cov-report=term $(ARGS)

format: setup ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

wheel: setup ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## Remove everything that these targets made
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.*

chaos: setup ## Hurt a fleet of sim workers under load and compare the books; ARGS="--seed 1" for one again
	@$(BIN)/python -m loadtests.chaos $(ARGS)

bench-ttft: setup ## Measure warm against cold time to first token; ARGS="--pairs 20" for more
	@$(BIN)/python -m loadtests.bench_ttft $(ARGS)

bench-cache: setup ## Measure what the prefix cache costs and saves; ARGS="--only ttft" for parts
	@$(BIN)/python -m loadtests.bench_cache $(ARGS)

bench-index: setup ## Measure the router's block index; ARGS="--blocks 250000" for less
	@$(BIN)/python -m loadtests.bench_index $(ARGS)

bench-decision: setup ## Measure hash, match and choose; ARGS="--rounds 5" for less
	@$(BIN)/python -m loadtests.bench_decision $(ARGS)

bench-cascade: setup ## Measure cascade attention; ARGS="--only grid" for parts, "--publish" for the docs
	@$(BIN)/python -m loadtests.bench_cascade $(ARGS)

bench-tokenize: setup ## Measure tokenizing, whole and piece by piece; ARGS="--rounds 3" for less
	@$(BIN)/python -m loadtests.bench_tokenize $(ARGS)

dashboards: setup ## Write the Grafana dashboards anew
	@$(BIN)/python -m monitoring.dashboards

test-alerts: ## Test the Prometheus alerts; needs promtool (Debian: apt-get install prometheus)
	@command -v promtool > /dev/null || { echo 'promtool is not there: apt-get install prometheus'; exit 1; }
	promtool check rules monitoring/prometheus/alerts.yml
	promtool check config monitoring/prometheus/prometheus.yml
	promtool test rules monitoring/prometheus/alerts_test.yml

bench-relay: setup ## Measure what relaying costs, beside peers; ARGS="--only small" for parts
	@$(BIN)/python -m loadtests.bench_relay $(ARGS)

load: setup ## Hold streams, overload, slow readers, long bodies; ARGS="--seconds 20" for less
	@$(BIN)/python -m loadtests.load_run $(ARGS)

prefix-report: setup ## Measure how well prefix killers are found; ARGS="--cases 400" for more
	@$(BIN)/python -m loadtests.prefix_report $(ARGS)

fuzz: setup ## Send junk to router and worker; ARGS="--minutes 60" for long
	@$(BIN)/python -m loadtests.fuzz $(ARGS)
