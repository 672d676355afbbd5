# `make test` and `make demo` set themselves up on an empty machine with Python 3.11 and make.

VENV   ?= .venv
PY     := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
# Most tests wait most of the time. Each worker has servers of its own; a file's tests stay together.
WORKERS ?= 2
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
READY  := $(VENV)/.made-from-requirements
ARGS   ?=
SHELL  := bash
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup fmt lint test test-fast sim demo bench bench-destinations bench-grpc chaos soak requirements audit clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r t d; do printf '  make %-18s %s\n' "$$t" "$$d"; done

$(READY): deploy/requirements/dev.txt .ci/setup-python pyproject.toml $(wildcard archiver/native/*.[ch])
	@.ci/setup-python

setup: $(READY) ## Python packages and the programs that the tests use; instant when nothing changed
	@.ci/setup-programs

fmt: $(READY) ## format and fix what can be fixed
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lint: $(READY) ## style, types, import directions
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

test: setup lint ## everything, with real servers, except chaos and soak; WORKERS=2
	$(PYTEST) $(SHARED) -m "not chaos and not soak" $(ARGS)

test-fast: $(READY) ## without servers: unit, contract, simulation; about a minute
	$(PYTEST) -q $(SHARED) -m "not servers and not chaos and not soak" tests/unit tests/contract tests/sim $(ARGS)

sim: $(READY) ## the simulation: fresh seeds (SEEDS=20000), or one schedule told step by step (SEED=7)
	$(PY) -m tests.sim $(ARGS) $(or $(SEED),--seeds $(or $(SEEDS),20000) --from $(or $(FROM),$(shell date +%s)000))

demo: $(READY) ## the daemon at work in under a minute; KEEP=1 leaves it running
	@$(PY) -m tests.demo $(if $(KEEP),--keep)

BENCH_FLAGS = $(PARTS) $(if $(ALL),--all) $(if $(QUICK),--quick) $(if $(FORCE),--force)
bench: setup ## throughput beside kcat, on a quiet machine; PARTS="codecs sizes", ALL=1, QUICK=1, FORCE=1
	$(PY) -m bench $(BENCH_FLAGS) $(ARGS)

bench-destinations: setup ## memory and throughput with 1,000, 10,000 and 100,000 destinations
	$(PY) -m bench destinations $(BENCH_FLAGS) $(ARGS)

bench-grpc: setup ## records a second of the gRPC source, beside echo servers
	$(PY) -m bench.grpc_bench $(ARGS)

chaos: setup ## kills, freezes, rebalances: KILLS=200 or MINUTES=, SEED=; OUTAGE_SECS=600 takes the store away
	$(if $(OUTAGE_SECS),OUTAGE_SECS=$(OUTAGE_SECS) $(PYTEST) -s tests/chaos/test_outage.py,$(PY) -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES),--kills $(or $(KILLS),200)))

soak: setup ## steady load, memory and handles told every minute: MINUTES=60; HOURS=10 on a made-up clock
	$(PY) -m $(if $(HOURS),tests.soak.hours --hours $(HOURS),tests.soak --minutes $(or $(MINUTES),60))

COMPILE := $(VENV)/bin/pip-compile --quiet --strip-extras --allow-unsafe --generate-hashes --no-annotate --no-header \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host
requirements: $(READY) ## pin the newest versions that pyproject.toml allows
	$(COMPILE) --upgrade --extra azure-identity -o deploy/requirements/core.txt pyproject.toml
	$(COMPILE) --upgrade --extra dev -c deploy/requirements/core.txt -o deploy/requirements/dev.txt pyproject.toml

audit: $(READY) ## known vulnerabilities of the pinned packages; asks the advisory database, so it needs the network
	$(PY) -m venv build/audit && build/audit/bin/pip install --quiet pip-audit
	build/audit/bin/pip-audit --disable-pip --require-hashes -r deploy/requirements/core.txt

clean: ## remove what tests and tools left behind, not the virtual environment
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist *.egg-info tests/logs
	find archiver tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
