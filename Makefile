# make test             the tests without the slow ones
# make test-all         all tests, and which took longest; one of 20 s has to be marked `slow`
# make test-long        the tests, with many random examples where there are a few otherwise
# make test-versions    the tests with each version of torch, and with Python 3.12 if that is there
# make test-integrations   the examples of docs/trainers, in the frameworks that it installs
# make test-pages       pages in chromium, which has to be installed
# make check            style, types, import contracts, and the size of the source tree
# make package          the files that a release uploads, checked
# make demo             trains a small GPT within a budget
# make gpu              training loops on the GPU of this machine (docs/benchmarks.md)
#
# `make test TORCH=torch==2.14.1` and `make test PYTHON3=python3.12` each take an environment of
# their own below build/. The default one is .venv; a torch that is there stays. Environments are
# made on first use and updated after every change of pyproject.toml.

DEFAULT_PYTHON3 := python3
DEFAULT_TORCH := torch==2.13.0
PYTHON3 ?= $(DEFAULT_PYTHON3)
TORCH ?= $(DEFAULT_TORCH)
ifeq ($(PYTHON3) $(TORCH),$(DEFAULT_PYTHON3) $(DEFAULT_TORCH))
VENV := .venv
else
VENV := build/$(notdir $(PYTHON3))-$(subst ==,-,$(notdir $(TORCH)))
endif
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTEST := $(PYTHON) -m pytest -q -n auto --dist worksteal
TORCHES ?= 2.11.0 2.13.0 2.14.1

.DEFAULT_GOAL := test
.PHONY: demo test test-all test-long test-versions test-integrations test-pages check package installed gpu \
	gpu-install gpu-plans gpu-tests gpu-offload gpu-published venv

demo: venv
	$(PYTHON) -m benchmarks.demo

test: venv
	$(PYTEST)

test-all: venv
	$(PYTEST) -m "not browser" --durations=25 --fail-slow 20

test-long: venv
	HYPOTHESIS_PROFILE=long $(PYTEST)

test-versions:
	for version in $(TORCHES); do $(MAKE) test TORCH=torch==$$version || exit 1; done
	if python3.12 -c "" 2>/dev/null; then $(MAKE) test PYTHON3=python3.12; fi

# In an environment of its own: the suite is to pass without these.
TRAINERS := build/trainers/bin/python

test-integrations: $(TRAINERS)
	$(TRAINERS) -m pytest -q -s tests/integrations

$(TRAINERS): pyproject.toml
	test -x $@ || $(PYTHON3) -m venv build/trainers
	$@ -m pip install -q "$(TORCH)"
	$@ -m pip install -q -e ".[trainers]" pytest
	$@ -c "import torchvision" 2>/dev/null || $@ -m pip uninstall -q -y torchvision  # for another torch
	touch $@

test-pages: venv
	$(PYTHON) -m pytest -q -m browser

check: venv
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy --strict
	$(VENV)/bin/lint-imports
	$(PYTHON) -m benchmarks.house --check

package: venv
	rm -rf dist
	$(PYTHON) -m build --outdir dist
	$(PYTHON) -m twine check --strict dist/*

# In an empty environment: torch, then the wheel, then the first example of the README.
INSTALLED := build/installed

installed: package
	rm -rf $(INSTALLED)
	$(PYTHON3) -m venv $(INSTALLED)
	$(INSTALLED)/bin/python -m pip install -q "$(TORCH)"
	$(INSTALLED)/bin/python -m pip install -q dist/*.whl
	cd $(INSTALLED) && bin/python $(CURDIR)/tests/installed.py $(lastword $(subst ==, ,$(TORCH)))

# With the torch and triton of GPU_PYTHON, and without a network: WHEELS are files for what it lacks.
# PLANS is a folder that `make gpu-plans` has filled, where there is no GPU, with the same torch; it
# may be left out. GPU_TOGETHER is how many processes compile, or test, at the same time.
GPU_PYTHON ?= python3
WHEELS ?=
PLANS ?=
CARD ?= H200
GPU_MINUTES ?= 9
GPU_TOGETHER ?= 6
GPU_SETTINGS ?= 24-layers,qwen3-8b-16k
GPU := build/gpu
ON_GPU := PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU) PYTHONUNBUFFERED=1 $(GPU_PYTHON)

gpu: gpu-install
	$(ON_GPU) -m benchmarks.gpu --minutes $(GPU_MINUTES) --together $(GPU_TOGETHER) \
		$(if $(PLANS),--plans $(PLANS)) --out $(GPU)/loops.json

gpu-plans: venv
	mkdir -p $(or $(PLANS),$(error PLANS=FOLDER says where to))
	TORCHINDUCTOR_CACHE_DIR=$(abspath $(PLANS))/cache $(PYTHON) -m benchmarks.loops \
		--loops adamw_fused --device $(CARD) --json $(PLANS)/loops.json

gpu-install:
	rm -rf $(GPU)
	$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-build-isolation --target $(GPU) $(WHEELS) .

gpu-tests:
	$(ON_GPU) -m pytest -q -m gpu -n $(GPU_TOGETHER) -p no:cacheprovider

gpu-offload:
	$(ON_GPU) -m benchmarks.offload measure --device cuda --dtype bfloat16 --size base --out $(GPU)/offload.json

gpu-published:
	$(ON_GPU) -m benchmarks.published --device cuda --settings $(GPU_SETTINGS) --out $(GPU)/published.json

venv: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(PYTHON) -c "import torch" 2>/dev/null || $(PYTHON) -m pip install "$(TORCH)"
	$(PYTHON) -m pip install -e ".[dev]"
	touch $@
