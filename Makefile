# `make demo` and `make test` set up everything they need in .venv; running them again is quick and safe.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-floor lint types layers check clean

demo: $(READY)
	@echo "== The embedded pair speaks; then what was measured =="
	$(BIN)/outrider generate --compare --prompt "Once upon a time, there was a little fox who" --temperature 0 --max-new-tokens 128

test: $(READY)
	@echo "== All tests (a few minutes on two cores) =="
	$(BIN)/python -m pytest

test-floor:
	@echo "== All tests on the oldest supported torch and transformers, in .venv-floor =="
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python -m pip install --quiet "torch==2.11.*"
	.venv-floor/bin/python -m pip install --quiet "transformers==5.17.*" -e ".[dev,bench]"
	.venv-floor/bin/python -m pytest

lint: $(READY)
	@echo "== Lint and format =="
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	@echo "== Types =="
	$(BIN)/mypy

layers: $(READY)
	@echo "== Layers =="
	$(BIN)/lint-imports

check: lint types layers test

clean:
	rm -rf $(VENV) .venv-floor

# torch first and by itself: a looser requirement would fetch a build with CUDA, gigabytes of it.
$(READY): pyproject.toml constraints.txt
	@echo "== Setting up $(VENV) with $(TORCH); the first time takes a few minutes =="
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) -c constraints.txt -e ".[dev,bench]"
	@touch $@
