# Everything is set up by the first target that needs it: `make demo` or `make test` alone on a fresh machine is enough.
# Needs GNU make and a Python >= 3.11 with venv; PYTHON=/path/to/python3.12 picks one by hand.
.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench faults clean
SHELL := /bin/bash

VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= $(firstword $(foreach name,python3 python3.11 python3.12 python3.13 python,$(shell \
	command -v $(name) >/dev/null 2>&1 && \
	$(name) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install --quiet --constraint constraints.txt
BENCH ?= hot_path

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

venv: $(VENV)/installed ## .venv with this package, its dependencies and the tools of the tests, versions as in constraints.txt

$(VENV)/installed: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python >= 3.11 with venv found. Install one (Debian: python3.11 and python3.11-venv) or set PYTHON=." >&2; \
		exit 1; fi
	@if ! $(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "PYTHON=$(PYTHON) is no Python >= 3.11 with venv (Debian: python3.11 and python3.11-venv)." >&2; \
		exit 1; fi
	@echo "Setting up $(VENV) with $(PYTHON); this takes a few minutes and about 2.5 GB the first time"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	touch $@

demo: venv ## train a click model with its tables spread over the tiers, and compare it with the best reachable AUC
	$(VENV)/bin/tiered-emb train

lint: venv ## ruff, mypy and the import contracts
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

test: lint ## lint, then the tests, in a process for each processor, four at most
	$(PY) -m pytest --numprocesses=logical --maxprocesses=4

# torchrec asks for fbgemm-gpu, the CUDA build, which would overwrite fbgemm-gpu-cpu: it is installed without dependencies,
# and what else it needs is in the extra (see pyproject.toml).
$(VENV)/installed-bench: $(VENV)/installed
	$(PY) -c 'import tomllib; extra = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench"]; \
		print(*(line for line in extra if not line.startswith("torchrec")), sep="\n")' > $(VENV)/bench.txt
	$(PIP) --requirement $(VENV)/bench.txt
	$(PIP) --no-deps torchrec
	touch $@

bench: $(VENV)/installed-bench ## the benchmark BENCH (default hot_path) beside its baselines
	$(PY) -m benchmarks $(BENCH)

faults: $(VENV)/installed ## all of the store's fault suites: kills, power cuts, full disks, damage; ends with a line of JSON
	$(PY) -m pytest tests/faults --all-faults --capture=no

clean: ## remove .venv and caches
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
