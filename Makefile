# make demo | test | test-all | test-integrations | test-pages | check | gpu. `test-all` tries many
# more random examples, `test-integrations` runs the examples of docs/trainers in their frameworks,
# which it installs, `test-pages` opens pages in chromium, which has to be installed, `gpu` measures
# on the GPU of this machine (docs/benchmarks.md). The environment, .venv, is made on first use and
# after every change of pyproject.toml. TORCH is the version the project is tested with; a torch
# that is there stays.

PYTHON3 ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := test
.PHONY: demo test test-all test-integrations test-pages check gpu gpu-install gpu-tests gpu-steps gpu-offload gpu-published venv

demo: venv
	$(PYTHON) -m benchmarks.demo

test: venv
	$(PYTHON) -m pytest -q -n auto --dist worksteal

test-all: venv
	HYPOTHESIS_PROFILE=long $(PYTHON) -m pytest -q -n auto --dist worksteal

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
	$(PYTHON) -m mypy --strict
	$(VENV)/bin/lint-imports

# With the torch and triton of GPU_PYTHON, and without a network: WHEELS are files for what it lacks.
# GPU_TOGETHER is how many processes compile, or test, at the same time.
GPU_PYTHON ?= python3
WHEELS ?=
GPU_MODELS ?= gpt,llama,vit
GPU_WAYS ?= checkpoint,fxremat80%,fxremat50%
GPU_TOGETHER ?= 3
GPU_SETTINGS ?= 24-layers,qwen3-8b-16k
GPU := build/gpu
ON_GPU := PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU) PYTHONUNBUFFERED=1 $(GPU_PYTHON)

gpu: gpu-install
	$(MAKE) gpu-tests
	$(MAKE) gpu-steps
	$(MAKE) gpu-offload
	$(MAKE) gpu-published

gpu-install:
	rm -rf $(GPU)
	$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-build-isolation --target $(GPU) $(WHEELS) .

gpu-tests:
	$(ON_GPU) -m pytest -q -m gpu -n $(GPU_TOGETHER) -p no:cacheprovider

gpu-steps:
	$(ON_GPU) -m benchmarks.gpu --models $(GPU_MODELS) --ways $(GPU_WAYS) \
		--together $(GPU_TOGETHER) --out $(GPU)/gpu.json

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
