# make demo | test | test-all | check. `test-all` tries
# many more random examples. The environment, .venv, is made on first use and after every change
# of pyproject.toml. TORCH is the version the project is tested with; a torch that is there stays.

PYTHON3 ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := test
.PHONY: demo test test-all check venv

demo: venv
	$(PYTHON) -m benchmarks.demo

test: venv
	$(PYTHON) -m pytest -q -n auto --dist worksteal

test-all: venv
	HYPOTHESIS_PROFILE=long $(PYTHON) -m pytest -q -n auto --dist worksteal

check: venv
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy --strict
	$(VENV)/bin/lint-imports

venv: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(PYTHON) -c "import torch" 2>/dev/null || $(PYTHON) -m pip install "$(TORCH)"
	$(PYTHON) -m pip install -e ".[dev]"
	touch $@
